"""What every source of weights is asked for, whatever the weights lie in; the sources are in
`source.py` and `dist_source.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from msrl.checkpoint.dtypes import cast_to
from msrl.checkpoint.rank_shapes import padded_vocab_size
from msrl.checkpoint.tensor_layouts import shard_shape
from msrl.checkpoint.torch_files.reader import Pieces, TensorSpec
from msrl.models.families import all_rules
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.rules import Rule
from msrl.models.shape import Shape
from msrl.models.stages import stage_tensors


class WeightSource(ABC):
    """All weights of one model. `rule` is always one with global layer numbers, as
    `models.families.all_rules` gives it.
    """

    shape: Shape
    hf_dir: Path  # where config.json and the tokenizer are

    @abstractmethod
    def dtype(self, rule: Rule) -> torch.dtype:
        """The type of the tensor, without reading it."""

    @abstractmethod
    def canonical(self, rule: Rule) -> Tensor:
        """The canonical tensor (see `checkpoint.layouts`)."""

    @abstractmethod
    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        """The Hugging Face tensors of the rule, in its order."""

    def hf_parts(self, rule: Rule) -> tuple[Iterable[Tensor], ...]:
        """What each of `hf_tensors` consists of, one above the other."""
        return tuple((tensor,) for tensor in self.hf_tensors(rule))

    @abstractmethod
    def shard(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Tensor:
        """Shard number `rank` of `size` in Megatron's shape."""

    def pieces(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Iterator[Tensor]:
        """What `shard` consists of, one above the other; nothing is read before it is asked for."""
        yield self.shard(rule, rank, size, padded_vocab)

    def local_tensors(
        self,
        cut: ParallelLayout,
        at: Coords,
        dtype: torch.dtype | None = None,
        vocab_multiple: int | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """What one rank of a cut holds, under Megatron's local names, in the order of the network.

        Cast to `dtype` unless it is None. Raises ManyErrors when the cut does not divide the model.
        """
        cut.check(self.shape)
        padded = padded_vocab_size(self.shape, cut.tp, vocab_multiple)
        for placed in stage_tensors(self.shape, cut, at):
            tensor = self.shard(placed.rule, placed.shard, placed.num_shards, padded)
            kind = cast_to(placed.rule, dtype)
            yield placed.name, tensor if kind is None else tensor.to(kind)

    def local_pieces(
        self, cut: ParallelLayout, at: Coords, dtype: torch.dtype | None, vocab_multiple: int | None
    ) -> Iterator[tuple[str, Pieces]]:
        """`local_tensors` to be written: no piece is read or made before the writer asks for it."""
        padded = padded_vocab_size(self.shape, cut.tp, vocab_multiple)
        specs = self.local_specs(cut, at, dtype, vocab_multiple)
        for placed in stage_tensors(self.shape, cut, at):
            yield (
                placed.name,
                Pieces(
                    specs[placed.name],
                    self.pieces(placed.rule, placed.shard, placed.num_shards, padded),
                ),
            )

    def local_specs(
        self, cut: ParallelLayout, at: Coords, dtype: torch.dtype | None, vocab_multiple: int | None
    ) -> dict[str, TensorSpec]:
        """Types and shapes of what `local_tensors` gives, without reading it."""
        padded = padded_vocab_size(self.shape, cut.tp, vocab_multiple)
        return {
            placed.name: TensorSpec(
                cast_to(placed.rule, dtype) or self.dtype(placed.rule),
                shard_shape(placed.layout, placed.rule.shapes, placed.num_shards, padded),
            )
            for placed in stage_tensors(self.shape, cut, at)
        }

    def main_dtype(self) -> torch.dtype:
        """The type of the embedding, which stands for that of the model."""
        return self.dtype(all_rules(self.shape)[0])
