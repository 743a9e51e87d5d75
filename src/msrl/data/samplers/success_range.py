"""Prompts whose success rate is in a range, and those without a measurement."""

from __future__ import annotations

import numpy as np

from msrl.data.samplers.base import Floats, Pool

OPTION_RANGES = {"low": (-1e-9, 1), "high": (-1e-9, 1), "outside": (-1e-9, 1)}


def pools(
    success: Floats,  # [N]
    *,
    low: float = 0.2,
    high: float = 0.8,
    outside: float = 0.1,
) -> tuple[Pool, ...]:
    """Return the prompts from `low` to `high`, and all others with the share `outside`."""
    is_inside = np.isnan(success) | ((success >= low) & (success <= high))
    return Pool(is_inside, 1 - outside), Pool(~is_inside, outside)
