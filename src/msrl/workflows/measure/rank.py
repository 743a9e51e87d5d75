"""Rank that measures its device and its links. All ranks measure at the same time.

T tokens, n width of a square matrix, h heads, d channels per head.
"""

from __future__ import annotations

import datetime
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from msrl.platforms import bind_stores, get, share_gloo_devices

if TYPE_CHECKING:
    import torch

Collective = Literal["gather", "exchange", "send"]

_TOKENS, _WIDTHS = (64, 512, 4096), (64, 256, 1024, 4096, 8192)
_LENGTHS, _HEADS, _HEAD_DIM = (64, 256, 1024, 4096), 8, 64
_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 27)
_MEMORY_ELEMENTS = 1 << 24
_CALLS = 5  # of a collective, which all ranks call equally often
_SLOW_S = 0.5  # larger sizes than one that takes as long are not measured


class MeasuringRank:
    """Measurements on one device, and with the other ranks of the machine."""

    def __init__(self, platform: str, rank: int, world_size: int) -> None:
        self._platform, self._rank, self._world_size = get(platform), rank, world_size

    def start(self, init_method: str) -> None:
        """Join the other ranks."""
        import torch.distributed as dist

        self._device = self._platform.device(self._rank)
        share_gloo_devices()
        bind_stores()
        dist.init_process_group(
            self._platform.collective_backend,
            init_method=init_method,
            rank=self._rank,
            world_size=self._world_size,
            timeout=datetime.timedelta(seconds=300),
        )

    def close(self) -> None:
        """Leave the process group."""
        import torch.distributed as dist

        dist.destroy_process_group()

    def products(self, dtype: str) -> list[tuple[float, float, float]]:
        """Return tokens, width and FLOP/s of products with their gradients."""
        import torch

        rows = list[tuple[float, float, float]]()
        for tokens in _TOKENS:
            for width in _WIDTHS:
                inputs, weight = (
                    self._random((size, width), dtype).requires_grad_() for size in (tokens, width)
                )
                seconds = self._seconds(
                    lambda a=inputs, b=weight: torch.nn.functional.linear(a, b).sum().backward()
                )
                rows.append((tokens, width, 6 * tokens * width**2 / seconds))
                if seconds > _SLOW_S:
                    break
        return rows

    def attention(self, dtype: str) -> list[tuple[float, float]]:
        """Return tokens and FLOP/s of causal attention, with its backward pass.

        The backward pass counts 2.5 times (arXiv:2307.08691, section 3.1).
        """
        from torch.nn.functional import scaled_dot_product_attention

        rows = list[tuple[float, float]]()
        name = "float32" if self._platform.upcast_attention else dtype
        for length in _LENGTHS:
            shape = (1, _HEADS, length, _HEAD_DIM)
            query, key, value = (self._random(shape, name).requires_grad_() for _ in range(3))
            seconds = self._seconds(
                lambda q=query, k=key, v=value: (
                    scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
                )
            )
            flops = 3.5 * 2 * (length * (length + 1) // 2) * _HEADS * 2 * _HEAD_DIM
            rows.append((length, flops / seconds))
            if seconds > _SLOW_S:
                break
        return rows

    def memory(self) -> float:
        """Return the bytes per second that an elementwise operation reads and writes."""
        import torch

        left, right, result = (self._random((_MEMORY_ELEMENTS,), "float32") for _ in range(3))
        seconds = self._seconds(lambda: torch.add(left, right, out=result))
        return 3 * 4 * _MEMORY_ELEMENTS / seconds

    def host_copies(self) -> float:
        """Return the bytes per second from host to device."""
        import torch

        source = torch.empty(_MEMORY_ELEMENTS)
        target = self._random((_MEMORY_ELEMENTS,), "float32")
        return 4 * _MEMORY_ELEMENTS / self._seconds(lambda: target.copy_(source))

    def collectives(self, kind: Collective) -> list[tuple[float, float, float]]:
        """Return ranks, bytes and bytes per second of a collective."""
        import torch.distributed as dist

        rows = list[tuple[float, float, float]]()
        for size in _group_sizes(self._world_size):
            group = dist.new_group(list(range(size)))
            if self._rank < size:
                for num_bytes in _BYTES:
                    seconds = self._slowest(self._collective(kind, num_bytes, size, group), group)
                    calls = 2 if kind == "gather" else 1
                    rows.append((size, num_bytes, calls * num_bytes / seconds))
                    if seconds > _SLOW_S:
                        break
            dist.barrier()
        return rows

    def _collective(
        self, kind: Collective, num_bytes: int, size: int, group: Any
    ) -> Callable[[], object]:
        import torch.distributed as dist

        count = num_bytes // 4 // size * size
        full = self._random((count,), "float32")
        if kind == "gather":
            part = self._random((count // size,), "float32")

            def both() -> None:
                dist.all_gather_into_tensor(full, part, group=group)
                dist.reduce_scatter_tensor(part, full, group=group)

            return both
        if kind == "exchange":
            other = self._random((count,), "float32")
            return lambda: dist.all_to_all_single(other, full, group=group)
        received = self._random((count,), "float32")
        after, before = (self._rank + 1) % size, (self._rank - 1) % size

        def pass_on() -> None:
            sent = dist.isend(full, after, group=group)
            dist.recv(received, before, group=group)
            assert sent is not None
            sent.wait()

        return pass_on

    def _slowest(self, function: Callable[[], object], group: Any) -> float:
        """Return the median seconds of a collective on the slowest rank of the group."""
        import torch
        import torch.distributed as dist

        function()
        times = torch.tensor([self._timed(function) for _ in range(_CALLS)], device=self._device)
        dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
        return statistics.median(times.tolist())

    def _random(self, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        import torch

        return torch.rand(shape, dtype=getattr(torch, dtype), device=self._device)

    def _seconds(self, function: Callable[[], object]) -> float:
        """Return the median seconds of at least 3 calls, after one that is not counted."""
        self._timed(function)
        times, end = list[float](), time.perf_counter() + _SLOW_S
        while len(times) < 3 or (time.perf_counter() < end and len(times) < 20):
            times.append(self._timed(function))
        return statistics.median(times)

    def _timed(self, function: Callable[[], object]) -> float:
        self._platform.synchronize()
        start = time.perf_counter()
        function()
        self._platform.synchronize()
        return time.perf_counter() - start


def _group_sizes(world_size: int) -> Iterator[int]:
    """Yield the powers of two up to the number of ranks, without 1."""
    size = 2
    while size <= world_size:
        yield size
        size *= 2
