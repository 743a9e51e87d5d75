"""CPGD (arXiv:2505.12504). N tokens, d = log r.

CPGD clips the log-ratio instead of the ratio and penalizes drift from the old policy.

A token's loss is -min(d A, clip(d, log(1 - low), log(1 + high)) A) + drift * D(d). D estimates
KL(old || new) by e^d - 1 - d, whose gradient e^d - 1 is capped at `drift_clip` as in the paper:
beyond it D is linear.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from msrl.algorithms.tokens import PolicyTokens, TokenLosses


def policy_loss(
    tokens: PolicyTokens,
    *,
    clip_low: float,
    clip_high: float,
    drift: float = 0.01,
    drift_clip: float = 0.2,
) -> TokenLosses:
    """Return token losses.

    Statistics: `clip_fraction`, the share of tokens whose gradient the clip removes, and
    `policy_drift`, the mean of D.
    """
    log_ratio, advantages = tokens.log_ratio, tokens.advantages
    plain = log_ratio * advantages
    clipped = (
        log_ratio.clamp(math.log1p(-clip_low) if clip_low < 1 else -math.inf, math.log1p(clip_high))
        * advantages
    )
    distance = policy_drift(log_ratio, drift_clip)
    stats = {"clip_fraction": (clipped < plain).to(plain.dtype), "policy_drift": distance.detach()}
    return TokenLosses(-torch.minimum(plain, clipped) + drift * distance, stats)


def policy_drift(log_ratio: Tensor, cap: float) -> Tensor:  # [N] -> [N]
    """Return D(d), whose derivative is min(e^d - 1, cap)."""
    knee = math.log1p(cap)
    bounded = log_ratio.clamp(max=knee)
    return bounded.exp() - 1.0 - bounded + cap * (log_ratio - bounded)
