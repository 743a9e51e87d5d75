"""Covariance of advantage and log-probability, which selects tokens in clip_cov and kl_cov.

Source: arXiv:2505.22617. N tokens. The means are those of a micro-batch, as in verl and
the paper's code, so results depend on the size of a micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from msrl.algorithms.tokens import PolicyTokens


def covariances(tokens: PolicyTokens) -> Tensor:  # [N]
    """Return (A - mean A) (log p - mean log p) per token; -inf at masked positions."""
    mask, count = tokens.mask, tokens.mask.sum().clamp(min=1)
    logprobs = tokens.logprobs.detach()
    advantages = tokens.advantages - tokens.advantages.sum() / count
    return (advantages * (logprobs - logprobs.sum() / count)).masked_fill(~mask, -torch.inf)


def share_count(tokens: PolicyTokens, share: float) -> int:
    """Return the number of tokens in a share of the micro-batch, at least 1."""
    return max(int(share * int(tokens.mask.sum())), 1)
