"""The plain policy gradient (REINFORCE): a token's loss is -A log p. N tokens.

There is no ratio, so the gradient is right only for the policy that sampled: use one update per
rollout.
"""

from __future__ import annotations

from msrl.algorithms.tokens import PolicyTokens, TokenLosses

OWN_RATIO = True
NO_RATIO = True


def policy_loss(tokens: PolicyTokens) -> TokenLosses:
    """Return token losses without statistics."""
    return TokenLosses(-tokens.advantages * tokens.logprobs)
