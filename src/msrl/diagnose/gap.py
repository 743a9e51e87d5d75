"""Differences of log-probabilities, and the range that rounding explains.

N tokens. What rounding changes depends on the model: its depth, its width and how sure it is of its
tokens. For bfloat16 it is measured, as the difference of one implementation from itself in float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from msrl.types import Floats


@dataclass(frozen=True, slots=True)
class HealthyRange:
    """Largest mean and 99th percentile of absolute differences that count as healthy, in nats."""

    mean: float
    p99: float


# For the same tokens scored by two implementations with the same weights, in nats per token: the
# largest values of small and medium models, rounded up. They apply where nothing is measured.
HEALTHY = {
    "float32": HealthyRange(2e-4, 2e-3),
    "float16": HealthyRange(4e-3, 4e-2),
    "bfloat16": HealthyRange(3e-2, 3e-1),
}


# Two implementations that round independently differ by 1.4 times what each of them rounds, and
# one of them may keep attention in float32, which the other one rounds.
_TIMES_ROUNDING = 2.0
_CLIP_RANGE = (0.8, 1.2)  # of the probability ratio in most policy losses


@dataclass(frozen=True, slots=True)
class Gap:
    """Mean, 99th percentile and maximum of absolute differences, in nats, and their number."""

    mean: float
    p99: float
    largest: float
    num_tokens: int

    def exceeds(self, limits: HealthyRange) -> bool:
        """Return True if rounding does not explain the differences."""
        return not (self.mean <= limits.mean and self.p99 <= limits.p99)


def measure(
    left: Floats,  # [N]
    right: Floats,  # [N]
) -> Gap:
    """Return the gap between log-probabilities. A value that is not a number counts as infinite."""
    if not len(left):
        return Gap(0.0, 0.0, 0.0, 0)
    with np.errstate(invalid="ignore"):
        difference = np.subtract(left, right, dtype=np.float64)
    np.absolute(difference, out=difference)
    # `mean` and `max` would add a layer of Python to these reductions.
    count, total = len(difference), float(np.add.reduce(difference))
    if math.isnan(total):
        difference, total = np.nan_to_num(difference, nan=np.inf), math.inf
    index = math.ceil(0.99 * (count - 1))  # numpy's percentile with method="higher", but faster
    difference.partition(index)
    largest = float(np.maximum.reduce(difference[index:]))
    return Gap(total / count, float(difference[index]), largest, count)


def healthy_range(*dtypes: str) -> HealthyRange:
    """Return the range of the least precise of these dtypes."""
    return max((HEALTHY[dtype] for dtype in dtypes), key=lambda limits: limits.mean)


def rounding_range(rounding: Gap) -> HealthyRange:
    """Return the range of two implementations that both round by this much."""
    return HealthyRange(_TIMES_ROUNDING * rounding.mean, _TIMES_ROUNDING * rounding.p99)


def share_outside_clip_range(
    sampled: Floats,  # [N]
    trainer: Floats,  # [N]
) -> float:
    """Return the share of tokens whose ratio of probabilities is outside of 0.8 to 1.2."""
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = np.exp(np.subtract(trainer, sampled, dtype=np.float64))
    low, high = _CLIP_RANGE
    return 1.0 - float(((ratio >= low) & (ratio <= high)).mean())
