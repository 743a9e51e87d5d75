"""Generalized Jensen-Shannon divergence of student p and teacher q (arXiv:2306.13649, section 2).

It is beta KL(q || m) + (1 - beta) KL(p || m) with the mixture m = beta q + (1 - beta) p. It is
bounded; with beta near 0 or 1, its gradient is close to that of forward or reverse KL. R positions,
V tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

OPTION_RANGES = {"beta": (0.0, 0.999999)}


def divergence(
    student: Tensor,  # [R, V] log-probabilities
    teacher: Tensor,  # [R, V] log-probabilities
    *,
    beta: float = 0.5,
) -> tuple[Tensor, Tensor]:
    """Return the terms and their slopes (1 - beta) p (log p - log m).

    beta: share of the teacher in the mixture, between 0 and 1.
    """
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    slopes = (student.exp() * (student - mixture)).mul_(1.0 - beta)
    terms = (teacher.exp() * (teacher - mixture)).mul_(beta).add_(slopes)
    return terms, slopes
