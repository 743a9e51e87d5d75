"""What is added to the scores of the sources: overlong punishment, reward of shortness, penalty of form. P prompts, G completions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from msrl.rewards.verifiers import format as form

Reals = NDArray[np.float64]


def overlong(
    lengths: Reals,  # [P, G] response tokens
    *,
    limit: int,
    buffer: int,
    factor: float,
) -> Reals:  # [P, G]
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13): 0 up to `limit` - `buffer` tokens, from there down to -1 at `limit`,
    never lower; times `factor`. A buffer of 0 is off.
    """
    if buffer == 0:
        return np.zeros_like(lengths)
    return -factor * ((lengths - (limit - buffer)) / buffer).clip(0.0, 1.0)


def shortness(
    lengths: Reals,  # [P, G] response tokens
    right: NDArray[np.bool_],  # [P, G]
    *,
    coef: float,
) -> Reals:  # [P, G]
    """Kimi k1.5's reward of length (arXiv:2501.12599, section 2.3.3): 0.5 for the shortest of a group to -0.5 for the longest.

    A response that is not right gets no more than 0. Times `coef`; a group of equal lengths gets 0.
    """
    low, high = lengths.min(axis=1, keepdims=True), lengths.max(axis=1, keepdims=True)
    reward = 0.5 - (lengths - low) / np.maximum(high - low, 1.0)
    reward = np.where(right, reward, np.minimum(reward, 0.0))
    return coef * np.where(high > low, reward, 0.0)


def form_penalty(responses: Sequence[Sequence[str]], *, penalty: float) -> Reals:  # [P, G]
    """-`penalty` for every response that is not of the form of the verifier `format`."""
    return np.array([[0.0 if form.score(text, "") == 1.0 else -penalty for text in group] for group in responses])
