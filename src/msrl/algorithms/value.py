"""Value loss of the critic, and the explained variance of its predictions. N tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from msrl.algorithms.token_rewards import Reals
from msrl.algorithms.tokens import TokenLosses, precise


def value_loss(
    values: Tensor,  # [N], differentiable
    old_values: Tensor,  # [N] of the critic before the first update of this rollout
    returns: Tensor,  # [N], the targets
    *,
    clip: float | None,
) -> TokenLosses:
    """Return the clipped value loss of every token (github.com/openai/baselines, ppo2).

    The loss is 0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2). `clip` None disables the
    second term. Statistic: `value_clip_fraction`, the share of tokens whose gradient is zero
    because of the clip.
    """
    values, old_values, returns = (
        precise(values),
        precise(old_values).detach(),
        precise(returns).detach(),
    )
    squared = (values - returns).square()
    if clip is None:
        return TokenLosses(squared / 2)
    clipped = (values.clamp(old_values - clip, old_values + clip) - returns).square()
    stats = {"value_clip_fraction": (clipped > squared).to(values.dtype)}
    return TokenLosses(torch.maximum(squared, clipped) / 2, stats)


def explained_variance(values: Reals, returns: Reals) -> float:  # [N] each
    """Return the explained variance, 1 - Var(R - V) / Var(R).

    It is 1 for a perfect critic, 0 for a constant one, and 0 if all returns are equal.
    """
    total = float(returns.var()) if len(returns) else 0.0
    return 1.0 - float((returns - values).var()) / total if total > 0 else 0.0
