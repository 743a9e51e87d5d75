"""SAPO (arXiv:2511.20347): a smooth gate in place of a clip. N tokens.

The loss of a token is -g(r) A with the gate g(r) = sigmoid(tau (r - 1)) 4 / tau. Its slope is 1 at
r = 1 and decays on both sides. The temperature tau is `tau_positive` for positive advantages, else
`tau_negative`; larger temperatures decay faster. The paper averages over tokens, then sequences:
`algo.aggregate.mode: seq-mean-token-mean`.
"""

from __future__ import annotations

import torch

from msrl.algorithms.tokens import PolicyTokens, TokenLosses

OPTION_RANGES = {"tau_positive": (0.0, None), "tau_negative": (0.0, None)}


def policy_loss(
    tokens: PolicyTokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> TokenLosses:
    """Return token losses. Statistic: `gate_slope`, the mean slope of the gate."""
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    tau = torch.full_like(ratio, tau_negative).masked_fill(advantages > 0, tau_positive)
    share = torch.sigmoid(tau * (ratio - 1.0))
    slope = (4.0 * share * (1.0 - share)).detach().masked_fill(~tokens.mask, 0.0)
    return TokenLosses(-share * 4.0 / tau * advantages, {"gate_slope": slope})
