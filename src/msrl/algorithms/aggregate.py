"""Aggregation of token losses.

Each token's weight is known before the update is split, so splitting never changes the result.

S sequences of an update over all ranks and micro-batches, n_i loss tokens of sequence i, N tokens
of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from msrl.config.sections.algo import AggregationMode as Mode

MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, slots=True)
class AveragingGroup:
    """Sequences of an update whose tokens are averaged first, and the weight of their mean."""

    sequences: tuple[int, ...]  # indices
    weight: float = 1.0


def sequence_weights(
    num_tokens: Sequence[int],  # [S], 0 for masked sequences
    mode: Mode,
    *,
    constant: float | None = None,
    groups: Sequence[AveragingGroup] = (),
) -> NDArray[np.float64]:  # [S]
    """Return the weight of each token of every sequence.

    The aggregated loss is the sum of weight times loss over all tokens.

    token-mean: 1 / sum of n (arXiv:2503.14476). seq-mean-token-mean: 1 / (S n_i)
    (arXiv:2402.03300). seq-mean-token-sum: 1 / S. seq-sum-over-constant: 1 / constant
    (arXiv:2503.20783). S counts the sequences that have a loss token. micro-batch-mean: the
    weighted mean over `groups` of the means over their tokens, without groups that have none.

    Raises:
        ValueError: if no sequence has a loss token, or the constant or the groups are missing.
    """
    counts = np.asarray(num_tokens, dtype=np.float64)
    num_sequences = np.count_nonzero(counts)
    if not num_sequences:
        raise ValueError("an update needs at least one token that is not masked")
    if mode == "token-mean":
        return np.full(len(counts), 1.0 / counts.sum())
    if mode == "seq-mean-token-mean":
        return 1.0 / (num_sequences * np.maximum(counts, 1.0))
    if mode == "seq-mean-token-sum":
        return np.full(len(counts), 1.0 / num_sequences)
    if mode == "micro-batch-mean":
        return _group_means(counts, groups)
    if constant is None or constant <= 0:
        raise ValueError(f"constant={constant}: seq-sum-over-constant divides by it")
    return np.full(len(counts), 1.0 / constant)


def _group_means(
    counts: NDArray[np.float64],  # [S]
    groups: Sequence[AveragingGroup],
) -> NDArray[np.float64]:  # [S]
    weights, total = np.zeros(len(counts)), 0.0
    for group in groups:
        rows = list(group.sequences)
        if num_tokens := counts[rows].sum():
            weights[rows] = group.weight / num_tokens
            total += group.weight
    if not total or np.any((counts > 0) & (weights == 0)):
        raise ValueError("micro-batch-mean needs a group for every sequence")
    return weights / total


def weighted_sum(
    values: Tensor,  # [N]
    weights: Tensor,  # [N]
    mask: Tensor,  # [N] bool
) -> Tensor:  # scalar
    """Return this micro-batch's share of the aggregated loss.

    Values at masked positions are ignored, even NaN.
    """
    return (values.masked_fill(~mask, 0.0) * weights.masked_fill(~mask, 0.0)).sum()
