"""Estimators of KL(policy || reference) per token from log-probabilities of sampled tokens (http://joschu.net/blog/kl-approx.html).

N tokens; d = policy logprob - reference logprob. k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.
As other systems do, so that coefficients keep their meaning: k3 takes d clamped to +-20 and is cut at 10; where a clamp holds, the
gradient is zero. The others are not clamped.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from msrl.errors import MsrlError, nearest

Estimator = Literal["k1", "abs", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = get_args(Estimator)
K3_LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


def per_token(
    estimator: str,
    logprobs: Tensor,  # [N] of the policy, differentiable
    reference_logprobs: Tensor,  # [N]
    mask: Tensor,  # [N] bool
) -> Tensor:  # [N]
    """The estimate at every token, exactly 0 (and without gradient) where `mask` is False, whatever stands there.

    k1 has the right value but, as a loss, a gradient of zero mean: it serves as a reward penalty or a metric.
    Raises MsrlError for an unknown estimator.
    """
    if estimator not in ESTIMATORS:
        raise MsrlError(f"algo.kl: {estimator!r} is no KL estimator; {nearest(estimator, ESTIMATORS)}")
    difference = (logprobs - reference_logprobs.detach()).masked_fill(~mask, 0.0)
    if difference.dtype not in (torch.float32, torch.float64):
        difference = difference.float()
    return _estimate(estimator, difference)


def _estimate(estimator: str, difference: Tensor) -> Tensor:
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return difference.square() / 2
    bounded = difference.clamp(-K3_LOG_RATIO_LIMIT, K3_LOG_RATIO_LIMIT)
    return ((-bounded).exp() - 1.0 + bounded).clamp(max=K3_LIMIT)
