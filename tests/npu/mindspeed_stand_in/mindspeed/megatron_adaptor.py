"""Patches without which Megatron does not run on NPUs; the real adaptor makes them too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch_npu.contrib import transfer_to_npu

__all__ = ("transfer_to_npu",)  # the redirection of `torch.cuda`, which the import makes


def _named_as_on_cuda(type_method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Tensor.type` with the names of CUDA's types, to which Megatron compares them."""

    @functools.wraps(type_method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = type_method(*args, **kwargs)
        return result.replace("npu", "cuda") if isinstance(result, str) else result

    return wrapper


torch.Tensor.type = _named_as_on_cuda(torch.Tensor.type)
