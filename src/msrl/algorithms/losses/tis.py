"""Truncated importance sampling: a token's loss is -sg(min(r, 1)) A log p, sg a constant of the gradient. N tokens.

The policy gradient off-policy, with weights that cannot grow; unlike a clip it takes no token's gradient away.
"""

from __future__ import annotations

from msrl.algorithms.tokens import PolicyTokens, TokenLosses


def policy_loss(tokens: PolicyTokens, *, cap: float = 1.0) -> TokenLosses:
    """Ratios above `cap` count as `cap`. Reported: `clip_fraction`, tokens where they did."""
    ratio = tokens.log_ratio.detach().exp()
    cut = ((ratio > cap) & tokens.mask).to(ratio.dtype)
    return TokenLosses(-ratio.clamp(max=cap) * tokens.advantages * tokens.logprobs, {"clip_fraction": cut})
