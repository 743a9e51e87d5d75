"""Log-probabilities from hidden states, a few rows of logits at a time: the logits of a micro-batch never exist as a whole.

Letters: M positions, c channels, V vocabulary columns of this rank, R rows of a chunk. Logits are made again in the backward pass, so that
memory is R * V whatever M is, for one more product with the output weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from msrl.trainer.logprobs import Columns, gradient_in_place, measure


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, columns: Columns, num_rows: int, softcap: float | None
    ) -> tuple[Tensor, Tensor | None]:
        parts = [measure(_logits(h, weight, softcap), ids, columns) for h, ids in _chunks(num_rows, hidden, labels)]
        logprobs, normaliser = torch.cat([part[0] for part in parts]), torch.cat([part[2] for part in parts])
        entropies = [part[1] for part in parts if part[1] is not None]
        entropy = torch.cat(entropies) if entropies else None
        ctx.save_for_backward(hidden, weight, labels, normaliser, entropy)
        ctx.columns, ctx.num_rows, ctx.softcap = columns, num_rows, softcap
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, normaliser, entropy = ctx.saved_tensors
        for_logprobs, for_entropy = grads
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        start = 0
        for h, ids in _chunks(ctx.num_rows, hidden, labels):
            rows = slice(start, start + len(h))
            logits = _logits(h, weight, ctx.softcap)
            slope = None if ctx.softcap is None else 1 - (logits / ctx.softcap).square()  # of the cap, from what it gave
            of_chunk = [None if x is None else x[rows] for x in (entropy, for_logprobs, for_entropy)]
            gradient_in_place(logits, ids, normaliser[rows], of_chunk[0], ctx.columns, of_chunk[1], of_chunk[2])
            if slope is not None:
                logits.mul_(slope)
            torch.mm(logits, weight, out=grad_hidden[rows])
            _add_product(grad_weight, logits, h)
            start = rows.stop
            del logits, slope  # before the next ones are made
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None, None


def _chunks(num_rows: int, *tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    return zip(*(tensor.split(num_rows) for tensor in tensors), strict=True)


def _logits(hidden: Tensor, weight: Tensor, softcap: float | None) -> Tensor:
    logits = torch.mm(hidden, weight.t())
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _add_product(total: Tensor | None, logits: Tensor, hidden: Tensor) -> None:
    """total += logits^T hidden, kept in float32."""
    if total is None:
        return
    if logits.dtype == total.dtype:
        total.addmm_(logits.t(), hidden)
    else:
        total.add_(torch.mm(logits.t(), hidden))


def chunked_logprobs(
    hidden: Tensor,  # [M, c]
    weight: Tensor,  # [V, c] of the output layer
    labels: Tensor,  # [M]
    columns: Columns,
    *,
    num_rows: int,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor | None]:  # [M], [M]
    """What `vocab_parallel_logprobs` says of the logits hidden @ weight^T (capped: softcap * tanh(logits / softcap))."""
    return _ChunkedLogprobs.apply(hidden, weight, labels, columns, num_rows, softcap)  # pyright: ignore[reportReturnType]
