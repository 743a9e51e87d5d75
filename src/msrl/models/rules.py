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
class Joined(Replicated):
    """Hugging Face tensors one above the other, `rows` of each, the same on every tensor-parallel rank."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Zeros(Replicated):
    """`rows` numbers that Megatron has and Hugging Face has not: zero in every conversion, the same on every tensor-parallel rank."""

    rows: int


@dataclass(frozen=True, slots=True)
class Sharded:
    """One Hugging Face tensor, cut along `axis`: 0 for column-parallel weights, 1 for row-parallel ones.

    Where `units` is given, so many equal parts (query groups, say) lie along the axis and each is left whole.
    """

    axis: int
    units: int | None = None


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


@dataclass(frozen=True, slots=True)
class Packed:
    """One Hugging Face tensor that holds the parts of `layout`, `rows` of each: one above the other or, `alternating`, row by row in turn.

    `transposed` says that they lie side by side, as columns.
    """

    layout: Qkv | GateUp | Sharded
    rows: tuple[int, ...]
    alternating: bool = False
    transposed: bool = False

    def shapes(self, packed: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shapes of the parts of a tensor of the shape `packed`."""
        rest = (packed[::-1] if self.transposed else packed)[1:]
        return tuple((rows, *rest) for rows in self.rows)


Layout = Replicated | Sharded | Vocab | Qkv | GateUp | Packed


@dataclass(frozen=True, slots=True)
class Rule:
    """One Megatron tensor and the Hugging Face tensors it is made of.

    `{layer}` in the names is the global layer number. `shapes` are those of the Hugging Face tensors, in the order of `hf`; `NAME[3]` is
    entry 3 along the first axis of the tensor NAME (see `entries.py`).
    A tensor of one expert has its global number as `expert`, and `{expert}` in its names; Megatron's own, in sequential order, are
    `decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight` and `linear_fc2`.
    `dtype` is the type that the tensor has whatever the type of the model, if there is one.
    """

    mcore: str
    hf: tuple[str, ...]
    layout: Layout
    shapes: tuple[tuple[int, ...], ...]
    expert: int | None = None
    dtype: str | None = None

    @property
    def unpacked(self) -> tuple[Layout, tuple[tuple[int, ...], ...]]:
        """Layout and shapes of what is put together, whether it lies in tensors of its own or packed in one."""
        if isinstance(self.layout, Packed):
            return self.layout.layout, self.layout.shapes(self.shapes[0])
        return self.layout, self.shapes

    def at(self, layer: int, expert: int | None = None) -> Rule:
        """This rule with its layer and expert numbers filled in; `expert` (default: its own) is what the names say."""
        number = self.expert if expert is None else expert
        names = tuple([name.format(layer=layer, expert=number) for name in self.hf])
        return Rule(self.mcore_at(layer, number), names, self.layout, self.shapes, self.expert, self.dtype)

    def mcore_at(self, layer: int, expert: int | None = None) -> str:
        """Megatron's name with these numbers filled in."""
        return self.mcore.format(layer=layer, expert=expert)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a model by where they live: with the first pipeline stage, in each layer by its number, with the last stage.

    Layers that are alike share one tuple. A layer either has all of the model's experts or none.
    """

    first: tuple[Rule, ...]
    layers: tuple[tuple[Rule, ...], ...]
    last: tuple[Rule, ...]
