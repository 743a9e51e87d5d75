"""Estimators of KL(policy || reference) per token from sampled tokens.

Source: http://joschu.net/blog/kl-approx.html.

N tokens; d = policy logprob - reference logprob. k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1
+ d. k1+ and k3+ have the value of k1 and k3 and the gradient of k2, which is an unbiased gradient
of the divergence for tokens of the current policy.

As in verl and ROLL, k3 clamps d to +-20 and its value to 10, so that coefficients keep their
meaning. The gradient is zero where a clamp applies. The other estimators are not clamped.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from msrl.errors import MsrlError, nearest

Estimator = Literal["k1", "abs", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
STRAIGHT_THROUGH = {"k1+": "k1", "k3+": "k3"}
K3_LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


def per_token(
    estimator: str,
    logprobs: Tensor,  # [N] of the policy, differentiable
    reference_logprobs: Tensor,  # [N]
    mask: Tensor,  # [N] bool
) -> Tensor:  # [N]
    """Return the estimate at every token: exactly 0, without gradient, where `mask` is False.

    As a loss, k1 has a gradient of zero mean. Use it as a reward penalty or a metric.

    Raises:
        MsrlError: if the estimator is unknown.
    """
    known = (*ESTIMATORS, *STRAIGHT_THROUGH)
    if estimator not in known:
        raise MsrlError(
            f"algo.kl: {estimator!r} is not a KL estimator; {nearest(estimator, known)}"
        )
    difference = (logprobs - reference_logprobs.detach()).masked_fill(~mask, 0.0)
    if difference.dtype not in (torch.float32, torch.float64):
        difference = difference.float()
    if estimator not in STRAIGHT_THROUGH:
        return _estimate(estimator, difference)
    gradient = _estimate("k2", difference)
    value = _estimate(STRAIGHT_THROUGH[estimator], difference.detach())
    return gradient - gradient.detach() + value


def _estimate(estimator: str, difference: Tensor) -> Tensor:
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return difference.square() / 2
    bounded = difference.clamp(-K3_LOG_RATIO_LIMIT, K3_LOG_RATIO_LIMIT)
    return ((-bounded).exp() - 1.0 + bounded).clamp(max=K3_LIMIT)
