"""Clipped policy loss (arXiv:1707.06347, equation 7).

With clip-higher (arXiv:2503.14476) and dual clip (arXiv:1912.09729).

N tokens of a packed micro-batch. A token's loss is -min(r A, clip(r, 1 - low, 1 + high) A); with a
dual clip c, the loss of tokens with negative advantage is at most -c A. With the ratio of sequences
this is GSPO (arXiv:2507.18071), and GSPO-token (its section 4.3) where advantages differ by token:
the sign of each token's advantage decides its clip.
"""

from __future__ import annotations

import torch

from msrl.algorithms.tokens import PolicyTokens, TokenLosses


def policy_loss(
    tokens: PolicyTokens, *, clip_low: float, clip_high: float, dual: float | None
) -> TokenLosses:
    """Return token losses.

    Statistics: `clip_fraction` and `dual_clip_fraction`, the shares of tokens whose gradient each
    clip removes.

    Raises:
        ValueError: the dual clip is not above 1 + clip_high, so it would narrow the ordinary range.
    """
    if dual is not None and dual <= 1.0 + clip_high:
        raise ValueError(
            f"dual={dual}: the dual clip must be above 1 + clip_high = {1.0 + clip_high}"
        )
    ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    surrogate = torch.minimum(plain, clipped)
    stats = {"clip_fraction": (clipped < plain).to(ratio.dtype)}
    if dual is not None:
        floor = dual * advantages
        stats["dual_clip_fraction"] = ((advantages < 0) & (surrogate < floor)).to(ratio.dtype)
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, floor), surrogate)
    return TokenLosses(-surrogate, stats)
