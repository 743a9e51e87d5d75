"""Log-linear approximation of the proximal policy of decoupled PPO (arXiv:2110.00641).

Decoupled PPO clips the ratio of the current policy to a proximal one, the policy before the first
update of a step, and corrects with the ratio of the proximal policy to the behavior policy that
sampled. Between the two, log-probabilities are assumed to be linear in the policy version:

log p_prox = log p_behavior + a (log p - log p_behavior),
a = (v_prox - v_behavior) / (v - v_behavior).

v_prox is the version of the step. Update u of U in the step trains version v = v_prox + u / U. T
tokens of a sequence.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from msrl.algorithms.tokens import precise
from msrl.types import Floats


def proximal_shares(
    behavior_versions: Floats,  # [T], of the policy that sampled each token
    version: int,  # of the step
    fraction: float,  # of the step's updates that are done
) -> Floats:  # [T], from 0 to 1
    """Return the share a of the current policy in the proximal policy, for each token.

    It is 1 before the first update, when the proximal policy is the current one.
    """
    if fraction == 0.0:
        return np.ones_like(behavior_versions)
    staleness = version - behavior_versions
    return (staleness / (staleness + fraction)).astype(np.float32)


def log_linear(
    logprobs: Tensor,  # [N] of the policy in training
    behavior_logprobs: Tensor,  # [N] of the policy that sampled
    shares: Tensor,  # [N]
) -> Tensor:  # [N]
    """Return the approximate log-probabilities of the proximal policy, without gradient."""
    current, behavior = precise(logprobs).detach(), precise(behavior_logprobs).detach()
    return behavior + shares * (current - behavior)
