"""How far two ways to compute the same logits agree: largest difference, divergence of the
distributions, the likeliest token.

Letters: T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Agreement:
    """Position by position over all sequences, N of them together.

    `spread` is the standard deviation of the left side's logits. A position's likeliest token is
    the same, too, where the two choices are a tie on the left side.
    """

    num_sequences: int
    differences: (
        Tensor  # [N] largest absolute difference of two logits (infinite where one is not a number)
    )
    divergences: Tensor  # [N] KL(left || right) in nats
    same: Tensor  # [N] whether the likeliest token is the same
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

    def within(self, limit: float) -> Agreement:
        """The positions whose logits differ by at most `limit`; there may be none."""
        kept = self.differences <= limit
        return Agreement(
            self.num_sequences,
            self.differences[kept],
            self.divergences[kept],
            self.same[kept],
            self.spread,
        )


def compare_logits(
    left: Sequence[Tensor], right: Sequence[Tensor], vocab_size: int, *, tie: float
) -> Agreement:
    """Compare the logits of the same sequences, each [T, V or more]; V is 1 for scores.

    `tie`: how near two logits are that may change places.
    """
    differences, divergences, same, squares = list[Tensor](), list[Tensor](), list[Tensor](), 0.0
    for a, b in zip(left, right, strict=True):
        a, b = a[:, :vocab_size].float(), b[:, :vocab_size].float()
        differences.append(torch.nan_to_num((a - b).abs(), nan=float("inf")).amax(-1))
        divergences.append(_divergence(a, b))
        same.append(_same_choice(a, b, tie))
        squares += float(_variance(a.double())) * len(a)
    found = torch.cat(differences)
    return Agreement(
        len(left), found, torch.cat(divergences), torch.cat(same), (squares / len(found)) ** 0.5
    )


def _variance(a: Tensor) -> Tensor:
    """Of a position's logits, the mean over positions; of scores, of which a position has one, over
    all positions.
    """
    return a.var(dim=1).mean() if a.shape[1] > 1 else a.var(correction=0)


def _divergence(a: Tensor, b: Tensor) -> Tensor:
    """KL(a || b) of each position; infinite where a logit is not a number."""
    log_a, log_b = a.double().log_softmax(-1), b.double().log_softmax(-1)
    found = (log_a.exp() * (log_a - log_b)).sum(-1)
    return torch.nan_to_num(found, nan=float("inf")).clamp(min=0)


def _same_choice(a: Tensor, b: Tensor, tie: float) -> Tensor:
    """Whether the likeliest token of each position is the same, or is nearer than `tie` to the
    likeliest one of `a`.
    """
    chosen = b.argmax(-1, keepdim=True)
    behind = a.max(-1, keepdim=True).values - a.gather(-1, chosen)
    return behind[:, 0] <= tie
