"""Norm of gradients on the CPU without the rounding error of `torch.norm`.

Without Transformer Engine and Apex, Megatron calls `torch.norm` for each gradient. On the CPU it
adds all squares in a few float32 sums: the norm of 136 million random elements, as many as the
embedding of Qwen2.5 0.5B has, is off by 1.4%, and so are clipped gradients. Other devices add in a
tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from megatron.core.utils import local_multi_tensor_l2_norm
from torch import Tensor

_ELEMENTS_PER_SUM = 4096


def use_accurate_norms() -> None:
    """Replace the fallback of Megatron's `get_grad_norm_fp32` for gradients on the CPU.

    Depends on `l2_norm_impl` of megatron/core/optimizer/clip_grads.py, which is another function
    where Transformer Engine, Apex or MindSpeed has a fused one.
    """
    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _multi_tensor_l2_norm


def accurate_norm(tensor: Tensor) -> Tensor:
    """Return the Euclidean norm of a float32 tensor of any shape, with sums of 4,096 squares."""
    flat = tensor.reshape(-1)
    num_full = flat.numel() // _ELEMENTS_PER_SUM * _ELEMENTS_PER_SUM
    full = torch.linalg.vector_norm(flat[:num_full].view(-1, _ELEMENTS_PER_SUM), dim=-1)
    rest = torch.linalg.vector_norm(flat[num_full:])
    parts = torch.cat([full, rest.view(1)])
    return torch.linalg.vector_norm(parts, dtype=torch.float64).float()


def _multi_tensor_l2_norm(
    chunk_size: int, overflow: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *options: Any
) -> tuple[Tensor, None]:
    """Return the norm of all tensors, shape [1], with the arguments of Megatron's fallback."""
    tensors = list(chain.from_iterable(tensor_lists))
    if any(tensor.device.type != "cpu" for tensor in tensors):
        norm, _ = local_multi_tensor_l2_norm(chunk_size, overflow, tensor_lists, *options)
        return norm, None
    norms = torch.stack([accurate_norm(tensor) for tensor in tensors])
    return torch.linalg.vector_norm(norms, dtype=torch.float64).float().view(1), None
