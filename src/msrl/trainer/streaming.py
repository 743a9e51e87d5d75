"""Forward passes of a model that is larger than memory: the weights of one layer are read when it runs, and let go of after it.

A model is any torch module, transformers' or Megatron's. In memory are one decoder layer, or the embedding, or the output layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Fetch = Callable[[str], Tensor]


def stream_weights(model: nn.Module, fetch: Fetch) -> None:
    """Have `model` ask for its parameters by name when it runs, in float32; until then it holds none.

    A parameter that is used outside the module that owns it (Megatron's tied output layer) is not covered: see `layerwise`.
    """
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.data.to("meta"), requires_grad=False))
    for prefix, unit in _units(model):
        unit.register_forward_pre_hook(_filler(prefix, fetch))
        unit.register_forward_hook(_emptier)


def _units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The decoder layers, and besides them every module that owns parameters itself, with their names."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and name.endswith("layers")]
    outermost = tuple(f"{name}." for name in lists if not any(name.startswith(f"{other}.") for other in lists))
    for name, module in model.named_modules():
        is_layer = f"{name.rpartition('.')[0]}." in outermost
        owns_parameters = next(module.parameters(recurse=False), None) is not None
        if is_layer or (owns_parameters and not name.startswith(outermost)):
            yield name, module


def _filler(prefix: str, fetch: Fetch) -> Callable[[nn.Module, Any], None]:
    def fill(unit: nn.Module, _: Any) -> None:
        for path, module in unit.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                full = ".".join(part for part in (prefix, path, name) if part)
                tensor = fetch(full).float()
                if tensor.shape != parameter.shape:
                    raise RuntimeError(f"{full} is {list(tensor.shape)}, but the module makes it {list(parameter.shape)}")
                setattr(module, name, nn.Parameter(tensor, requires_grad=False))

    return fill


def _emptier(unit: nn.Module, *_: Any) -> None:
    for module in unit.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False))
