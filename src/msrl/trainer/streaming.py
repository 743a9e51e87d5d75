"""Forward passes of a model larger than memory.

Every layer reads its weights when it runs and frees them afterwards.

A model is any torch module, from transformers or Megatron. Only one decoder layer, the embedding or
the output layer is in memory, in one allocation: freeing the many small tensors of a mixture of
experts would fragment memory, which the system does not get back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Fill = Callable[[str, Tensor], None]
"""Function that writes the parameter of a name into a float32 tensor of its shape."""


def put(into: Tensor, value: Tensor, name: str) -> None:
    """Copy `value`, of any type, into a tensor of the same shape.

    Raises:
        RuntimeError: The shapes differ. torch might broadcast them.
    """
    if value.shape != into.shape:
        raise RuntimeError(
            f"{name} has shape {list(value.shape)}, but the module expects {list(into.shape)}"
        )
    into.copy_(value)


@contextlib.contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Create modules with parameters on torch's `meta` device, which have only a shape.

    Buffers are unchanged.
    """
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(
            self,
            name,
            None if param is None else nn.Parameter(param.data.to("meta"), requires_grad=False),
        )

    nn.Module.register_parameter = without_memory
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def stream_weights(model: nn.Module, fill: Fill) -> None:
    """Let `model` read its parameters by name, in float32, when it runs.

    It holds none before and after. This does not cover a parameter that is used outside the module
    that owns it (Megatron's tied output layer): see `layerwise`.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.data.to("meta"), requires_grad=False))
    for prefix, unit in _streamed_modules(model):
        unit.register_forward_pre_hook(_load_hook(prefix, fill))
        unit.register_forward_hook(_free_parameters)


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _streamed_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of decoder layers and of all other parameter owners."""
    prefixes: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.endswith("layers"):
            prefixes.append(f"{name}.")
    # A list of layers inside of another one is part of its layers.
    outermost = tuple(
        prefix for prefix in prefixes if not prefix.removesuffix(".").startswith(tuple(prefixes))
    )
    for name, module in model.named_modules():
        is_layer = f"{name.rpartition('.')[0]}." in outermost
        if is_layer or (_owns_parameters(module) and not name.startswith(outermost)):
            yield name, module


def _load_hook(prefix: str, fill: Fill) -> Callable[[nn.Module, Any], None]:
    """Return a hook that loads all parameters of a module into one allocation."""

    def load(unit: nn.Module, _: Any) -> None:
        owners = [
            (path, module) for path, module in unit.named_modules() if _owns_parameters(module)
        ]
        memory, begin = torch.empty(sum(parameter.numel() for parameter in unit.parameters())), 0
        for path, module in owners:
            for name, parameter in list(module.named_parameters(recurse=False)):
                into = memory[begin : begin + parameter.numel()].view(parameter.shape)
                begin += parameter.numel()
                fill(".".join(filter(None, (prefix, path, name))), into)
                setattr(module, name, nn.Parameter(into, requires_grad=False))

    return load


def _free_parameters(unit: nn.Module, *_: Any) -> None:
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(
                module,
                name,
                nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False),
            )
