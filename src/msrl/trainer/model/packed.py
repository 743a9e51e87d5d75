"""Packed micro-batch of Megatron's layers: concatenated sequences, each with separate positions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.nn import Module

from msrl.models.shape import Rotary
from msrl.trainer.model.context import ContextShare
from msrl.trainer.model.prefixes import SharedRows


class TokenRoutes(Protocol):
    """Routes of a micro-batch's tokens on this rank, which the routers of its layers consult."""

    def choose(self, layer: int, experts: Tensor) -> Tensor:
        """Return the experts to use.

        Args:
            layer: Number of the layer among the mixture layers of the model.
            experts: The router's own choice, [n, k].

        Returns:
            Numbers of experts, [n, k].
        """
        ...


class TokenImages(Protocol):
    """Images of a micro-batch on this rank, which the embedding and some layers consult."""

    def merge(self, embedded: Tensor, tower: Module, first: int) -> Tensor:
        """Return the embeddings with the features of the tower at the image tokens.

        Args:
            embedded: Embeddings [s, 1, c] of this rank.
            tower: The vision tower.
            first: Number of the first of these rows among those of a sequence-parallel group.
        """
        ...

    def add(self, layer: int, hidden: Tensor) -> Tensor:
        """Return the hidden states [s, 1, c] after a layer that adds deeper features."""
        ...


class Rotation(NamedTuple):
    """Angles by which a rotary embedding rotates the tokens of a micro-batch."""

    cos: Tensor  # [N, 1, 1, r], of each token's position in its own sequence
    sin: Tensor  # [N, 1, 1, r], the first of each pair negated: see `rotate`
    # True: pairs are neighboring channels. False: channel i is paired with channel i + r / 2.
    interleaved: bool = False
    query_scale: Tensor | None = None  # [N, 1, 1, 1], if the queries grow with the position

    def select(self, rows: Tensor) -> Rotation:
        """Return the rotation of some of the tokens."""
        scale = None if self.query_scale is None else self.query_scale[rows]
        return Rotation(self.cos[rows], self.sin[rows], self.interleaved, scale)


@dataclass(frozen=True)
class PackedSequences:
    """Description of a packed micro-batch, which Megatron passes as `packed_seq_params`.

    Letters: N tokens of the micro-batch, n of them on this rank, G groups of tokens among which the
    load of experts is balanced. `qkv_format` tells Megatron to leave queries as [N, 1, h, d]: the
    rotation and the block-diagonal mask are applied in our attention.
    """

    lengths: tuple[int, ...]  # of the sequences, their sum is N
    rotations: Mapping[Rotary, Rotation]  # of each rotary embedding of the model
    # Under context parallelism, `lengths` are padded, and rotations are of this rank's tokens.
    context: ContextShare | None = None
    # Rows that several sequences share, also in rotations; None if each token has its own.
    shared: SharedRows | None = None
    # [n, G] bool, members of each group; None outside training passes (see `balance.py`).
    expert_groups: Tensor | None = None
    # [n] bool, tokens that train the indexers; None outside training passes, and if these are
    # frozen (see `indexer_loss.py`)
    trained_tokens: Tensor | None = None
    # Record or replay of experts; None lets the routers choose (see `routes.py`).
    routes: TokenRoutes | None = None
    # Images, if the micro-batch has some (see `vision/images.py`).
    images: TokenImages | None = None
    # Chosen keys of the tokens by the number of the layer whose indexer chose them, for layers
    # after it that share the choice (see `mixers/sparse_attention.py`).
    choices: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    qkv_format: str = "sbhd"
    cp_group: None = None


def select_share(packed: PackedSequences, share: ContextShare) -> PackedSequences:
    """Return the packing of a full micro-batch restricted to the tokens of this rank."""
    rotations = _select(packed.rotations, share.clamped_rows)
    return replace(packed, lengths=share.lengths, rotations=rotations, context=share)


def share_rows(packed: PackedSequences, shared: SharedRows) -> PackedSequences:
    """Return the packing of a full micro-batch with positions of rows instead of tokens."""
    rotations = _select(packed.rotations, shared.first_tokens)
    return replace(packed, rotations=rotations, shared=shared)


def _select(rotations: Mapping[Rotary, Rotation], rows: Tensor) -> dict[Rotary, Rotation]:
    return {rotary: rotation.select(rows) for rotary, rotation in rotations.items()}


def equal_runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of equal neighboring lengths as (length, count)."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][0] == length:
            runs[-1] = (length, runs[-1][1] + 1)
        else:
            runs.append((length, 1))
    return runs
