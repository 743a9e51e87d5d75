"""The critic's loss and how well it explains returns. N tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from msrl.algorithms.token_rewards import Reals
from msrl.algorithms.tokens import TokenLosses, precise


def value_loss(
    values: Tensor,  # [N], differentiable
    old_values: Tensor,  # [N], of the critic before the first update on this rollout
    returns: Tensor,  # [N], what is to be predicted
    *,
    clip: float | None,
) -> TokenLosses:
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2) of every token (github.com/openai/baselines, ppo2).

    Without a clip it is the first alone. Reported: `value_clip_fraction`, tokens whose gradient the clip took away.
    """
    values, old_values, returns = precise(values), precise(old_values).detach(), precise(returns).detach()
    squared = (values - returns).square()
    if clip is None:
        return TokenLosses(squared / 2)
    held = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    stats = {"value_clip_fraction": (held > squared).to(values.dtype)}
    return TokenLosses(torch.maximum(squared, held) / 2, stats)


def explained_variance(values: Reals, returns: Reals) -> float:  # [N] each
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for one that says the same everywhere; 0 for returns that are all equal."""
    total = float(returns.var()) if len(returns) else 0.0
    return 1.0 - float((returns - values).var()) / total if total > 0 else 0.0
