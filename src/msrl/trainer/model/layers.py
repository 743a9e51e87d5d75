"""Custom layers for Megatron's layer spec: norm, gated MLP, core attention, layer with post-norms.

The gate has a custom backward pass, and so has the norm on CPU, where torch has no fused kernel for
it. Memory limits both: how often a tensor is read and written, and how many are stored.

Letters: N tokens, c channels, f feed-forward channels, h query heads and g key/value groups of this
rank, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.activations import quick_gelu
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from msrl.models.shape import Attention
from msrl.trainer.model.attention import packed_attention
from msrl.trainer.model.packed import PackedSequences
from msrl.trainer.model.rope import rotate

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
}


def column_parallel(config: TransformerConfig, inputs: int, outputs: int) -> ColumnParallelLinear:
    """Return a linear layer without bias whose outputs tensor-parallel ranks share."""
    return ColumnParallelLinear(
        inputs, outputs, config=config, init_method=_no_init, bias=False, gather_output=False
    )


def output_projection(config: TransformerConfig, inputs: int) -> RowParallelLinear:
    """Return the linear layer after a mixer, whose inputs tensor-parallel ranks share."""
    return RowParallelLinear(
        inputs,
        config.hidden_size,
        config=config,
        init_method=_no_init,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
    )


def _no_init(weight: Tensor) -> Any:
    """Skip the initialization, since weights are always loaded."""
    return weight


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
        # Megatron sums the gradients of marked parameters over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.float() + 1 if self.is_zero_centered else self.weight
        if x.is_cpu:
            return _RmsNorm.apply(x, weight, self.eps)  # pyright: ignore[reportReturnType]
        return F.rms_norm(x.to(weight.dtype), (x.shape[-1],), weight, self.eps).to(x.dtype)


class _RmsNorm(torch.autograd.Function):
    """y = w n with n = x / sqrt(mean(x^2) + eps), in float32.

    The backward pass needs only x, w and one number per row.
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
        # Mean over a row of (dL/dn) n.
        along = torch.mv(product, weight.float()).div_(x.shape[-1]).view_as(scale)
        grad = torch.addcmul(wide * weight, normed, along, value=-1).mul_(scale)
        return grad.to(x.dtype), product.sum(0).to(weight.dtype), None


class LayerNorm(RmsNorm):
    """Norm without bias that subtracts the mean and divides by the deviation (arXiv:1607.06450)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), self.weight, None, self.eps)


NORMS: dict[str, type[RmsNorm]] = {"rms": RmsNorm, "layer": LayerNorm}


class AllHeadsNorm(RmsNorm):
    """Root-mean-square norm over the channels of all heads, which tensor-parallel ranks share.

    The weight is split by heads. A rank needs its gradient of all tokens, as of a split matrix.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, num_heads: int
    ) -> None:
        tp = parallel_state.get_tensor_model_parallel_world_size()
        super().__init__(config, hidden_size * num_heads // tp, eps)
        self.weight.sequence_parallel = False  # pyright: ignore[reportAttributeAccessIssue]
        self.num_channels = hidden_size * num_heads

    def forward(self, x: Tensor) -> Tensor:  # [N, 1, h, d]
        wide = x.float()
        total = _SumOverRanks.apply(wide.square().sum((-2, -1), keepdim=True))
        scale = (total / self.num_channels + self.eps).rsqrt()
        weight = self.weight.float() + 1 if self.is_zero_centered else self.weight.float()
        return (wide * scale * weight.view(x.shape[-2:])).to(x.dtype)


class AllHeadsAttention(SelfAttention):
    """Self-attention with norms of queries and keys over all heads.

    megatron-core 0.19 refuses them in a spec without `qk_layernorm`, which would sum the gradients
    of their shards over the ranks (`finalize_model_grads`).
    """

    def __init__(
        self, config: TransformerConfig, *args: Any, attention: Attention, **settings: Any
    ) -> None:
        super().__init__(config, *args, **settings)
        size, eps = self.hidden_size_per_attention_head, self.config.layernorm_epsilon
        self.q_layernorm = AllHeadsNorm(config, size, eps, num_heads=attention.num_heads)
        self.k_layernorm = AllHeadsNorm(config, size, eps, num_heads=attention.num_groups)


class _SumOverRanks(torch.autograd.Function):
    """Sum over the tensor-parallel ranks; the gradients of all ranks are summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        torch.distributed.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].clone()
        torch.distributed.all_reduce(total, group=parallel_state.get_tensor_model_parallel_group())
        return total


class _SwiGlu(torch.autograd.Function):
    """silu(gate) * up (arXiv:2002.05202), with gate and up in one tensor.

    The backward pass needs only this tensor. On CPU, both gradients are written directly into one
    tensor.
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
    """Return the gradients of silu(gate) * up with respect to gate and up, [..., 2 f].

    It uses only operations that every device has.
    """
    return torch.cat((torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)), -1)


