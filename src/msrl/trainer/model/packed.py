"""Packed micro-batch of Megatron's layers: concatenated sequences, each with separate positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

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


@dataclass(frozen=True)
class PackedSequences:
    """Description of a packed micro-batch, which Megatron passes as `packed_seq_params`.

    Letters: N tokens of the micro-batch, n of them on this rank, G groups of tokens among which the
    load of experts is balanced. `qkv_format` tells Megatron to leave queries as [N, 1, h, d]: the
    rotation and the block-diagonal mask are applied in our attention.
    """

    lengths: tuple[int, ...]  # of the sequences, their sum is N
    cos: Tensor  # [N, 1, 1, r], of each token's position in its own sequence
    sin: Tensor  # [N, 1, 1, r], the first of each pair negated: see `rotate`
    # True: pairs are neighboring channels. False: channel i is paired with channel i + r / 2.
    interleaved: bool = False
    # Under context parallelism, `lengths` are padded, and cos and sin are of this rank's tokens.
    context: ContextShare | None = None
    # Rows that several sequences share, also in cos and sin; None if each token has its own.
    shared: SharedRows | None = None
    # [n, G] bool, members of each group; None outside training passes (see `balance.py`).
    expert_groups: Tensor | None = None
    # Record or replay of experts; None lets the routers choose (see `routes.py`).
    routes: TokenRoutes | None = None
    qkv_format: str = "sbhd"
    cp_group: None = None


def select_share(packed: PackedSequences, share: ContextShare) -> PackedSequences:
    """Return the packing of a full micro-batch restricted to the tokens of this rank."""
    rows = share.clamped_rows
    return replace(
        packed, lengths=share.lengths, cos=packed.cos[rows], sin=packed.sin[rows], context=share
    )


def share_rows(packed: PackedSequences, shared: SharedRows) -> PackedSequences:
    """Return the packing of a full micro-batch with positions of rows instead of tokens."""
    first = shared.first_tokens
    return replace(packed, cos=packed.cos[first], sin=packed.sin[first], shared=shared)


def equal_runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return runs of equal neighboring lengths as (length, count)."""
    runs: list[tuple[int, int]] = []
    for length in lengths:
        if runs and runs[-1][0] == length:
            runs[-1] = (length, runs[-1][1] + 1)
        else:
            runs.append((length, 1))
    return runs
