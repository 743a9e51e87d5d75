"""Confidence intervals of accuracies: the score interval of Wilson (JASA 22, 1927, p. 209).

The mean p of P values in [0, 1], one per prompt, has the interval of a share of n trials:

    (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

With values 0 and 1, n is P. Other values vary less between prompts: n is then the number of trials
whose share would vary as much as their mean, p (1 - p) / (s^2 / P), which is at least P, and at
most the number of responses. Prompts, not responses, are the independent units (arXiv:2411.00640).
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray


def mean_interval(
    values: NDArray[np.float64],  # [P]
    num_samples: int,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Return the interval of the mean of P values in [0, 1], each from `num_samples` responses."""
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    mean, count = float(values.mean()), len(values)
    bernoulli, variance = mean * (1.0 - mean), float(values.var())
    trials = float(count)
    if bernoulli > 0.0:
        limit = float(count * num_samples)
        trials = min(limit, bernoulli * count / variance) if variance > 0.0 else limit
    spread = z * math.sqrt(max(bernoulli, 0.0) / trials + z * z / (4.0 * trials * trials))
    center, scale = mean + z * z / (2.0 * trials), 1.0 + z * z / trials
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)
