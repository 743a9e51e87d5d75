"""How far two ways to compute the same logits agree: largest difference, divergence of the distributions, the likeliest token.

Letters: T tokens of a sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_DIVERGENCE = 1e-6  # nats; that of differences of 1e-4 in the logits is below 1e-8


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over all positions of all sequences.

    `largest` absolute difference of two logits (infinite where one is not a number); `spread` standard deviation of the left side's
    logits; `divergence` KL(left || right) in nats, the largest of any position; `same_choice` positions whose likeliest token is the same
    one, or whose two choices are a tie on the left side.
    """

    num_sequences: int
    num_positions: int
    largest: float
    spread: float
    divergence: float
    same_choice: int


def compare_logits(left: Sequence[Tensor], right: Sequence[Tensor], vocab_size: int, *, tie: float) -> Agreement:
    """Compare the logits of the same sequences, each [T, V or more]; V is 1 for scores.

    `tie`: how near two logits are that may change places.
    """
    largest, divergence, same, squares, positions = 0.0, 0.0, 0, 0.0, 0
    for a, b in zip(left, right, strict=True):
        a, b = a[:, :vocab_size].float(), b[:, :vocab_size].float()
        difference = torch.nan_to_num((a - b).abs(), nan=float("inf"))
        largest = max(largest, float(difference.max()))
        divergence = max(divergence, _divergence(a, b))
        same += _same_choices(a, b, tie)
        squares += float(_variance(a.double())) * len(a)
        positions += len(a)
    return Agreement(len(left), positions, largest, (squares / positions) ** 0.5, divergence, same)


def _variance(a: Tensor) -> Tensor:
    """Of a position's logits, the mean over positions; of scores, of which a position has one, over all positions."""
    return a.var(dim=1).mean() if a.shape[1] > 1 else a.var(correction=0)


def _divergence(a: Tensor, b: Tensor) -> float:
    """The largest KL(a || b) of any position; infinite where a logit is not a number."""
    log_a, log_b = a.double().log_softmax(-1), b.double().log_softmax(-1)
    found = (log_a.exp() * (log_a - log_b)).sum(-1)
    return max(0.0, float(torch.nan_to_num(found, nan=float("inf")).max()))


def _same_choices(a: Tensor, b: Tensor, tie: float) -> int:
    """Positions whose likeliest token is the same, or is nearer than `tie` to the likeliest one of `a`."""
    chosen = b.argmax(-1, keepdim=True)
    behind = a.max(-1, keepdim=True).values - a.gather(-1, chosen)
    return int((behind <= tie).sum())
