"""Adaptive KL coefficient (arXiv:1909.08593, section 2.2). Its state is one number."""

from __future__ import annotations

LARGEST_ERROR = 0.2


def adapted(
    factor: float,  # multiplies the configured coefficients; starts at 1
    divergence: float,  # mean KL per token of the step, in nats
    num_samples: int,  # of the step
    *,
    target: float,
    horizon: int,  # in samples
) -> float:
    """Return the factor of the next step: factor * (1 + e num_samples / horizon).

    The error is e = clip(divergence / target - 1, -0.2, 0.2).
    """
    error = min(max(divergence / target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
    return factor * (1.0 + error * num_samples / horizon)
