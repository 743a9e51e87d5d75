"""A packed micro-batch as Megatron's layers see it: sequences one after the other, each with positions of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from msrl.trainer.model.context import ContextShare


@dataclass(frozen=True)
class PackedSequences:
    """What every layer needs to know of a packed micro-batch; travels in Megatron's `packed_seq_params`.

    `qkv_format` tells Megatron to leave queries as [N, 1, h, d]: the rotation and the block-diagonal mask are applied here.
    """

    lengths: tuple[int, ...]  # of the sequences, their sum is N
    cos: Tensor  # [N, 1, 1, r], of each token's position in its own sequence
    sin: Tensor  # [N, 1, 1, r], the first of each pair negated: see `rotate`
    interleaved: bool = False  # whether pairs are neighbouring channels; else channel i goes with channel i + r / 2
    context: ContextShare | None = None  # under context parallelism: `lengths` are the padded ones, cos and sin of this rank's tokens
    qkv_format: str = "sbhd"
    cp_group: None = None


def of_rank(packed: PackedSequences, mine: ContextShare) -> PackedSequences:
    """The packing of a whole micro-batch as this rank needs it."""
    rows = mine.stand_ins
    return replace(packed, lengths=mine.lengths, cos=packed.cos[rows], sin=packed.sin[rows], context=mine)
