"""How the weights of a family map between Hugging Face and Megatron: data only, one rule per Megatron tensor, used in both directions.

A layout names a canonical tensor with one tensor-parallel axis. `checkpoint/layouts.py` does the arithmetic: `fuse` makes the
canonical tensor from the Hugging Face ones, `split` is a chunk along the axis, `join` a concatenation, `unfuse` the way back.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replicated:
    """The same on every tensor-parallel rank (norms, biases of row-parallel layers)."""


@dataclass(frozen=True, slots=True)
class Sharded:
    """One Hugging Face tensor, cut along `axis`: 0 for column-parallel weights, 1 for row-parallel ones."""

    axis: int


@dataclass(frozen=True, slots=True)
class Vocab:
    """[vocabulary, hidden] cut along the vocabulary, which is padded with zeros up to a size that divides."""

    vocab_size: int


@dataclass(frozen=True, slots=True)
class Qkv:
    """q, k and v fused by query group: [num_groups, (heads_per_group + 2) * head_dim, ...]; a rank holds whole groups."""

    num_groups: int
    heads_per_group: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class GateUp:
    """gate and up stacked: [2, ffn, hidden] cut along ffn, so that a rank holds [its gate rows; its up rows]."""


Layout = Replicated | Sharded | Vocab | Qkv | GateUp


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron tensor and the Hugging Face tensors it is made of. `{layer}` in the names is the global layer number.

    `shapes` are those of the Hugging Face tensors, in the order of `hf`.
    """

    mcore: str
    hf: tuple[str, ...]
    layout: Layout
    shapes: tuple[tuple[int, ...], ...]

    def at(self, layer: int) -> Rule:
        """This rule with its layer number filled in."""
        return Rule(self.mcore.format(layer=layer), tuple(name.format(layer=layer) for name in self.hf), self.layout, self.shapes)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a model by where they live: with the first pipeline stage, in every layer, with the last stage."""

    first: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    last: tuple[Rule, ...]
