"""LoRA adapters merged into weights on the CPU: W' = W + s B A, per Hugging Face tensor
(arXiv:2106.09685, section 4.1).

A is [r, in], B is [out, r], W is [out, in]; s = alpha / r, or alpha / sqrt(r) for rank-stabilised
LoRA (arXiv:2312.03732). The sum is taken in float32 and rounded once to the type of W. Files of
adapters: `lora_files` and `peft_files`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from msrl.checkpoint import tensor_layouts as layouts
from msrl.checkpoint.dtypes import same_bits
from msrl.checkpoint.source import WeightSource
from msrl.errors import ManyErrors, MsrlError
from msrl.models.families import all_rules
from msrl.models.rules import Rule

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one weight gets added: `scale` * b @ a, with a [r, in] and b [out, r]."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.b.shape[0], self.a.shape[1]

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def equals(self, other: Delta) -> bool:
        """Whether both have the same bits."""
        return (
            self.scale == other.scale and same_bits(self.a, other.a) and same_bits(self.b, other.b)
        )

    def added_to(self, weight: Tensor, compute: torch.dtype = torch.float32) -> Tensor:
        """`weight` with the delta, computed in `compute` and rounded to the type of `weight`."""
        product = self.b.to(compute) @ self.a.to(compute)
        return torch.add(weight.to(compute), product, alpha=self.scale).to(weight.dtype)


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a whole model: deltas by the Hugging Face names of the weights, and weights
    that stand in the place of the model's.

    `where` is the folder that it was read from; `alpha` is what the folder says, for those who
    write it again.
    """

    where: str
    alpha: float
    deltas: Mapping[str, Delta]
    replaced: Mapping[str, Tensor]

    def check(self, rules: Iterable[Rule]) -> None:
        """Raises MsrlError that names every tensor which the model has no place for, or in another
        shape.
        """
        shapes = {
            name: shape for rule in rules for name, shape in zip(rule.hf, rule.shapes, strict=True)
        }
        found = {name: delta.shape for name, delta in self.deltas.items()} | {
            n: tuple(t.shape) for n, t in self.replaced.items()
        }
        problems = [
            f"{self.where}: adapts {name}, which the model does not have"
            for name in found
            if name not in shapes
        ]
        problems += [
            f"{self.where}: its {name} is {list(shape)}, but the model's is {list(shapes[name])}"
            for name, shape in found.items()
            if name in shapes and shape != shapes[name]
        ]
        if len(problems) > 1:
            raise ManyErrors(problems[:20])
        if problems:
            raise MsrlError(problems[0])

    def tied(self) -> Adapter:
        """For a model that ties its output layer to its embedding: the adapter without a copy of
        the latter that it has as output layer.

        Raises MsrlError where it holds only one of the two, or they differ: PEFT's model is then
        not tied any more.
        """
        embedding, head = (self.replaced.get(name) for name in (_EMBEDDING, _HEAD))
        if embedding is None and head is None:
            return self
        if embedding is None or head is None or not torch.equal(embedding, head):
            why = "holds the embedding and the output layer whole, or one of them, and they are not alike, but the model ties them"
            raise MsrlError(f"{self.where}: {why}; train it with PEFT's ensure_weight_tying")
        return replace(
            self, replaced={name: tensor for name, tensor in self.replaced.items() if name != _HEAD}
        )

    def summary(self) -> str:
        """`rank 16, scale 2, 96 weights`."""
        ranks = "/".join(map(str, sorted({delta.rank for delta in self.deltas.values()})))
        scales = "/".join(
            f"{scale:g}" for scale in sorted({delta.scale for delta in self.deltas.values()})
        )
        whole = f", {len(self.replaced)} weights whole" if self.replaced else ""
        return f"rank {ranks}, scale {scales}, {len(self.deltas)} weights{whole}"


class MergedSource(WeightSource):
    """The weights of `base` with an adapter merged into them, in the types of `base`."""

    def __init__(self, base: WeightSource, adapter: Adapter, *, hf_dir: Path | None = None) -> None:
        """`hf_dir` has config and tokenizer, where they are not those of `base`. Raises MsrlError
        when the adapter is of another model.
        """
        adapter = adapter.tied() if base.shape.tie_word_embeddings else adapter
        adapter.check(all_rules(base.shape))
        self.base, self.adapter = base, adapter
        self.shape, self.hf_dir = base.shape, hf_dir or base.hf_dir

    def dtype(self, rule: Rule) -> torch.dtype:
        return self.base.dtype(rule)

    def canonical(self, rule: Rule) -> Tensor:
        return (
            layouts.fuse(rule.layout, self.hf_tensors(rule))
            if self._touches(rule)
            else self.base.canonical(rule)
        )

    def hf_tensors(self, rule: Rule) -> tuple[Tensor, ...]:
        return self.merged(rule, torch.float32)

    def hf_parts(self, rule: Rule) -> tuple[Iterable[Tensor], ...]:
        return super().hf_parts(rule) if self._touches(rule) else self.base.hf_parts(rule)

    def shard(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Tensor:
        if self._touches(rule):
            return layouts.shard(rule.layout, self.hf_tensors(rule), rank, size, padded_vocab)
        return self.base.shard(rule, rank, size, padded_vocab)

    def pieces(self, rule: Rule, rank: int, size: int, padded_vocab: int) -> Iterator[Tensor]:
        if self._touches(rule):
            yield from layouts.pieces(rule.layout, self.hf_tensors(rule), rank, size, padded_vocab)
        else:
            yield from self.base.pieces(rule, rank, size, padded_vocab)

    def merged(self, rule: Rule, compute: torch.dtype) -> tuple[Tensor, ...]:
        """The Hugging Face tensors of a rule with the sum taken in `compute`."""
        return tuple(
            self._merged(name, tensor, compute)
            for name, tensor in zip(rule.hf, self.base.hf_tensors(rule), strict=True)
        )

    def _merged(self, name: str, tensor: Tensor, compute: torch.dtype) -> Tensor:
        if name in self.adapter.replaced:
            tensor = self.adapter.replaced[name].to(tensor.dtype)
        delta = self.adapter.deltas.get(name)
        return tensor if delta is None else delta.added_to(tensor, compute)

    def _touches(self, rule: Rule) -> bool:
        return any(name in self.adapter.deltas or name in self.adapter.replaced for name in rule.hf)
