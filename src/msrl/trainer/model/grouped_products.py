"""Grouped products and the gate of all experts, each as one autograd node.

This module needs no Megatron.

Letters: n routed tokens of this rank, sorted by expert, f feed-forward channels of this rank, i
inputs and o outputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from msrl import platforms


def grouped_linear(
    x: Tensor,  # [n, i]
    counts: Sequence[int],  # of the tokens of each expert, their sum is n
    weights: Sequence[Tensor],  # each [o, i]
) -> Tensor:  # [n, o]
    """Return the products of the tokens of each expert with the transposed weight of the expert."""
    return _GroupedLinear.apply(x, counts, *weights)  # pyright: ignore[reportReturnType]


def weighted_swiglu(
    gate_up: Tensor,  # [n, 2 f]
    weights: Tensor,  # [n]
) -> Tensor:  # [n, f]
    """Return silu(gate) * up * weight, with gate and up in one tensor."""
    return _WeightedSwiGlu.apply(gate_up, weights)  # pyright: ignore[reportReturnType]


class _GroupedLinear(torch.autograd.Function):
    """y = x W^T for the tokens of every expert, with the expert's W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], *weights: Tensor) -> Tensor:
        ctx.counts, ctx.trains_weights = counts, any(ctx.needs_input_grad[2:])
        ctx.save_for_backward(*([x] if ctx.trains_weights else []), *weights)
        return grouped_product(x, [weight.t() for weight in weights], counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad, counts = grads[0], ctx.counts
        weights = ctx.saved_tensors[1:] if ctx.trains_weights else ctx.saved_tensors
        grad_x = grouped_product(grad, weights, counts) if ctx.needs_input_grad[0] else None
        if not ctx.trains_weights:
            return grad_x, None, *(None for _ in weights)
        pieces = zip(grad.split(counts), ctx.saved_tensors[0].split(counts), strict=True)
        grad_weights = [
            torch.mm(rows.t(), inputs) if is_trained else None
            for is_trained, (rows, inputs) in zip(ctx.needs_input_grad[2:], pieces, strict=True)
        ]
        return grad_x, None, *grad_weights


def grouped_product(
    x: Tensor,  # [n, i]
    matrices: Sequence[Tensor],  # each [i, o]
    counts: Sequence[int],
) -> Tensor:  # [n, o]
    """Return the products of the tokens of each expert with its matrix.

    On CPU, torch's `grouped_mm` is a loop over the experts that needs all matrices in one tensor,
    so the loop here gives the same bits without the copy.
    """
    product = platforms.get(x.device.type).grouped_product(x, matrices, counts)
    if product is not None:
        return product
    output = x.new_empty((len(x), matrices[0].shape[1]))
    for rows, matrix, out in zip(x.split(counts), matrices, output.split(counts), strict=True):
        torch.mm(rows, matrix, out=out)
    return output


class _WeightedSwiGlu(torch.autograd.Function):
    """silu(gate) * up * weight (arXiv:2002.05202), with gate and up in one tensor.

    The backward pass needs only this tensor and the weights.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        gate, up = gate_up.chunk(2, -1)
        product = F.silu(gate).mul_(up)
        return (product * weights.unsqueeze(-1)).to(product.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weights = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        activated = F.silu(gate)
        grad_weights = (grads[0].to(weights.dtype) * (activated * up)).sum(-1)
        grad = (grads[0] * weights.unsqueeze(-1)).to(gate_up.dtype)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return torch.cat((grad_gate, activated.mul_(grad)), -1), grad_weights
