"""DPPO (arXiv:2602.04879) with binary divergences. N tokens.

The loss of a token is -sg(min(r, cap)) A log p, where sg stops the gradient. It is 0 if the update
has already moved the token's probability p in the direction of its advantage by more than the trust
region allows. `algo.clip.low` and `algo.clip.high` are the limits for negative and positive
advantages, on one of two divergences from the old probability q:

tv: |p - q|. kl: q log(q / p) + (1 - q) log((1 - q) / (1 - p)).

Unlike a range of ratios, these limits let rare tokens move and hold frequent ones.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from msrl.algorithms.tokens import LOG_RATIO_LIMIT, PolicyTokens, TokenLosses

OWN_RATIO = True
OPTION_RANGES = {"cap": (0.0, None)}
_EPS = 1e-8  # keeps the logarithm of 1 - p finite


def policy_loss(
    tokens: PolicyTokens,
    *,
    clip_low: float,
    clip_high: float,
    divergence: Literal["tv", "kl"] = "tv",
    cap: float = 20.0,
) -> TokenLosses:
    """Return token losses.

    Statistic: `clip_fraction`, the share of tokens outside the trust region.
    """
    if divergence not in ("tv", "kl"):
        raise ValueError(f"divergence={divergence}: must be tv or kl")
    log_ratio = tokens.token_log_ratio.detach()
    new, old = tokens.logprobs.detach(), tokens.logprobs.detach() - log_ratio
    distance = _total_variation(new, old) if divergence == "tv" else _binary_kl(new, old)
    rises = tokens.advantages > 0
    limit = torch.full_like(distance, clip_low).masked_fill(rises, clip_high)
    is_ahead = torch.where(rises, log_ratio > 0, log_ratio < 0)
    outside = is_ahead & (distance > limit) & tokens.mask
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
    weight = ratio.masked_fill(outside, 0.0)
    return TokenLosses(
        -weight * tokens.advantages * tokens.logprobs, {"clip_fraction": outside.to(ratio.dtype)}
    )


def _total_variation(new: Tensor, old: Tensor) -> Tensor:  # [N] each -> [N]
    return (new.exp() - old.exp()).abs()


def _binary_kl(new: Tensor, old: Tensor) -> Tensor:  # [N] each -> [N]
    """Return the divergence of two coins with the token's old and new probability."""
    rest_log_ratio = torch.log((1.0 - old.exp() + _EPS) / (1.0 - new.exp() + _EPS))
    token = (old.exp() * (old - new)).masked_fill(old.exp() == 0, 0.0)  # 0 log 0 is 0
    return token + (1.0 - old.exp()) * rest_log_ratio
