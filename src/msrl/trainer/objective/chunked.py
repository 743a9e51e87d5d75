"""Log-probabilities from hidden states, one logit chunk at a time.

The logits of a micro-batch never exist all at once.

Logits are recomputed in the backward pass, so memory is R * V whatever M is, at the cost of one
more product with the output weights. Letters: M positions, c channels, V vocabulary columns of this
rank, R rows of a logit chunk, K comparisons.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from msrl.trainer.objective.logprobs import (
    DistributionComparison,
    VocabColumns,
    gradient_in_place,
    measure,
)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        columns: VocabColumns,
        num_rows: int,
        softcap: float | None,
        comparisons: Sequence[DistributionComparison],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        results: list[tuple[Tensor | None, ...]] = []
        for start, (h, ids) in zip(
            range(0, max(len(hidden), 1), num_rows), _chunks(num_rows, hidden, labels), strict=True
        ):
            logits = compute_logits(h, weight, softcap)
            measured = measure(logits, ids, columns)[:3]
            selected = [item.select(slice(start, start + len(h))) for item in comparisons]
            divergences = slopes = None
            if selected:
                divergences, slopes = columns.divergences(logits, measured[2], selected)
            results.append((*measured, divergences, slopes))
            del logits  # free them before the next chunk
        logprobs, entropy, normalizer, divergences, slopes = (
            _concatenate(column) for column in zip(*results, strict=True)
        )
        assert logprobs is not None
        ctx.save_for_backward(hidden, weight, labels, normalizer, entropy, slopes)
        ctx.columns, ctx.num_rows, ctx.softcap = columns, num_rows, softcap
        ctx.comparisons = comparisons
        ctx.set_materialize_grads(False)
        return logprobs, entropy, divergences

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, normalizer, entropy, sums_of_slopes = ctx.saved_tensors
        per_row = (entropy, *grads, sums_of_slopes)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = (
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        start = 0
        for h, ids in _chunks(ctx.num_rows, hidden, labels):
            rows = slice(start, start + len(h))
            logits = compute_logits(h, weight, ctx.softcap)
            # Derivative of the softcap, from its output.
            slope = None if ctx.softcap is None else 1 - (logits / ctx.softcap).square()
            own_entropy, *slopes = [None if x is None else x[rows] for x in per_row]
            comparisons = [item.select(rows) for item in ctx.comparisons]
            gradient_in_place(
                logits,
                ids,
                normalizer[rows],
                own_entropy,
                ctx.columns,
                slopes[0],
                slopes[1],
                slopes[2],
                slopes[3],
                comparisons,
            )
            if slope is not None:
                logits.mul_(slope)
            torch.mm(logits, weight.to(logits.dtype), out=grad_hidden[rows])
            _add_product(grad_weight, logits, h)
            start = rows.stop
            del logits, slope  # free them before the next chunk
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _chunks(num_rows: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    return zip(*(tensor.split(num_rows) for tensor in tensors), strict=True)


def _concatenate(chunks: tuple[Tensor | None, ...]) -> Tensor | None:
    tensors = [chunk for chunk in chunks if chunk is not None]
    return torch.cat(tensors) if tensors else None


def compute_logits(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    """Return the logits of a few rows: hidden @ weight^T, capped if the model has a cap.

    The product is computed in the dtype of the hidden states.
    """
    logits = torch.mm(hidden, weight.to(hidden.dtype).t())
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _add_product(total: Tensor | None, logits: Tensor, hidden: Tensor) -> None:
    """Add logits^T hidden to `total`, in float32."""
    if total is None:
        return
    if logits.dtype == total.dtype:
        total.addmm_(logits.t(), hidden)
    else:
        total.add_(torch.mm(logits.t(), hidden))


def chunked_logprobs(
    hidden: Tensor,  # [M, c]
    weight: Tensor,  # [V, c] of the output layer, in any dtype
    labels: Tensor,  # [M]
    columns: VocabColumns,
    *,
    num_rows: int,
    softcap: float | None = None,
    comparisons: Sequence[DistributionComparison] = (),
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # [M], [M], [M, K]
    """Return `vocab_parallel_logprobs` of the logits hidden @ weight^T.

    With `softcap`, the logits are softcap * tanh(logits / softcap).
    """
    return _ChunkedLogprobs.apply(hidden, weight, labels, columns, num_rows, softcap, comparisons)  # pyright: ignore[reportReturnType]
