"""Forward KL divergence of the teacher q from the student p: the sum of q (log q - log p).

The student covers all modes of the teacher (arXiv:1503.02531). R positions, V tokens.
"""

from __future__ import annotations

from torch import Tensor


def divergence(
    student: Tensor,  # [R, V] log-probabilities
    teacher: Tensor,  # [R, V] log-probabilities
) -> tuple[Tensor, Tensor]:
    """Return the terms and their slopes -q."""
    probabilities = teacher.exp()
    return probabilities * (teacher - student), probabilities.neg()
