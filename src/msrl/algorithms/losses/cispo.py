"""CISPO (MiniMax-M1, arXiv:2506.13585, equations 4 and 5). N tokens.

The loss of a token is -sg(clip(r, 1 - low, 1 + high)) A log p.

sg stops the gradient: the weight is clipped, but no token loses its gradient. The paper has no
lower bound (low = 1).
"""

from __future__ import annotations

from msrl.algorithms.tokens import PolicyTokens, TokenLosses


def policy_loss(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """Return token losses.

    Statistic: `clip_fraction`, the share of tokens with a clipped weight.
    """
    ratio = tokens.log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLosses(
        -weight * tokens.advantages * tokens.logprobs,
        {"clip_fraction": (weight != ratio).to(ratio.dtype)},
    )
