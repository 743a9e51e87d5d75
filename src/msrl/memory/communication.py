"""Bytes that context parallelism sends, computed from sizes.

Letters of `trainer/model/context.py`: c context-parallel ranks, n tokens of a rank, u ranks that
exchange tokens for heads, r = c / u ranks of a ring.
"""

from __future__ import annotations

from typing import NamedTuple

from msrl.errors import MsrlError
from msrl.memory.activations import Pass, Spread, key_heads
from msrl.memory.estimate import bytes_text, full_pass, spread_sizes
from msrl.models.shape import Attention, Mla
from msrl.plan.run_plan import RunPlan

_FP32_BYTES = _INT32_BYTES = 4


class SentBytes(NamedTuple):
    """Bytes that a rank sends in a layer, in the forward and in the backward pass."""

    forward: int
    backward: int


def sent_bytes(mixer: Attention | Mla, batch: Pass, spread: Spread) -> SentBytes:
    """Return what a rank sends to its context-parallel ranks in the attention of a layer.

    Recomputation sends the bytes of the forward pass once more.
    """
    tokens, element = batch.num_tokens // spread.cp, batch.element_bytes
    query_width, value_width = mixer.head_dim, mixer.head_dim
    heads, keys = mixer.num_heads // spread.tp, key_heads(mixer, spread)
    if isinstance(mixer, Mla):
        value_width, keys = mixer.v_head_dim, heads
    pairs = tokens * keys * (query_width + value_width)
    if spread.gathers_keys:
        gathered = (spread.cp - 1) * pairs * element
        return SentBytes(gathered, gathered)
    mixed = tokens * heads * (query_width + value_width)
    exchanged = (pairs + mixed) * element * (spread.head_ranks - 1) // spread.head_ranks
    gathered = (spread.cp - 1) * tokens * _indexer_bytes(mixer, batch)
    size = spread.ring_size
    traveling = (size - 1) * pairs * element
    # The gradients of keys and values, in float32, travel with them and then to their rank.
    gradients = size * pairs * _FP32_BYTES if size > 1 else 0
    forward = exchanged + traveling
    return SentBytes(forward + gathered, forward + gradients)


def _indexer_bytes(mixer: Attention | Mla, batch: Pass) -> int:
    """Return the bytes of a token that all ranks gather: its key of an indexer and its choice."""
    indexer = mixer.indexer if isinstance(mixer, Mla) else None
    if indexer is None or indexer.is_shared or batch.longest <= indexer.top_k:
        return 0
    return indexer.head_dim * batch.element_bytes + indexer.top_k * _INT32_BYTES


def communication_rows(plan: RunPlan) -> dict[str, str]:
    """Return the row of the plan on context parallelism; empty without it or for unknown lengths.

    Empty if the model is unreadable, which the checks report.
    """
    shape = plan.shape_or_none
    if not plan.is_training or shape is None or plan.train.parallel.cp == 1:
        return {}
    try:
        batch = full_pass(plan)
    except MsrlError:
        return {}
    if batch is None:
        return {}
    sent = sent_bytes(shape.attention, batch, spread_sizes(plan, shape))
    return {
        "context parallelism": f"{plan.train.parallel.cp_algo}; in the attention of a layer, a "
        f"rank sends {bytes_text(sent.forward)} forward and {bytes_text(sent.backward)} backward"
    }
