"""Interface of all weight sources, implemented in `source.py` and `distributed/source.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from msrl.checkpoint import tensor_layouts as layouts
from msrl.checkpoint.dtypes import cast_to, hf_name
from msrl.checkpoint.rank_shapes import padded_vocab_size
from msrl.checkpoint.torch_files.reader import Pieces, TensorSpec
from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.rules import Rule
from msrl.models.shape import Shape
from msrl.models.stages import stage_tensors


class WeightSource(ABC):
    """All weights of one model.

    `rule` is always a rule with global layer numbers, as `models.families.all_rules` returns them.
    """

    shape: Shape
    hf_dir: Path  # where config.json and the tokenizer are
    has_published_experts: bool = True
    """False for a folder whose experts have another form than the published one."""

    @abstractmethod
    def dtype(self, rule: Rule) -> torch.dtype:
        """Return the dtype of the tensor without reading it."""

    @abstractmethod
    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        """Return the Hugging Face tensors of the rule, in its order."""

    def hf_pieces(self, rule: Rule) -> tuple[Iterable[Tensor], ...]:
        """Return, for each of `hf_tensors`, the pieces that concatenate to it along its rows."""
        return tuple((tensor,) for tensor in self.hf_tensors(rule))

    def shard(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Tensor:
        """Return shard number `rank` of `size`, in Megatron's shape."""
        pieces = list(self.pieces(rule, rank, size, padded_vocab))
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def pieces(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Iterator[Tensor]:
        """Yield the pieces that concatenate to `shard` along its rows, each read on demand."""
        yield from layouts.pieces(rule.layout, self.hf_tensors(rule), rank, size, padded_vocab)

    def local_tensors(
        self,
        layout: ParallelLayout,
        at: Coords,
        dtype: torch.dtype | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one rank under Megatron's local names, in network order.

        They are cast to `dtype` unless it is None.

        Raises:
            ManyErrors: The parallel layout does not divide the model.
        """
        layout.check(self.shape)
        padded = padded_vocab_size(self.shape, layout.tp)
        for tensor in stage_tensors(self.shape, layout, at):
            shard = self.shard(tensor.rule, tensor.shard, tensor.num_shards, padded)
            target_dtype = cast_to(tensor.rule, dtype)
            yield tensor.name, shard if target_dtype is None else shard.to(target_dtype)

    def local_pieces(
        self,
        layout: ParallelLayout,
        at: Coords,
        dtype: torch.dtype | None,
        vocab_multiple: int | None,
    ) -> Iterator[tuple[str, Pieces]]:
        """Yield `local_tensors` as pieces to write, each read when the writer requests it."""
        padded = padded_vocab_size(self.shape, layout.tp, vocab_multiple)
        specs = self.local_specs(layout, at, dtype, vocab_multiple)
        for tensor in stage_tensors(self.shape, layout, at):
            pieces = self.pieces(tensor.rule, tensor.shard, tensor.num_shards, padded)
            yield tensor.name, self.checked_pieces(tensor.rule, specs[tensor.name], pieces)

    def checked_pieces(self, rule: Rule, spec: TensorSpec, pieces: Iterable[Tensor]) -> Pieces:
        """Return pieces of a tensor of `rule` that refuse NaN and infinity when they are written.

        A cast to float16 can overflow.
        """
        return Pieces(spec, pieces, partial(self._refuse_nonfinite, rule, spec.dtype))

    def _refuse_nonfinite(self, rule: Rule, dtype: torch.dtype) -> None:
        """Raise MsrlError with the name of a tensor that contains NaN or infinity as `dtype`."""
        names = rule.hf or (rule.mcore,)
        for name, tensor in zip(names, self.hf_tensors(rule), strict=False):
            if not tensor.isfinite().all():
                kind = "NaN" if tensor.isnan().any() else "infinity"
                raise MsrlError(
                    f"{self.hf_dir}: tensor {name} ({rule.mcore}) contains {kind}. Restore the "
                    "weights."
                )
            if not tensor.to(dtype).isfinite().all():
                raise MsrlError(
                    f"{self.hf_dir}: tensor {name} ({rule.mcore}) overflows {hf_name(dtype)}: its "
                    f"largest number is {tensor.abs().max().item():g}. Use --dtype bf16 or fp32."
                )

    def local_specs(
        self,
        layout: ParallelLayout,
        at: Coords,
        dtype: torch.dtype | None,
        vocab_multiple: int | None,
    ) -> dict[str, TensorSpec]:
        """Return types and shapes of `local_tensors` without reading them."""
        padded = padded_vocab_size(self.shape, layout.tp, vocab_multiple)
        return {
            tensor.name: TensorSpec(
                cast_to(tensor.rule, dtype) or self.dtype(tensor.rule),
                layouts.shard_shape(tensor.layout, tensor.rule.shapes, tensor.num_shards, padded),
            )
            for tensor in stage_tensors(self.shape, layout, at)
        }

    def main_dtype(self) -> torch.dtype:
        """Return the dtype of the embedding, which represents the dtype of the model."""
        return self.dtype(all_rules(self.shape)[0])


class ChangedSource(WeightSource):
    """Weights of `base`, some of whose tensors are others: `hf_tensors` returns them."""

    base: WeightSource

    @abstractmethod
    def changes(self, rule: Rule) -> bool:
        """Return True if the tensors of a rule differ from the tensors of `base`."""

    def hf_pieces(self, rule: Rule) -> tuple[Iterable[Tensor], ...]:
        return super().hf_pieces(rule) if self.changes(rule) else self.base.hf_pieces(rule)

    def pieces(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Iterator[Tensor]:
        pieces = super().pieces if self.changes(rule) else self.base.pieces
        yield from pieces(rule, rank, size, padded_vocab)