class GatedMlp(MLP):
    """Megatron's MLP with activation(gate) * up, without its other options."""

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
    """Megatron's layer with norms of the outputs of attention and MLP.

    They apply before an output is added to the residual. The norms have MindSpeed's names.
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
        """Replace Megatron's addition of bias, dropout and residual.

        These models have neither bias nor dropout.
        """
        return lambda output, residual, dropout: residual + norm(output[0])


class ParallelLayer(TransformerLayer):
    """Megatron's layer whose attention and MLP have the same normed input."""

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: PackedSequences, **_: object
    ) -> tuple[Tensor, None]:
        """Replace TransformerLayer.forward of megatron-core, where one follows the other."""
        normed, mlp = self.input_layernorm(hidden_states), cast("GatedMlp", self.mlp)
        mixed, _bias = self.self_attention(
            normed, attention_mask=None, packed_seq_params=packed_seq_params
        )
        if self.recompute_mlp:
            output, _bias = tensor_parallel.checkpoint(mlp, False, normed)
        else:
            output, _bias = mlp(normed)
        return hidden_states + mixed + output, None


def scaled_addition(scale: float) -> Callable[..., Any]:
    """Return Megatron's addition of an output to the residual, with a factor of the output.

    The models that have one have neither bias nor dropout.
    """

    def add(training: bool, fused: bool) -> Callable[[tuple[Tensor, None], Tensor, float], Tensor]:
        return lambda output, residual, dropout: torch.add(residual, output[0], alpha=scale)

    return add


class DeepstackLayer(TransformerLayer):
    """Megatron's layer, after which deeper features of images are added to their tokens.

    `number` counts from 0 over the whole model.
    """

    def __init__(self, config: TransformerConfig, *args: Any, number: int, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self._number = number

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        output: Any = super().forward(*args, **kwargs)
        hidden, context = output
        packed: PackedSequences = kwargs["packed_seq_params"]
        if packed.images is None:
            return hidden, context
        return packed.images.add(self._number, hidden), context


class CoreAttention(MegatronModule):
    """Core attention module of a layer, between the projections.

    Megatron's core attention has neither packing nor fast kernels on CPU. Megatron's layer spec
    creates this one with the same arguments, and with the attention of the layer.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: object,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: object = None,
        *,
        attention: Attention,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale if attention.scale is None else attention.scale
        self.softcap, self.window = attention.softcap, attention.window
        self.rotary = attention.rotary if attention.rotates else None
        has_norms = attention.qk_norm == "rotated"
        size, eps = attention.head_dim, config.layernorm_epsilon
        self.q_layernorm = RmsNorm(config, size, eps) if has_norms else None
        self.k_layernorm = RmsNorm(config, size, eps) if has_norms else None
        heads = config.num_attention_heads // config.tensor_model_parallel_size
        sinks = (
            torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            if attention.sinks
            else None
        )
        self.register_parameter("softmax_offset", sinks)  # Megatron's name

    def forward(
        self,
        query: Tensor,  # [N, 1, h, d]
        key: Tensor,  # [N, 1, g, d]
        value: Tensor,  # [N, 1, g, d]
        attention_mask: None = None,
        attn_mask_type: object = None,
        attention_bias: None = None,
        packed_seq_params: PackedSequences | None = None,
    ) -> Tensor:  # [N, 1, h * d]
        assert packed_seq_params is not None, "every micro-batch is packed"
        packed = packed_seq_params
        if self.rotary is not None:
            rotation = packed.rotations[self.rotary]
            query, key = (rotate(x, rotation) for x in (query, key))
            if rotation.query_scale is not None:
                query = query * rotation.query_scale
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        query, key, value = (x.squeeze(1) for x in (query, key, value))
        sinks = cast("Tensor | None", self.softmax_offset)
        mixed = packed_attention(
            query, key, value, packed, self.scale, self.window, self.softcap, sinks
        )
        return mixed.flatten(1).unsqueeze(1)
