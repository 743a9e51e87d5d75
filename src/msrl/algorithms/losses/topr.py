"""Tapered off-policy REINFORCE (TOPR, arXiv:2503.14286, equation 6). N tokens.

The loss of sequences with positive advantage is -A log p. Sequences with negative advantage have
the truncated ratio of the sequence as a weight: -sg(min(pi(y) / mu(y), 1)) A log p, where pi(y) /
mu(y) is the product of the token ratios and sg stops the gradient.
"""

from __future__ import annotations

from typing import Literal

import torch

from msrl.algorithms.tokens import LOG_RATIO_LIMIT, PolicyTokens, TokenLosses, sequence_sums

OWN_RATIO = True


def policy_loss(
    tokens: PolicyTokens, *, level: Literal["sequence", "token"] = "sequence", cap: float = 1.0
) -> TokenLosses:
    """Return token losses. `level: token` truncates each token's ratio instead.

    Statistic: `taper`, the mean weight.
    """
    log_ratio = tokens.token_log_ratio.detach()
    if level == "sequence":
        log_ratio = sequence_sums(log_ratio, tokens.mask, tokens.sequences)
    elif level != "token":
        raise ValueError(f"level={level}: must be sequence or token")
    tapered = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
    weight = torch.where(tokens.advantages < 0, tapered, torch.ones_like(tapered))
    return TokenLosses(
        -weight * tokens.advantages * tokens.logprobs,
        {"taper": weight.masked_fill(~tokens.mask, 0.0)},
    )
