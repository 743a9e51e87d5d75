"""Tapered off-policy REINFORCE (TOPR, arXiv:2503.14286, equation 6). N tokens.

Sequences of positive advantage are learnt as they are, -A log p; those of negative advantage with the truncated ratio of the whole
sequence, -sg(min(pi(y) / mu(y), 1)) A log p, where pi(y) / mu(y) is the product of its tokens' ratios and sg a constant of the gradient.
"""

from __future__ import annotations

from typing import Literal

import torch

from msrl.algorithms.tokens import LOG_RATIO_LIMIT, PolicyTokens, TokenLosses, sequence_sums

OWN_RATIO = True


def policy_loss(tokens: PolicyTokens, *, level: Literal["sequence", "token"] = "sequence", cap: float = 1.0) -> TokenLosses:
    """`level: token` truncates the ratio of each token instead. Reported: `taper`, the mean weight, below 1 where negatives are tapered."""
    log_ratio = tokens.token_log_ratio.detach()
    if level == "sequence":
        log_ratio = sequence_sums(log_ratio, tokens.mask, tokens.sequences)
    elif level != "token":
        raise ValueError(f"level={level}: must be sequence or token")
    tapered = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
    weight = torch.where(tokens.advantages < 0, tapered, torch.ones_like(tapered))
    return TokenLosses(-weight * tokens.advantages * tokens.logprobs, {"taper": weight.masked_fill(~tokens.mask, 0.0)})
