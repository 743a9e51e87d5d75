"""CPU references of torch_npu's fused operators, registered under their real schemas.

Q and K are the numbers of query and key tokens, h and g the numbers of their heads, d is the
channels per head, n the tokens, c the channels and E the experts. The references accept only what
the operators of an Atlas A2 accept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_MASK_SIZE = 2048
_RIGHT_DOWN_CAUSAL = 3
_BAND = 4
_LIBRARY = torch.library.Library("npu", "IMPL")


def register_operators() -> None:
    """Register the reference of each operator for the simulated device."""
    _register("npu_fusion_attention", _attention)
    _register("npu_fusion_attention_grad", _attention_gradient)
    _register("npu_rms_norm", _rms_norm)
    _register("npu_rms_norm_backward", _rms_norm_gradient)
    _register("npu_swiglu", _swiglu)
    _register("npu_swiglu_backward", _swiglu_gradient)
    _register("npu_rotary_mul", _rotary)
    _register("npu_rotary_mul_backward", _rotary_gradient)
    _register("npu_grouped_matmul", _grouped_matmul)


def _register(name: str, reference: Callable[[dict[str, Any]], tuple[Tensor, ...]]) -> None:
    """Register a reference that takes all arguments by name and returns the first outputs."""
    schema = getattr(torch.ops.npu, name).default._schema

    def kernel(*args: Any, **kwargs: Any) -> Any:
        names = [argument.name for argument in schema.arguments]
        defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        first = args[0][0] if isinstance(args[0], list) else args[0]
        _check_type(name, first)
        outputs = [output.to(first.device) for output in reference(_on_host(values))]
        if str(schema.returns[0].type) == "List[Tensor]":
            return outputs
        unset = [
            torch.empty(0, device=first.device) if str(result.type) == "Tensor" else 0
            for result in schema.returns[len(outputs) :]
        ]
        return (*outputs, *unset) if len(schema.returns) > 1 else outputs[0]

    _LIBRARY.impl(name, kernel, "PrivateUse1")


def _check_type(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise RuntimeError(f"{name}: {tensor.dtype} is not supported")


def _on_host(values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with all tensors on the CPU."""
    return {
        name: [tensor.cpu() for tensor in value] if _has_tensors(value) else _move(value)
        for name, value in values.items()
    }


def _has_tensors(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Tensor)


def _move(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


def _check(values: dict[str, Any]) -> None:
    """Raise an error for arguments that the operator does not support."""
    query, key, mask = values["query"], values["key"], values["atten_mask"]
    if values["input_layout"] != "TND" or values["sparse_mode"] not in (_RIGHT_DOWN_CAUSAL, _BAND):
        raise RuntimeError("npu_fusion_attention: the reference has TND, sparse modes 3 and 4 only")
    if query.shape[-1] % 16 or query.shape[-1] > 512 or query.shape[1] % key.shape[1]:
        raise RuntimeError(f"npu_fusion_attention: unsupported shape {tuple(query.shape)}")
    if mask is None or mask.shape != (_MASK_SIZE, _MASK_SIZE) or mask.dtype != torch.bool:
        raise RuntimeError("npu_fusion_attention: sparse modes need a mask of [2048, 2048] bool")
    lengths = values["actual_seq_qlen"], values["actual_seq_kvlen"]
    if [ends[-1] for ends in lengths] != [len(query), len(key)]:
        raise RuntimeError("npu_fusion_attention: the lengths do not cover all tokens")


def _attention(values: dict[str, Any]) -> tuple[Tensor, ...]:
    _check(values)
    query = values["query"]
    output = torch.empty_like(query)
    for queries, keys, hidden in _sequences(values):
        q, k, v = _heads(values, queries, keys)
        weights = _weights(q, k, hidden, values["scale"])
        output[queries] = torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)
    statistics = torch.zeros(*query.shape[:2], 8)  # maxima and sums of the softmax
    return output, statistics, statistics


def _attention_gradient(values: dict[str, Any]) -> tuple[Tensor, ...]:
    """Return the gradients of query, key and value from the derivative of the softmax."""
    _check(values)
    inputs = [values[name] for name in ("query", "key", "value")]
    gradients = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in inputs]
    scale, heads = values["scale_value"], inputs[1].shape[1]
    for queries, keys, hidden in _sequences(values):
        q, k, v = _heads(values, queries, keys)
        weights = _weights(q, k, hidden, scale)
        output_gradient = values["dy"][queries].float()
        weight_gradient = torch.einsum("qhd,khd->hqk", output_gradient, v)
        mean = (weight_gradient * weights).sum(-1, keepdim=True)
        score_gradient = weights * (weight_gradient - mean) * scale
        gradients[0][queries] = torch.einsum("hqk,khd->qhd", score_gradient, k)
        key_gradient = torch.einsum("hqk,qhd->khd", score_gradient, q)
        value_gradient = torch.einsum("hqk,qhd->khd", weights, output_gradient)
        gradients[1][keys] = key_gradient.unflatten(1, (heads, -1)).sum(2)
        gradients[2][keys] = value_gradient.unflatten(1, (heads, -1)).sum(2)
    pairs = zip(gradients, inputs, strict=True)
    return tuple(gradient.to(tensor.dtype) for gradient, tensor in pairs)


