"""The layers of ours that stand in Megatron's layer spec. Letters: N tokens, c channels, f channels
of the feed-forward part on this rank.

The gate, and on CPU, where torch has no fused kernel for it, the norm, bring their own derivatives:
what limits them is how often a tensor goes through memory, and how many are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.activations import quick_gelu
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
}


class RmsNorm(torch.nn.Module):
    """Root-mean-square norm that also works under sequence parallelism (arXiv:1910.07467).

    Multiplies by the weight, or by 1 + weight where Megatron's `layernorm_zero_centered_gamma` is
    set.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.eps = eps
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        # Megatron sums the gradients of parameters so marked over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + 1 if self.is_zero_centered else self.weight
        if x.is_cpu:
            return _RmsNorm.apply(x, weight, self.eps)  # pyright: ignore[reportReturnType]
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, self.eps).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """y = w n with n = x / sqrt(mean(x^2) + eps), in float32; only x and one number per row are
    kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # [..., c]
        weight: Tensor,  # [c]
        eps: float,
    ) -> Tensor:  # [..., c]
        wide = x.float()
        mean_square = (
            torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        )
        scale = mean_square.add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        wide, normed = grads[0].float(), x.float() * scale
        product = (wide * normed).view(-1, x.shape[-1])
        along = (
            torch.mv(product, weight.float()).div_(x.shape[-1]).view_as(scale)
        )  # mean over a row of (dL/dn) n
        grad = torch.addcmul(wide * weight, normed, along, value=-1).mul_(scale)
        return grad.to(x.dtype), product.sum(0).to(weight.dtype), None


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up (arXiv:2002.05202), where gate and up lie side by side, which alone are kept.
    On CPU both gradients are written into one tensor.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,  # [..., 2 f]
    ) -> Tensor:  # [..., f]
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        if not gate_up.is_cpu:
            return gate_gradient(gate, up, grads[0])
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, -1)
        torch.mul(F.silu(gate), grads[0], out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad


def gate_gradient(gate: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    """The gradient of silu(gate) * up by both, side by side, from operations that every device has."""
    return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)), -1)


class GatedMlp(MLP):
    """Megatron's feed-forward part with activation(gate) * up in the middle, and nothing else of
    what it can do.
    """

    def __init__(self, config: TransformerConfig, **_: object) -> None:
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(config, linears, tp_group=parallel_state.get_tensor_model_parallel_group())  # pyright: ignore[reportArgumentType]

    def forward(
        self, hidden_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor | None]:  # [N, 1, c]
        gate_up, _bias = self.linear_fc1(hidden_states)
        if self.config.activation_func is F.silu:
            mixed = _SwiGlu.apply(gate_up)
        else:
            gate, up = gate_up.chunk(2, -1)
            mixed = self.config.activation_func(gate) * up
        return self.linear_fc2(mixed)


class PostNormLayer(TransformerLayer):
    """Megatron's layer with a norm behind the attention and one behind the feed-forward part,
    before each is added to the residual.

    The norms have MindSpeed's names.
    """

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.post_attn_norm = RmsNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.post_mlp_layernorm = RmsNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.self_attn_bda = partial(self._add_normed, self.post_attn_norm)
        self.mlp_bda = partial(self._add_normed, self.post_mlp_layernorm)

    @staticmethod
    def _add_normed(
        norm: RmsNorm, training: bool, fused: bool
    ) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        """Megatron's slot for bias, dropout and sum, none but the sum of which these models have."""
        return lambda output, residual, dropout: residual + norm(output[0])
