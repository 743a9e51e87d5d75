"""KL-Cov (arXiv:2505.22617). N tokens.

The loss of a token is -r A. The `share` of tokens with the highest covariance of advantage and
log-probability gets the penalty `coef` |log r| in addition: their updates lower the entropy most.

Tokens are selected within a micro-batch, so results depend on its size (`_covariance.py`).
"""

from __future__ import annotations

import torch

from msrl.algorithms.losses._covariance import covariances, share_count
from msrl.algorithms.tokens import PolicyTokens, TokenLosses

SELECTS_TOKENS = True
OPTION_RANGES = {"share": (0.0, 1.0), "coef": (0.0, None)}


def policy_loss(tokens: PolicyTokens, *, share: float = 2e-4, coef: float = 1.0) -> TokenLosses:
    """Return token losses. Statistic: `covariance_fraction`, tokens with the penalty."""
    covariance = covariances(tokens)
    selected = torch.zeros_like(tokens.mask)
    count = min(share_count(tokens, share), len(covariance))
    selected[covariance.topk(count).indices] = True
    selected &= tokens.mask
    penalty = coef * tokens.log_ratio.abs().masked_fill(~selected, 0.0)
    plain = -tokens.log_ratio.exp() * tokens.advantages
    return TokenLosses(plain + penalty, {"covariance_fraction": selected.to(plain.dtype)})