def _sequences(values: dict[str, Any]) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield the queries and keys of each sequence, and which keys a query excludes, [Q, K]."""
    lengths = (values["actual_seq_qlen"], values["actual_seq_kvlen"])
    bounds = [itertools.pairwise((0, *ends)) for ends in lengths]
    for (q0, q1), (k0, k1) in zip(*bounds, strict=True):
        # The last query of a sequence has the position of its last key.
        positions = torch.arange(q1 - q0) + (k1 - k0) - (q1 - q0)
        distance = positions[:, None] - torch.arange(k1 - k0)
        is_band = values["sparse_mode"] == _BAND
        window = values["pre_tockens"] + 1 if is_band else k1 - k0
        yield slice(q0, q1), slice(k0, k1), (distance < 0) | (distance >= window)


def _heads(values: dict[str, Any], queries: slice, keys: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value of a sequence in float32 with h heads each."""
    query = values["query"][queries].float()
    key, value = (values[name][keys].float() for name in ("key", "value"))
    repeats = query.shape[1] // key.shape[1]
    return query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)


def _weights(query: Tensor, key: Tensor, hidden: Tensor, scale: float) -> Tensor:  # [h, Q, K]
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def _gradients(
    function: Callable[..., Tensor], inputs: list[Tensor], output_gradient: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of a function in float32, in the types of its inputs."""
    with torch.enable_grad():
        wide = [tensor.detach().float().requires_grad_() for tensor in inputs]
        gradients = torch.autograd.grad(function(*wide), wide, output_gradient.float())
    pairs = zip(gradients, inputs, strict=True)
    return tuple(gradient.to(tensor.dtype) for gradient, tensor in pairs)


def _normalize(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight


def _rms_norm(values: dict[str, Any]) -> tuple[Tensor, ...]:
    x, weight, epsilon = values["input"], values["gamma"], values["epsilon"]
    if weight.shape != x.shape[-1:]:
        raise RuntimeError(f"npu_rms_norm: gamma of shape {tuple(weight.shape)}")
    scale = (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return _normalize(x.float(), weight.float(), epsilon).to(x.dtype), scale


def _rms_norm_gradient(values: dict[str, Any]) -> tuple[Tensor, ...]:
    x, scale = values["input"].float(), values["rstd"]
    epsilon = float((scale[..., :1] ** -2 - x.square().mean(-1, keepdim=True)).flatten()[0])
    inputs = [values["input"], values["gamma"]]
    return _gradients(lambda x, w: _normalize(x, w, epsilon), inputs, values["dy"])


def _gate(x: Tensor, dim: int) -> Tensor:
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def _swiglu(values: dict[str, Any]) -> tuple[Tensor, ...]:
    x = values["input"]
    return (_gate(x.float(), values["dim"]).to(x.dtype),)


def _swiglu_gradient(values: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs, gradient = [values["input"]], values["grad_output"]
    return _gradients(lambda x: _gate(x, values["dim"]), inputs, gradient)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    else:
        first, second = x[..., ::2], x[..., 1::2]
        turned = torch.stack((-second, first), -1).flatten(-2)
    return x * cos + turned * sin


def _rotary(values: dict[str, Any]) -> tuple[Tensor, ...]:
    x, cos, sin = (values[name] for name in ("input", "r1", "r2"))
    if x.ndim != 4 or x.shape[-1] % 2 or x.shape[-1] > 896:
        raise RuntimeError(f"npu_rotary_mul: unsupported shape {tuple(x.shape)}")
    mode = values["rotary_mode"]
    return (_rotate(x.float(), cos.float(), sin.float(), mode).to(x.dtype),)


def _rotary_gradient(values: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs, mode = [values[name] for name in ("input", "r1", "r2")], values["rotary_mode"]
    return _gradients(lambda x, c, s: _rotate(x, c, s, mode), inputs, values["grad"])


def _grouped_matmul(values: dict[str, Any]) -> tuple[Tensor, ...]:
    """Multiply the tokens of each expert, [n, c], by its matrix, [c, k].

    The matrices are one weight, [E, c, k], or E weights.
    """
    x, weights = values["x"][0], values["weight"]
    matrices = weights[0] if len(weights) == 1 else weights
    ends = values["group_list"].tolist()
    if values["group_type"] != 0 or values["split_item"] not in (2, 3) or ends[-1] != len(x):
        raise RuntimeError("npu_grouped_matmul: the reference has group type 0 and one output only")
    if len(weights) > 128 or (len(weights) > 1 and x.dtype == torch.float32):
        raise RuntimeError(f"npu_grouped_matmul: {len(weights)} weights of {x.dtype}")
    products = [
        x[start:end].float() @ matrix.float()
        for (start, end), matrix in zip(itertools.pairwise((0, *ends)), matrices, strict=True)
    ]
    return (torch.cat(products).to(x.dtype),)
