"""The plain policy gradient (REINFORCE): a token's loss is -A log p. N tokens.

There is no ratio: it is right for the policy that sampled, so for a single update of a rollout.
"""

from __future__ import annotations

from msrl.algorithms.tokens import PolicyTokens, TokenLosses

OWN_RATIO = True


def policy_loss(tokens: PolicyTokens) -> TokenLosses:
    """Nothing is clipped and nothing more is reported."""
    return TokenLosses(-tokens.advantages * tokens.logprobs)
