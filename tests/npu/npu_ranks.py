"""Rank code of the collective tests. Rank processes import it by name (`npu_ranks:main`)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from msrl.platforms import get
from msrl.trainer.launch import RankContext


def main(context: RankContext, dtypes: tuple[str, ...]) -> None:
    """Run every collective with every type and report the results of this rank."""
    device = get("npu").device(context.rank)
    dist.init_process_group(
        "hccl", init_method=context.init_method, rank=context.rank, world_size=context.world_size
    )
    results = {
        f"{name} of {dtype}": run(context, device, dtype)
        for dtype in dtypes
        for name, run in ALL.items()
    }
    results["no sum of float64"] = _adds_no_float64(device)
    context.report((context.rank, results))
    dist.barrier()
    dist.destroy_process_group()


def _adds_no_float64(device: torch.device) -> bool:
    """Return True if float64 is refused, or keeps its value as with MindSpeed's `all_reduce`."""
    ones = torch.ones(3, dtype=torch.float64, device=device)
    try:
        dist.all_reduce(ones)
        torch.npu.synchronize()
    except RuntimeError:
        return True
    return ones.cpu().eq(1).all().item() is True


def _values(rank: int, device: torch.device, dtype: str, size: int = 70_001) -> torch.Tensor:
    """Return small whole numbers: their sums are exact in every type."""
    generator = torch.Generator().manual_seed(rank)
    numbers = torch.randint(-8, 9, (size,), generator=generator)
    return numbers.to(getattr(torch, dtype)).to(device)


def _all_reduce(context: RankContext, device: torch.device, dtype: str) -> bool:
    tensors = [_values(rank, device, dtype) for rank in range(context.world_size)]
    result = tensors[context.rank].clone()
    dist.all_reduce(result)
    largest = tensors[context.rank].clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    stacked = torch.stack(tensors)
    return result.equal(stacked.sum(0).to(result.dtype)) and largest.equal(stacked.amax(0))


def _gather(context: RankContext, device: torch.device, dtype: str) -> bool:
    tensors = [_values(rank, device, dtype) for rank in range(context.world_size)]
    result = torch.empty(len(tensors) * len(tensors[0]), dtype=tensors[0].dtype, device=device)
    dist.all_gather_into_tensor(result, tensors[context.rank])
    return result.equal(torch.cat(tensors))


def _scatter(context: RankContext, device: torch.device, dtype: str) -> bool:
    n = context.world_size
    tensors = [_values(rank, device, dtype, n * 1001) for rank in range(n)]
    result = torch.empty(1001, dtype=tensors[0].dtype, device=device)
    dist.reduce_scatter_tensor(result, tensors[context.rank])
    total = torch.stack(tensors).sum(0).to(result.dtype)
    return result.equal(total.chunk(n)[context.rank])


def _broadcast(context: RankContext, device: torch.device, dtype: str) -> bool:
    result = _values(context.rank, device, dtype)
    dist.broadcast(result, src=1)
    return result.equal(_values(1, device, dtype))


def _all_to_all(context: RankContext, device: torch.device, dtype: str) -> bool:
    n, rank = context.world_size, context.rank
    sizes = [[10 * (source + 1) + target for target in range(n)] for source in range(n)]
    tensors = [_values(source, device, dtype, sum(sizes[source])) for source in range(n)]
    received = [sizes[source][rank] for source in range(n)]
    result = torch.empty(sum(received), dtype=tensors[0].dtype, device=device)
    dist.all_to_all_single(result, tensors[rank], received, sizes[rank])
    expected = [tensors[source].split(sizes[source])[rank] for source in range(n)]
    return result.equal(torch.cat(expected))


def _ring(context: RankContext, device: torch.device, dtype: str) -> bool:
    """Send to the next and receive from the previous rank in one batch."""
    n, rank = context.world_size, context.rank
    result = torch.empty_like(_values(0, device, dtype))
    operations = [
        dist.P2POp(dist.isend, _values(rank, device, dtype), (rank + 1) % n),
        dist.P2POp(dist.irecv, result, (rank - 1) % n),
    ]
    for request in dist.batch_isend_irecv(operations):
        request.wait()
    return result.equal(_values((rank - 1) % n, device, dtype))


def _pairs(context: RankContext, device: torch.device, dtype: str) -> bool:
    """Send single messages from even to odd ranks."""
    rank = context.rank
    if rank % 2 == 0:
        dist.send(_values(rank, device, dtype), rank + 1)
        return True
    result = torch.empty_like(_values(0, device, dtype))
    dist.recv(result, rank - 1)
    return result.equal(_values(rank - 1, device, dtype))


ALL = {
    "all_reduce": _all_reduce,
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "batch_isend_irecv": _ring,
    "send": _pairs,
}
