"""Which samples are learnt from, and how much each counts. P prompts, G completions of each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from msrl.algorithms.token_rewards import Reals

Flags = NDArray[np.bool_]


def kept(
    scores: Reals,  # [P, G]
    truncated: Flags,  # [P, G], True where the response was cut at its longest length
    *,
    drop_truncated: bool,
    drop_equal_groups: bool,
    difficulty: tuple[float, float] | None = None,
) -> Flags:  # [P, G]
    """Which samples have a part in the loss and in its denominators.

    Left out are, if so wished: truncated responses (overlong filtering, arXiv:2503.14476, section 3.4); groups of equal rewards, which
    teach nothing; groups whose mean reward is not strictly between the two bounds of `difficulty`.
    """
    keep = ~truncated if drop_truncated else np.ones_like(truncated)
    if drop_equal_groups:
        keep &= scores.max(axis=1, keepdims=True) != scores.min(axis=1, keepdims=True)
    if difficulty is not None:
        means = scores.mean(axis=1, keepdims=True)
        keep &= (means > difficulty[0]) & (means < difficulty[1])
    return keep


def teaching(scores: Reals, kind: str, low: float | None = None, high: float | None = None) -> Flags:  # [P, G] -> [P]
    """Which groups there is something to learn from: `all_equal` leaves out those of equal scores (dynamic sampling, arXiv:2503.14476,
    section 3.2), `mean` those whose mean is not strictly between `low` and `high`, `std` those whose deviation (of the population) is
    not above `low`, `none` nothing. A bound that is None is none.
    """
    if kind == "none":
        return np.ones(len(scores), dtype=np.bool_)
    if kind == "all_equal":
        return scores.max(axis=1) != scores.min(axis=1)
    is_equal = scores.max(axis=1) == scores.min(axis=1)  # the deviation of equal numbers is not always 0 in floating point
    measured = scores.mean(axis=1) if kind == "mean" else np.where(is_equal, 0.0, scores.std(axis=1))
    return (measured > (-np.inf if low is None else low)) & (measured < (np.inf if high is None else high))


def sample_weights(
    lengths: NDArray[np.int64],  # [P, G]
    keep: Flags,  # [P, G]
    *,
    by_length: bool,
    difficulties: Reals | None = None,  # [P], 0 easy to 1 hard
) -> Reals:  # [P, G]
    """Factors of the samples' policy loss, of mean 1 over the kept samples of the step.

    By difficulty 0.5 + 1.5 d; by length 1.5 for the shortest down to 0.5 for the longest response; both: their product.
    """
    weights = np.ones(lengths.shape)
    if difficulties is not None:
        weights *= 0.5 + 1.5 * difficulties.clip(0.0, 1.0)[:, None]
    if by_length and keep.any():
        shortest, longest = lengths[keep].min(), lengths[keep].max()
        weights *= 1.5 - ((lengths - shortest) / max(longest - shortest, 1)).clip(0.0, 1.0)
    return weights / weights[keep].mean() if keep.any() else weights
