"""GMPO (arXiv:2507.20673, equation 5). N tokens, S sequences.

The ratio is the geometric mean of a sequence's clipped token ratios.

The loss of a sequence is -A exp(mean over tokens of s min(s log r, s clip(log r, -low, high))) with
s the sign of A. `algo.clip` has widths in log space (0.4 in the paper). Every token of the sequence
carries this loss; seq-mean-token-mean gives the paper's objective.

The paper has one advantage per sequence, and its root of a product does not split into terms of
single tokens. Advantages, weights and filters that differ by token are therefore refused with this
loss.
"""

from __future__ import annotations

import torch

from msrl.algorithms.tokens import LOG_RATIO_LIMIT, PolicyTokens, TokenLosses, sequence_means

OWN_RATIO = True
ONE_ADVANTAGE = True


def policy_loss(tokens: PolicyTokens, *, clip_low: float, clip_high: float) -> TokenLosses:
    """Return token losses. Statistic: `clip_fraction`, tokens whose gradient the clip removes."""
    log_ratio, sign = tokens.token_log_ratio, tokens.advantages.sign()
    plain, clipped = sign * log_ratio, sign * log_ratio.clamp(-clip_low, clip_high)
    surrogate = sign * torch.minimum(plain, clipped)
    mean = sequence_means(surrogate, tokens.mask, tokens.sequences).clamp(
        -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT
    )
    return TokenLosses(
        -mean.exp() * tokens.advantages, {"clip_fraction": (clipped < plain).to(log_ratio.dtype)}
    )
