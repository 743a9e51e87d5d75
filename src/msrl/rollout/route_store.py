"""Routes of an engine's requests: the experts of every token, kept beside its keys and values.

A request skips the tokens whose keys and values it finds in the prefix cache. It gets the routes of
the pass that computed them. Therefore routes are stored by block of the KV cache, too.

A token keeps the first route that its request has for it. With a sampled token, this is the route
of the pass that sampled the next token, even if a preemption or new weights make the engine
compute the token again.

Letters: T tokens of a request, n tokens of a step, B tokens of a block, L mixture layers of the
model, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from msrl.types import Routes


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """Tokens of one request that a step computes.

    Attributes:
        key: Name under which the routes of the request are kept; None keeps none.
        start: Position of the first of them in the request.
        count: Number of them.
        blocks: Numbers of the blocks of the request's tokens in the KV cache, in order.
    """

    key: str | None
    start: int
    count: int
    blocks: Sequence[int]


@dataclass(slots=True)
class _RequestRoutes:
    """Routes of the first tokens of a request, in pieces."""

    pieces: list[Routes] = field(default_factory=list[Routes])
    num_tokens: int = 0

    def append(self, rows: Routes) -> None:
        self.pieces.append(rows)
        self.num_tokens += len(rows)


class RouteStore:
    """Routes by block of the KV cache, and by request until they are taken."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._blocks = dict[int, Routes]()  # [B, L, k]
        self._requests = dict[str, _RequestRoutes]()

    def add_step(self, requests: Sequence[ComputedTokens], experts: Routes) -> None:  # [n, L, k]
        """Store the routes of a step, whose tokens belong to the requests in this order.

        Requests of a step may share blocks that it computes.
        """
        first = 0
        for request in requests:
            self._write(request, experts[first : first + request.count])
            first += request.count
        if first != len(experts):
            raise RuntimeError(f"the engine routed {len(experts)} tokens in a step of {first}")
        for request in requests:
            if request.key is not None:
                self._keep(request.key, request)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy the routes of blocks, given as source and destination, as the engine copies them."""
        for source, destination in copies:
            self._blocks[destination] = self._blocks[source].copy()

    def take(self, keys: Sequence[str]) -> list[Routes]:  # [T, L, k] each
        """Return the routes of finished requests and forget them."""
        return [np.concatenate(self._requests.pop(key).pieces) for key in keys]

    def drop(self, keys: Sequence[str]) -> None:
        """Forget the routes of requests that were aborted."""
        for key in keys:
            self._requests.pop(key, None)

    def _write(self, request: ComputedTokens, experts: Routes) -> None:
        """Store the routes in the blocks of a request."""
        for block, rows, span in self._spans(request, request.start, request.start + request.count):
            if block not in self._blocks:
                shape = (self._block_tokens, *experts.shape[1:])
                self._blocks[block] = np.zeros(shape, experts.dtype)
            start = span.start - request.start
            self._blocks[block][rows] = experts[start : start + len(span)]

    def _keep(self, key: str, request: ComputedTokens) -> None:
        """Append the routes of the tokens that the request has none for yet."""
        known, end = self._requests.setdefault(key, _RequestRoutes()), request.start + request.count
        for block, rows, _ in self._spans(request, known.num_tokens, end):
            known.append(self._blocks[block][rows].copy())  # blocks are used again

    def _spans(
        self, request: ComputedTokens, start: int, end: int
    ) -> list[tuple[int, slice, range]]:
        """Return blocks, their rows and the positions of the tokens from `start` to `end`."""
        spans: list[tuple[int, slice, range]] = []
        size = self._block_tokens
        while start < end:
            number, row = divmod(start, size)
            count = min(size - row, end - start)
            span = range(start, start + count)
            spans.append((request.blocks[number], slice(row, row + count), span))
            start += count
        return spans
