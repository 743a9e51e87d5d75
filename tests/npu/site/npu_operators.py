"""CPU references of torch_npu's fused operators, registered under their real schemas.

Q and K are the numbers of query and key tokens, h and g the numbers of their heads, d is the
channels per head. The references accept only what the operators of an Atlas A2 accept.
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


def _register(name: str, reference: Callable[[dict[str, Any]], tuple[Tensor, ...]]) -> None:
    """Register a reference that takes all arguments by name and returns the first outputs."""
    schema = getattr(torch.ops.npu, name).default._schema

    def kernel(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        names = [argument.name for argument in schema.arguments]
        defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        outputs = reference(values)
        device = values["query"].device
        rest = [
            torch.empty(0, device=device) if str(result.type) == "Tensor" else 0
            for result in schema.returns[len(outputs) :]
        ]
        return (*(output.to(device) for output in outputs), *rest)

    _LIBRARY.impl(name, kernel, "PrivateUse1")


def _check(values: dict[str, Any]) -> None:
    """Raise an error for arguments that the operator does not support."""
    query, key, mask = values["query"], values["key"], values["atten_mask"]
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise RuntimeError(f"npu_fusion_attention: {query.dtype} is not supported")
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
    query = values["query"].cpu()
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
    inputs = [values[name].cpu() for name in ("query", "key", "value")]
    gradients = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in inputs]
    scale, heads = values["scale_value"], inputs[1].shape[1]
    for queries, keys, hidden in _sequences(values):
        q, k, v = _heads(values, queries, keys)
        weights = _weights(q, k, hidden, scale)
        output_gradient = values["dy"].cpu()[queries].float()
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
    query = values["query"].cpu()[queries].float()
    key, value = (values[name].cpu()[keys].float() for name in ("key", "value"))
    repeats = query.shape[1] // key.shape[1]
    return query, key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)


def _weights(query: Tensor, key: Tensor, hidden: Tensor, scale: float) -> Tensor:  # [h, Q, K]
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)
