"""Group-relative advantages (arXiv:2402.03300, section 4.1.2): A = (R - mean) / (std + eps) over the completions of one prompt.

P prompts, G completions of each. The standard deviation is the unbiased one (divided by G - 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from msrl.errors import MsrlError


def advantages(
    rewards: Tensor,  # [P, G]
    *,
    eps: float = 1e-6,
) -> Tensor:  # [P, G]
    """Advantages in the dtype of `rewards` (computed in float64); a group whose rewards are all equal gets exactly 0.

    Raises MsrlError for groups of one completion, which have nothing to be compared with.
    """
    if rewards.ndim != 2:
        raise ValueError(f"rewards have shape {tuple(rewards.shape)}; [prompts, completions] is wanted")
    if rewards.shape[1] < 2:
        raise MsrlError(
            f"rollout.samples_per_prompt={rewards.shape[1]}: group-relative advantages (algo.advantage.estimator: group_norm) "
            "need at least 2 completions of a prompt; set 2 or more"
        )
    exact = rewards.double()
    centred = exact - exact.mean(dim=1, keepdim=True)
    equal = exact.amax(dim=1, keepdim=True) == exact.amin(dim=1, keepdim=True)
    scaled = centred / (exact.std(dim=1, keepdim=True) + eps)
    return scaled.masked_fill(equal, 0.0).to(rewards.dtype if rewards.is_floating_point() else torch.float32)
