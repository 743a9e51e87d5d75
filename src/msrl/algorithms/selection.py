"""Selection and weighting of training samples. P prompts, G completions per prompt."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from msrl.algorithms.token_rewards import Reals

Flags = NDArray[np.bool_]


def is_equal(scores: Reals, decided: Flags) -> Flags:  # [P, G] each -> [P]
    """Return the groups whose decided scores are all equal, or fewer than two."""
    highest = np.where(decided, scores, -np.inf).max(axis=1)
    return highest <= np.where(decided, scores, np.inf).min(axis=1)


def trained_samples(
    scores: Reals,  # [P, G]
    truncated: Flags,  # [P, G], True for truncated responses
    decided: Flags,  # [P, G], True for real scores
    *,
    drop_truncated: bool,
    drop_equal_groups: bool,
    difficulty: tuple[float, float] | None = None,
) -> Flags:  # [P, G]
    """Return the samples that count in the loss and in its denominators.

    Options drop truncated responses (overlong filtering, arXiv:2503.14476, section 3.4), groups of
    equal rewards, which are not informative, and groups whose mean reward is not strictly between
    the two bounds of `difficulty`. Only real scores count in these.
    """
    keep = ~truncated if drop_truncated else np.ones_like(truncated)
    if drop_equal_groups:
        keep &= ~is_equal(scores, decided)[:, None]
    if difficulty is not None:
        keep &= informative_groups(scores, decided, "mean", *difficulty)[:, None]
    return keep


def informative_groups(
    scores: Reals,  # [P, G]
    decided: Flags,  # [P, G], True for real scores
    kind: str,
    low: float | None = None,
    high: float | None = None,
) -> Flags:  # [P]
    """Return which groups are informative.

    `all_equal` drops groups of equal scores (dynamic sampling, arXiv:2503.14476, section 3.2),
    `mean` drops groups whose mean is not strictly between `low` and `high`, `std` drops groups
    whose population standard deviation is not above `low`, and `none` drops nothing. None disables
    a bound. Only real scores count, and a group without one is not informative.
    """
    if kind == "none":
        return np.ones(len(scores), dtype=np.bool_)
    if kind == "all_equal":
        return ~is_equal(scores, decided)
    counts = decided.sum(axis=1)
    values = np.where(decided, scores, 0.0)
    measure = values.sum(axis=1) / counts.clip(min=1)
    if kind == "std":
        squares = np.where(decided, (scores - measure[:, None]) ** 2, 0.0).sum(axis=1)
        # The deviation of equal numbers is not always 0 in floating point.
        measure = np.where(is_equal(scores, decided), 0.0, (squares / counts.clip(min=1)) ** 0.5)
    lower, upper = -np.inf if low is None else low, np.inf if high is None else high
    return (measure > lower) & (measure < upper) & (counts > 0)


def top_share(values: Reals, share: float) -> Flags:  # [N] -> [N]
    """Return which values belong to the highest `share` of them (arXiv:2506.01939)."""
    if not len(values):
        return np.zeros(0, dtype=np.bool_)
    return values >= np.quantile(values, 1.0 - share)


def sample_weights(
    lengths: NDArray[np.int64],  # [P, G]
    keep: Flags,  # [P, G]
    *,
    by_length: bool,
    difficulties: Reals | None = None,  # [P], 0 easy to 1 hard
) -> Reals:  # [P, G]
    """Return factors of the samples' policy loss with mean 1 over the selected samples of the step.

    The factor by difficulty d is 0.5 + 1.5 d. The factor by length falls from 1.5 for the shortest
    response to 0.5 for the longest. Both are multiplied.
    """
    weights = np.ones(lengths.shape)
    if difficulties is not None:
        weights *= 0.5 + 1.5 * difficulties.clip(0.0, 1.0)[:, None]
    if by_length and keep.any():
        shortest, longest = lengths[keep].min(), lengths[keep].max()
        weights *= 1.5 - ((lengths - shortest) / max(longest - shortest, 1)).clip(0.0, 1.0)
    return weights / weights[keep].mean() if keep.any() else weights
