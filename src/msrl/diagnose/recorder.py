"""Recording of the outputs of modules during a forward pass.

T tokens of a pass, H channels.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl.types import Floats

if TYPE_CHECKING:
    from torch import Tensor, nn

ReadOutput = Callable[[Any], "Tensor"]
"""Function that returns the recorded tensor, [..., H], of a module's output."""

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")


class Recorder:
    """Hooks that keep the outputs of modules in float32 until `end`."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._outputs: dict[str, list[Floats]] = {}

    def watch(self, name: str, module: nn.Module, read: ReadOutput) -> None:
        """Record the outputs of a module under a name."""

        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            values = read(output).detach().float().cpu()
            self._outputs.setdefault(name, []).append(values.reshape(-1, values.shape[-1]).numpy())

        self._handles.append(module.register_forward_hook(hook))

    def end(self) -> dict[str, Floats]:
        """Remove the hooks; return the outputs of all passes, [T, H] by name."""
        for handle in self._handles:
            handle.remove()
        outputs, self._outputs = self._outputs, {}
        return {name: np.concatenate(rows) for name, rows in outputs.items()}


def layer_name(layer: int) -> str:
    """Return the name of a layer in the evidence."""
    return f"layer {layer}"


def decoder_layers(model: nn.Module, num_layers: int) -> Iterator[tuple[int, nn.Module]]:
    """Yield numbers and modules of the decoder layers of a model of vLLM or transformers.

    A vision tower has another list of layers, of another length or under another name.
    """
    lists: dict[str, dict[int, Any]] = {}
    for name, module in model.named_modules():
        match = _LAYER.search(name)
        if match and "visual" not in name and "vision" not in name:
            lists.setdefault(name[: match.start(1)], {})[int(match[1])] = module
    layers = next((modules for modules in lists.values() if len(modules) == num_layers), {})
    yield from sorted(layers.items())


def layer_output(output: Any) -> Tensor:
    """Return the hidden states of a layer's output.

    Layers of vLLM return hidden states and the residual stream that is added to them later; layers
    of transformers and Megatron return hidden states, alone or with something that is no tensor of
    the same shape.
    """
    if not isinstance(output, tuple):
        return output
    hidden, *others = output
    if others and getattr(others[0], "shape", None) == hidden.shape:
        return hidden + others[0]
    return hidden


def first_output(output: Any) -> Tensor:
    """Return the first tensor of an output."""
    return output[0] if isinstance(output, tuple) else output


def by_layer(values: Mapping[str, Floats], num_tokens: int) -> dict[str, Floats]:
    """Return the outputs of layers in order, without padding at the end."""
    numbers = sorted(values, key=lambda name: int(name.split()[-1]))
    return {name: values[name][:num_tokens] for name in numbers}
