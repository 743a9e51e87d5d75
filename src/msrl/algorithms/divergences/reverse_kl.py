"""Reverse KL divergence of the student p from the teacher q: the sum of p (log p - log q).

The student seeks a mode of the teacher (arXiv:2306.08543). R positions, V tokens.
"""

from __future__ import annotations

from torch import Tensor


def divergence(
    student: Tensor,  # [R, V] log-probabilities
    teacher: Tensor,  # [R, V] log-probabilities
) -> tuple[Tensor, Tensor]:
    """Return the terms and their slopes, which are equal."""
    terms = student.exp().mul_(student - teacher)
    return terms, terms
