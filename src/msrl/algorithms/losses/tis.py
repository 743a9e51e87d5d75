"""Truncated importance sampling. N tokens.

The loss of a token is -sg(min(r, 1)) A log p, where sg stops the gradient.

This is the off-policy policy gradient with bounded weights. Unlike a clip it removes no token's
gradient.
"""

from __future__ import annotations

from msrl.algorithms.tokens import PolicyTokens, TokenLosses


def policy_loss(tokens: PolicyTokens, *, cap: float = 1.0) -> TokenLosses:
    """Return token losses with ratios of at most `cap`.

    Statistic: `clip_fraction`, the share of tokens whose ratio is truncated.
    """
    ratio = tokens.log_ratio.detach().exp()
    truncated = ((ratio > cap) & tokens.mask).to(ratio.dtype)
    return TokenLosses(
        -ratio.clamp(max=cap) * tokens.advantages * tokens.logprobs, {"clip_fraction": truncated}
    )
