"""GPG (arXiv:2504.02546): a token's loss is -A log p. N tokens.

It is `vanilla` under the name that goes with `algo.advantage.estimator: gpg`. There is no ratio, so
the gradient is right only for the policy that sampled: use one update per rollout.
"""

from __future__ import annotations

from msrl.algorithms.losses import vanilla
from msrl.algorithms.tokens import PolicyTokens, TokenLosses

OWN_RATIO = True
NO_RATIO = True


def policy_loss(tokens: PolicyTokens) -> TokenLosses:
    """Return token losses without statistics."""
    return vanilla.policy_loss(tokens)
