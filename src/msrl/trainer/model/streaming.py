"""Forward passes of a model that is larger than memory: the weights of one layer are read when it
runs, and let go of after it.

A model is any torch module, transformers' or Megatron's. In memory are one decoder layer, or the
embedding, or the output layer, each as one piece: of the many pieces that a mixture of experts
would otherwise make and free, the holes do not go back to the system.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Fill = Callable[[str, Tensor], None]
"""Writes the parameter of that name into a float32 tensor of its shape."""


def put(into: Tensor, value: Tensor, name: str) -> None:
    """Copy `value`, of any type, into a tensor of the same shape. Raises RuntimeError for another
    shape, which torch might stretch.
    """
    if value.shape != into.shape:
        raise RuntimeError(
            f"{name} is {list(value.shape)}, but the module makes it {list(into.shape)}"
        )
    into.copy_(value)


@contextlib.contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Modules that are made inside have their parameters' shapes alone (on torch's `meta` device);
    buffers are as ever.
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
    """Have `model` ask for its parameters by name when it runs, in float32; until then it holds
    none.

    A parameter that is used outside the module that owns it (Megatron's tied output layer) is not
    covered: see `layerwise`.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.data.to("meta"), requires_grad=False))
    for prefix, unit in _units(model):
        unit.register_forward_pre_hook(_filler(prefix, fill))
        unit.register_forward_hook(_emptier)


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The decoder layers, and besides them every module that owns parameters itself, with their
    names.
    """
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and name.endswith("layers")
    ]
    outermost = tuple(
        f"{name}." for name in lists if not any(name.startswith(f"{other}.") for other in lists)
    )
    for name, module in model.named_modules():
        is_layer = f"{name.rpartition('.')[0]}." in outermost
        owns_parameters = next(module.parameters(recurse=False), None) is not None
        if is_layer or (owns_parameters and not name.startswith(outermost)):
            yield name, module


def _filler(prefix: str, fill: Fill) -> Callable[[nn.Module, Any], None]:
    def fill_unit(unit: nn.Module, _: Any) -> None:
        owned = [
            (path, module)
            for path, module in unit.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        ]
        memory, begin = torch.empty(sum(parameter.numel() for parameter in unit.parameters())), 0
        for path, module in owned:
            for name, parameter in list(module.named_parameters(recurse=False)):
                into = memory[begin : begin + parameter.numel()].view(parameter.shape)
                begin += parameter.numel()
                fill(".".join(part for part in (prefix, path, name) if part), into)
                setattr(module, name, nn.Parameter(into, requires_grad=False))

    return fill_unit


def _emptier(unit: nn.Module, *_: Any) -> None:
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(
                module,
                name,
                nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False),
            )
