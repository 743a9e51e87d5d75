"""The clipped policy loss (arXiv:1707.06347, equation 7), clip-higher (arXiv:2503.14476) and dual clip (arXiv:1912.09729).

N tokens of a packed micro-batch. A token's loss is -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logprob - old logprob);
with a dual clip c, tokens of negative advantage lose at most -c A.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from msrl.algorithms.aggregate import token_mean

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`loss` is this micro-batch's share of the global mean; the rest are detached sums over its tokens, to be added up and divided."""

    loss: Tensor  # scalar, differentiable
    clip_fraction_sum: Tensor  # scalar; tokens where the clip took the gradient away
    dual_clip_fraction_sum: Tensor  # scalar; tokens where the dual clip did
    approx_kl_sum: Tensor  # scalar; r - 1 - log r, an unbiased estimate of KL(old || new)
    ratio_sum: Tensor  # scalar


def policy_loss(
    logprobs: Tensor,  # [N] of the policy in training, differentiable
    old_logprobs: Tensor,  # [N] of the policy before the first update of this rollout
    advantages: Tensor,  # [N]
    mask: Tensor,  # [N] bool
    *,
    clip_low: float,
    clip_high: float,
    dual: float | None = None,
    num_tokens: float,
) -> PolicyLoss:
    """The sum over masked-in tokens divided by `num_tokens`, which counts the tokens of the whole update (all ranks, all micro-batches).

    So the losses and gradients of the micro-batches of an update add up to the same, however it is split. Masked-out positions
    are replaced before any exp or product: whatever stands there (NaN too) reaches neither the loss nor a gradient.
    log r is clamped to +-20, which only matters where exp would overflow; a token beyond has no gradient.
    Raises ValueError for a dual clip that is not above 1 + clip_high, which would cut the ordinary range.
    """
    if dual is not None and dual <= 1.0 + clip_high:
        raise ValueError(f"the dual clip is {dual}, but has to be above 1 + clip_high = {1.0 + clip_high}")
    log_ratio = (_precise(logprobs) - _precise(old_logprobs).detach()).masked_fill(~mask, 0.0)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    advantages = _precise(advantages).detach().masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    surrogate = torch.minimum(plain, clipped)
    floored = torch.zeros_like(mask)
    if dual is not None:
        floor = dual * advantages
        floored = (advantages < 0) & (surrogate < floor)
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, floor), surrogate)
    return PolicyLoss(
        loss=token_mean(-surrogate, mask, num_tokens=num_tokens),
        clip_fraction_sum=(clipped < plain).sum().to(ratio.dtype).detach(),
        dual_clip_fraction_sum=floored.sum().to(ratio.dtype).detach(),
        approx_kl_sum=(ratio - 1.0 - log_ratio).detach().sum(),
        ratio_sum=ratio.detach().masked_fill(~mask, 0.0).sum(),
    )


def _precise(values: Tensor) -> Tensor:
    """At least float32: half precision has too few digits for a difference of log-probabilities."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
