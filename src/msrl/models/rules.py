"""Mapping of weights between Hugging Face and Megatron, used in both directions.

This module contains data only: one rule per Megatron tensor. A tensor layout describes a canonical
tensor with one tensor-parallel axis. `checkpoint/tensor_layouts.py` implements the operations:
`pieces` yields a shard along the axis from the Hugging Face tensors, `join` concatenates shards to
the canonical tensor, `split` reverses it, and `unfuse` returns the Hugging Face tensors.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Replicated:
    """Identical on every tensor-parallel rank (norms, biases of row-parallel layers)."""


@dataclass(frozen=True, slots=True)
class Joined(Replicated):
    """Hugging Face tensors concatenated by rows, `rows` of each.

    Identical on every tensor-parallel rank.
    """

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Zeros(Replicated):
    """`rows` numbers that exist in Megatron only: zero in every conversion.

    Identical on every tensor-parallel rank.
    """

    rows: int


@dataclass(frozen=True, slots=True)
class Sharded:
    """One Hugging Face tensor, sharded along `axis`.

    The axis is 0 for column-parallel weights and 1 for row-parallel ones. If `units` is set, it
    consists of that many equal units (query groups, for example), none of which is split. Messages
    call them `unit`.
    """

    axis: int
    units: int | None = None
    unit: str = "KV heads"


@dataclass(frozen=True, slots=True)
class Vocab:
    """[vocabulary, hidden] sharded along the vocabulary.

    The vocabulary is padded with zeros to a divisible size.
    """

    vocab_size: int


@dataclass(frozen=True, slots=True)
class Grouped:
    """Tensors fused by group, such as q, k and v by query group: [num_groups, sum of `sizes`, ...].

    `sizes` are the rows of each tensor per group. Groups, which messages call `unit`, are never
    split.
    """

    num_groups: int
    sizes: tuple[int, ...]
    unit: str = "KV heads"


@dataclass(frozen=True, slots=True)
class GateUp:
    """gate and up stacked: [2, ffn, hidden] sharded along ffn.

    A rank holds [its gate rows; its up rows].
    """


@dataclass(frozen=True, slots=True)
class Packed:
    """One Hugging Face tensor that contains all tensors of `layout`, `rows` of each.

    They are concatenated, or with `alternating` their rows alternate. `transposed` means that they
    are packed as columns instead of rows.
    """

    layout: Grouped | GateUp | Sharded
    rows: tuple[int, ...]
    alternating: bool = False
    transposed: bool = False

    def shapes(self, packed: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the tensors that are packed in a tensor of the shape `packed`."""
        columns = (packed[::-1] if self.transposed else packed)[1:]
        return tuple((rows, *columns) for rows in self.rows)


Layout = Replicated | Sharded | Vocab | Grouped | GateUp | Packed


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron tensor and the Hugging Face tensors that it consists of.

    `{layer}` in the names is the global layer number. `shapes` are the shapes of the Hugging
    Face tensors, in the order of `hf`. `NAME[3]` is entry 3 along the first axis of the tensor NAME
    (see `entries.py`).

    For a tensor of an expert, `expert` is its global number, and the names contain `{expert}`.
    Megatron's names follow its sequential experts:
    `decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight` and `linear_fc2`.

    `dtype` is set for a tensor that keeps this dtype regardless of the model's. A `frozen` tensor
    is not trained by the loss of the model.
    """

    mcore: str
    hf: tuple[str, ...]
    layout: Layout
    shapes: tuple[tuple[int, ...], ...]
    expert: int | None = None
    dtype: str | None = None
    frozen: bool = False

    @property
    def unpacked(self) -> tuple[Layout, tuple[tuple[int, ...], ...]]:
        """Layout and shapes of the tensors before they are packed, if they are."""
        if isinstance(self.layout, Packed):
            return self.layout.layout, self.layout.shapes(self.shapes[0])
        return self.layout, self.shapes

    def at(self, layer: int, expert: int | None = None) -> Rule:
        """Return this rule with layer and expert numbers filled in.

        `expert` defaults to the rule's own.
        """
        number = self.expert if expert is None else expert
        names = tuple([name.format(layer=layer, expert=number) for name in self.hf])
        own = (self.layout, self.shapes, self.expert, self.dtype, self.frozen)
        return Rule(self.mcore_at(layer, number), names, *own)

    def mcore_at(self, layer: int, expert: int | None = None) -> str:
        """Return Megatron's name with these numbers filled in."""
        return self.mcore.format(layer=layer, expert=expert)


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of a model, grouped by location: first pipeline stage, each layer, last stage.

    Identical layers share one tuple. A layer has either all of the model's experts or none.
    """

    first: tuple[Rule, ...]
    layers: tuple[tuple[Rule, ...], ...]
    last: tuple[Rule, ...]
