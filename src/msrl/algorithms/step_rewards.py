"""Loss of a process reward model (arXiv:2312.08935): cross entropy over the reward tokens.

M labeled steps, K reward tokens. The source of the form with reward tokens is `--stage prm` of
MindSpeed-LLM 2.0 to 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepLosses:
    """Loss of each step, and whether its most likely reward token is its label."""

    loss: Tensor  # [M]
    is_right: Tensor  # [M], 0 or 1


def step_losses(
    logits: Tensor,  # [M, K] of the reward tokens at the placeholders
    labels: Tensor,  # [M], indices of reward tokens
) -> StepLosses:
    """Return -log p(label), with probabilities over the K reward tokens only."""
    logits = logits.float()
    is_right = (logits.detach().argmax(-1) == labels).to(logits.dtype)
    return StepLosses(F.cross_entropy(logits, labels, reduction="none"), is_right)
