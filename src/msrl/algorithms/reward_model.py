"""Bradley-Terry loss of a reward model (arXiv:2203.02155), with margins (arXiv:2307.09288).

P pairs.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from msrl.algorithms.answers import PairLosses


def bradley_terry(
    chosen: Tensor,  # [P] scores
    rejected: Tensor,  # [P] scores
    margins: Tensor,  # [P]
    *,
    center_coef: float,
) -> PairLosses:
    """Return the losses -log sigmoid(c - r - margin) + center_coef (c + r)^2 of scores c and r.

    The second term keeps the scores of a pair around 0 (arXiv:2312.09244).
    """
    loss = -F.logsigmoid(chosen - rejected - margins)
    loss = loss + center_coef * (chosen + rejected).square()
    return PairLosses(loss, chosen.detach(), rejected.detach())
