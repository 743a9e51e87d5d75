"""Rank code of the test that attention does not depend on how context-parallel ranks exchange it.

Letters: N tokens of a micro-batch, n of them on this rank, h query heads, g key/value groups, d
head size, v head size of the values.
"""

from __future__ import annotations

from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from msrl.trainer.launch import RankContext

LENGTHS = (7, 3, 12, 12, 33)
HEADS, WIDTH, BLOCK = 8, 8, 2
GROUPS_AND_WIDTHS = ((4, 8), (2, 8), (1, 6))
TRAITS = ((None, None, False), (5, None, False), (None, 1.5, True), (4, 1.5, True))


def main(context: RankContext, payload: None) -> None:
    """Report the largest relative error of outputs and gradients in every case."""
    from msrl.trainer import groups
    from msrl.trainer.model import ring_attention
    from msrl.trainer.settings import Layout

    dist.init_process_group(
        "gloo",
        init_method=context.init_method,
        rank=context.rank,
        world_size=context.world_size,
    )
    groups.parallel_state.initialize_model_parallel(
        context_parallel_size=context.world_size, create_gloo_process_groups=False
    )
    ring_attention._BLOCK = BLOCK
    errors: dict[str, float] = {}
    sizes = {"allgather": 1, "ulysses": context.world_size, "ring": 1, "hybrid": 2}
    for algorithm, size in sizes.items():
        layout = Layout(cp=context.world_size, cp_algo=algorithm, head_ranks=size)
        exchange = groups.context_groups(layout, 60.0)
        for shape, traits in product(GROUPS_AND_WIDTHS, TRAITS):
            errors[f"{algorithm} {shape} {traits}"] = _error(exchange, *shape, *traits)
    context.report(errors)
    groups.shutdown()


def _error(
    exchange: object,
    num_groups: int,
    width: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> float:
    """Return the largest relative error of this rank's outputs and of the summed gradients."""
    from msrl.trainer.model import context
    from msrl.trainer.model.attention import block_diagonal_attention, packed_attention
    from msrl.trainer.model.packed import PackedSequences

    torch.manual_seed(3)
    count = sum(LENGTHS)
    sizes = [(count, HEADS, WIDTH), (count, num_groups, WIDTH), (count, num_groups, width)]
    leaves = [torch.randn(size, requires_grad=True) for size in sizes]
    sinks = torch.randn(HEADS, requires_grad=True) if has_sinks else None
    weights = torch.randn(count, HEADS, width)
    expected = block_diagonal_attention(*leaves, LENGTHS, 0.3, window, softcap, sinks)
    share = context.share(LENGTHS, exchange, 1, torch.device("cpu"))
    own, is_token = share.clamped_rows, share.rows >= 0
    packed = PackedSequences(share.lengths, {}, context=share)
    shares = [leaf[own] for leaf in leaves]
    actual = packed_attention(*shares, packed, 0.3, window, softcap, sinks)
    all_leaves = leaves if sinks is None else [*leaves, sinks]
    gradients = torch.autograd.grad((expected * weights).sum(), all_leaves)
    mask = is_token[:, None, None]
    own_gradients = torch.autograd.grad((actual * weights[own] * mask).sum(), all_leaves)
    errors = [_distance(actual[is_token], expected[own][is_token])]
    for own_gradient, gradient in zip(own_gradients, gradients, strict=True):
        total = own_gradient.clone()
        dist.all_reduce(total)
        errors.append(_distance(total, gradient))
    return max(errors)


def _distance(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())
