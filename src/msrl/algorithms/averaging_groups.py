"""Groups of samples whose token means are averaged.

They are the micro-batches of systems that average within each micro-batch before they average
micro-batches and data-parallel ranks (MindSpeed-RL 05a90d77, models/base/base_training_engine.py
and utils/seqlen_balancing.py). Here they depend on the samples of an update alone.

K samples of a shard; a shard has the samples of one data-parallel rank of such a system.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Members = tuple[int, ...]  # indices of the samples of a group
_Subset = tuple[int, int, tuple[int, ...]]  # total length, number and indices of samples


def consecutive_groups(num_samples: int, size: int) -> tuple[Members, ...]:
    """Return groups of `size` consecutive samples; the last one may have fewer."""
    starts = range(0, num_samples, size)
    return tuple(tuple(range(start, min(start + size, num_samples))) for start in starts)


def balanced_groups(
    shards: Sequence[Sequence[int]],  # lengths of the K samples of each shard, in tokens
    max_tokens: int,
    max_samples: int | None = None,
) -> tuple[tuple[Members, ...], ...]:
    """Return the groups of each shard, with nearly equal total lengths.

    All shards have the same number of groups: the largest number that one of them needs so that a
    group has about `max_tokens` tokens, and `max_samples` samples on average.
    """
    num_groups = max(_num_groups(lengths, max_tokens, max_samples) for lengths in shards)
    return tuple(_balanced(lengths, num_groups) for lengths in shards)


def _num_groups(lengths: Sequence[int], max_tokens: int, max_samples: int | None) -> int:
    """Return the number of bins that the longest-first placement into the emptiest bin fills.

    A bin that the next sample would overfill is closed, and a new one begins.
    """
    num_bins = max(1, -(-sum(lengths) // max_tokens))
    loads = [0] * num_bins
    for length in sorted(lengths, reverse=True):
        load = heapq.heappop(loads)
        is_full = load + length > max_tokens
        num_bins += is_full
        heapq.heappush(loads, length if is_full else load + length)
    if max_samples is not None:
        num_bins = max(num_bins, -(-len(lengths) // max_samples))
    return num_bins


def _balanced(lengths: Sequence[int], num_groups: int) -> tuple[Members, ...]:
    """Partition samples by the largest differencing method (Karmarkar and Karp, 1982).

    Of two states with equal differences, the one with the larger first subset is merged first.
    """
    if not lengths:
        return ()
    empty: list[_Subset] = [(0, 0, ())] * (num_groups - 1)
    heap = [_entry([(length, 1, (index,)), *empty]) for index, length in enumerate(lengths)]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[-1], heapq.heappop(heap)[-1]
        pairs = zip(first, reversed(second), strict=True)
        merged = [(a[0] + b[0], a[1] + b[1], a[2] + b[2]) for a, b in pairs]
        heapq.heappush(heap, _entry(sorted(merged, reverse=True)))
    return tuple(members for _, _, members in heap[0][-1] if members)


def _entry(subsets: list[_Subset]) -> tuple[int, int, int, tuple[int, ...], list[_Subset]]:
    """Return the subsets of a state after the numbers by which the heap orders states."""
    total, size, members = subsets[0]
    return subsets[-1][0] - total, -total, -size, tuple(-index for index in members), subsets
