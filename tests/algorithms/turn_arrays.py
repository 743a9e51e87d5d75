"""Turns without rewards of the environment or invalid actions."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from msrl.algorithms.turns import Turns


def make_turns(
    counts: ArrayLike,  # [P, G]
    lengths: ArrayLike,  # [K]
    states: ArrayLike,  # [K]
    tags: ArrayLike | None = None,  # [P], by default one tag
    complete: np.ndarray | None = None,  # [P, G], by default all
) -> Turns:
    """Return turns of episodes with these numbers of turns."""
    numbers = np.array(counts)
    num_prompts, num_turns = len(numbers), int(numbers.sum())
    return Turns(
        numbers,
        np.array(lengths),
        np.array(states),
        np.zeros(num_prompts, np.int64) if tags is None else np.array(tags),
        np.ones(numbers.shape, np.bool_) if complete is None else complete,
        np.zeros(num_turns),
        np.zeros(num_turns, np.bool_),
    )
