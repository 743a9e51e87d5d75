"""Clip-Cov (arXiv:2505.22617). N tokens.

It is the clipped loss of `ppo` without a dual clip. In addition, a random `share` of the tokens
loses its gradient. They are drawn from the tokens that the clip keeps and whose covariance of
advantage and log-probability is between `low` and `high`: their updates lower the entropy most.

Tokens are selected within a micro-batch, so results depend on its size (`_covariance.py`). The
random numbers of the draw belong to the tokens, whatever the micro-batch and the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from msrl.algorithms.losses import ppo
from msrl.algorithms.losses._covariance import covariances, share_count
from msrl.algorithms.tokens import PolicyTokens, TokenLosses

SELECTS_TOKENS = True
DRAWS_TOKENS = True
OPTION_RANGES = {"share": (0.0, 1.0)}


def policy_loss(
    tokens: PolicyTokens,
    *,
    clip_low: float,
    clip_high: float,
    draws: Tensor,  # [N], a random number of each token
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
) -> TokenLosses:
    """Return token losses.

    Statistics: `clip_fraction`, tokens whose gradient the clip removes, and `covariance_fraction`,
    tokens that the covariance selects.
    """
    clipped = ppo.policy_loss(tokens, clip_low=clip_low, clip_high=clip_high, dual=None)
    covariance = covariances(tokens)
    is_candidate = (covariance > low) & (covariance < high) & (clipped.stats["clip_fraction"] == 0)
    selected = _drawn(is_candidate & tokens.mask, draws, share_count(tokens, share))
    stats = {**clipped.stats, "covariance_fraction": selected.to(clipped.loss.dtype)}
    return TokenLosses(clipped.loss.masked_fill(selected, 0.0), stats)


def _drawn(
    candidates: Tensor,  # [N] bool
    draws: Tensor,  # [N]
    count: int,
) -> Tensor:  # [N] bool
    """Return the `count` candidates with the smallest random numbers."""
    positions = candidates.nonzero().flatten()
    selected = torch.zeros_like(candidates)
    selected[positions[draws[positions].argsort(stable=True)[:count]]] = True
    return selected
