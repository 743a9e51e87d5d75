"""Agreement of two computations of the same logits.

It has the largest difference, the divergence of the distributions and the most likely token.
Letters: T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement by position, for the N positions of all sequences.

    `spread` is the standard deviation of the left logits. The most likely token also counts as the
    same if the two choices tie on the left side.
    """

    num_sequences: int
    differences: Tensor  # [N] largest absolute difference of two logits; infinite for NaN
    divergences: Tensor  # [N] KL(left || right) in nats
    same: Tensor  # [N] bool, True if the most likely token is the same
    spread: float

    @property
    def num_positions(self) -> int:
        return len(self.differences)

    @property
    def largest(self) -> float:
        return float(self.differences.max())

    @property
    def divergence(self) -> float:
        return float(self.divergences.max())

    @property
    def same_choice(self) -> int:
        return int(self.same.sum())

    @property
    def is_finite(self) -> bool:
        """False if a logit of either side is NaN or infinite."""
        return bool(self.differences.isfinite().all())

    def within(self, limit: float) -> Agreement:
        """Return the positions with differences of at most `limit`; there may be none."""
        is_within = self.differences <= limit
        return Agreement(
            self.num_sequences,
            self.differences[is_within],
            self.divergences[is_within],
            self.same[is_within],
            self.spread,
        )


def compare_logits(
    left: Sequence[Tensor], right: Sequence[Tensor], vocab_size: int, *, tie: float
) -> Agreement:
    """Compare the logits of the same sequences, each [T, V or more]; V is 1 for scores.

    `tie` is the distance up to which two logits count as equal when the most likely token is
    compared.
    """
    differences, divergences, same, squares = list[Tensor](), list[Tensor](), list[Tensor](), 0.0
    for a, b in zip(left, right, strict=True):
        a, b = a[:, :vocab_size].float(), b[:, :vocab_size].float()
        difference = torch.nan_to_num((a - b).abs(), nan=math.inf, posinf=math.inf)
        differences.append(difference.amax(-1))
        divergences.append(_divergence(a, b))
        same.append(_same_choice(a, b, tie))
        squares += float(_variance(a.double())) * len(a)
    spread = (squares / sum(map(len, differences))) ** 0.5
    return Agreement(
        len(left), torch.cat(differences), torch.cat(divergences), torch.cat(same), spread
    )


def _variance(a: Tensor) -> Tensor:
    """Return the mean over positions of the variance of a position's logits.

    Scores have one value per position, so their variance is taken over positions.
    """
    return a.var(dim=1).mean() if a.shape[1] > 1 else a.var(correction=0)


def _divergence(a: Tensor, b: Tensor) -> Tensor:
    """Return KL(a || b) of each position; infinite if a logit is not a number."""
    log_a, log_b = a.double().log_softmax(-1), b.double().log_softmax(-1)
    divergence = (log_a.exp() * (log_a - log_b)).sum(-1)
    return torch.nan_to_num(divergence, nan=float("inf")).clamp(min=0)


def _same_choice(a: Tensor, b: Tensor, tie: float) -> Tensor:
    """Return True where the likeliest token of `b` is within `tie` of the likeliest one of `a`."""
    chosen = b.argmax(-1, keepdim=True)
    behind = a.max(-1, keepdim=True).values - a.gather(-1, chosen)
    return behind[:, 0] <= tie
