"""Pools of prompts, and draws from them. N prompts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrl.types import Ints

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pool:
    """Prompts with a share of the draws.

    Attributes:
        is_member: [N] whether a prompt belongs to the pool.
        share: Probability that a draw takes a prompt of the pool. All shares add up to 1.
    """

    is_member: Flags
    share: float


def draw(
    pools: Sequence[Pool],
    num_draws: Ints,  # [N]
    is_open: Flags,  # [N]
    count: int,
    generator: np.random.Generator,
) -> Ints:  # [count]
    """Return different prompts, in the order of their draws.

    A draw chooses a pool by the shares, and of its prompts one that was drawn least often so far.
    An exhausted pool passes its draws on to the first pool that has prompts. Open prompts are drawn
    only if there are no others.
    """
    ranks = num_draws + generator.random(len(num_draws))
    queues = [_queue(pool.is_member & ~is_open, ranks, count) for pool in pools]
    queues.append(_queue(np.ones_like(is_open), ranks + is_open * (1.0 + ranks.max()), count))
    choices = generator.choice(len(pools), size=count, p=[pool.share for pool in pools])
    drawn = dict[int, None]()  # ordered
    for choice in choices.tolist():
        drawn[_next(queues, choice, drawn)] = None
    return np.array([*drawn], np.int64)


def _queue(is_candidate: Flags, ranks: Floats, count: int) -> Iterator[int]:
    """Return the candidates with the lowest ranks, as many as other draws may leave."""
    candidates = np.flatnonzero(is_candidate)
    if len(candidates) > count:
        lowest = np.argpartition(ranks[candidates], count - 1)[:count]
        candidates = candidates[lowest]
    return iter(candidates[np.argsort(ranks[candidates])].tolist())


def _next(queues: Sequence[Iterator[int]], choice: int, drawn: dict[int, None]) -> int:
    """Return the next prompt of a queue, or of the first one that has prompts."""
    for queue in (queues[choice], *queues):
        for number in queue:
            if number not in drawn:
                return number
    raise AssertionError("the last queue has all prompts")
