"""Kahneman-Tversky optimization of labeled answers (arXiv:2402.01306). P answers.

The loss is w (1 - sigmoid(beta (log-ratio - baseline))) for a desirable answer, and w (1 - sigmoid(
beta (baseline - log-ratio))) for an undesirable one, with one weight w for each kind. The baseline
is the mean log-ratio of answers paired with other prompts, at least 0, without a gradient.
"""

from __future__ import annotations

import torch

from msrl.algorithms.answers import LabeledAnswers, LabeledLosses

BETA = 0.1
DATA = "labeled"
NEEDS_REFERENCE = True
OPTION_RANGES = {"desirable_weight": (0.0, None), "undesirable_weight": (0.0, None)}


def preference_loss(
    labeled: LabeledAnswers,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LabeledLosses:
    """Return the loss of each answer.

    desirable_weight: factor of the loss of desirable answers.
    undesirable_weight: factor of the loss of undesirable answers.
    """
    ratios = labeled.answers.log_ratios
    distance = beta * (ratios - labeled.baseline.detach())
    desirable = desirable_weight * torch.sigmoid(-distance)
    undesirable = undesirable_weight * torch.sigmoid(distance)
    loss = torch.where(labeled.is_desirable, desirable, undesirable)
    return LabeledLosses(loss, beta * ratios.detach())
