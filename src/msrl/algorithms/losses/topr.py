"""Tapered off-policy REINFORCE (TOPR, arXiv:2503.14286, equation 6). N tokens.

The loss of sequences with positive advantage is -A log p. Sequences with negative advantage have
the truncated ratio of the sequence as a weight: -sg(min(pi(y) / mu(y), 1)) A log p, where pi(y) /
mu(y) is the product of the token ratios and sg stops the gradient. ROLL (8eb27cc2) splits sequences
by their rewards: those with a reward of 0 or less have the weight.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from msrl.algorithms.tokens import LOG_RATIO_LIMIT, PolicyTokens, TokenLosses, sequence_sums

OWN_RATIO = True


def policy_loss(
    tokens: PolicyTokens,
    *,
    level: Literal["sequence", "token"] = "sequence",
    cap: float = 1.0,
    split: Literal["advantage", "reward"] = "advantage",
) -> TokenLosses:
    """Return token losses. `level: token` truncates each token's ratio instead.

    `split: reward` tapers the sequences with a reward of 0 or less, before normalization.

    Statistic: `taper`, the mean weight.
    """
    log_ratio = tokens.token_log_ratio.detach()
    if level == "sequence":
        log_ratio = sequence_sums(log_ratio, tokens.mask, tokens.sequences)
    elif level != "token":
        raise ValueError(f"level={level}: must be sequence or token")
    tapered = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
    weight = torch.where(_are_tapered(tokens, split), tapered, torch.ones_like(tapered))
    return TokenLosses(
        -weight * tokens.advantages * tokens.logprobs,
        {"taper": weight.masked_fill(~tokens.mask, 0.0)},
    )


def _are_tapered(tokens: PolicyTokens, split: str) -> Tensor:  # [N] bool
    if split == "advantage":
        return tokens.advantages < 0
    if split != "reward" or tokens.scores is None:
        raise ValueError(f"split={split}: must be advantage, or reward with the rewards")
    return tokens.scores <= 0
