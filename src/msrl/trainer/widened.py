"""Passes in float32 of a model whose weights are narrower, to measure what its rounding changes.

The values of the weights stay as they are. Each layer has a float32 copy of its weights while it
runs, so that memory grows by one layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from msrl.trainer.model.gpt import PolicyModel
from msrl.trainer.model.pipeline import virtual_stages


@contextlib.contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """Compute forward passes without gradients of this rank's shard of a model in float32."""
    stages = cast("list[PolicyModel]", virtual_stages(model))
    with contextlib.ExitStack() as stack:
        for stage in stages:
            # Stages exchange activations of this type (Megatron's P2PCommunicator reads it).
            dtype = stage.config.pipeline_dtype
            stack.callback(setattr, stage.config, "pipeline_dtype", dtype)
            stage.config.pipeline_dtype = torch.float32
            stack.enter_context(stage.logits_in(torch.float32))
            if stage.pre_process:
                handle = stage.embedding.register_forward_hook(_widen_output)
                stack.callback(handle.remove)
            for module in _units(stage):
                widened = _WidenedModule(module)
                stack.callback(widened.end)
        yield


def _units(stage: PolicyModel) -> Iterator[nn.Module]:
    """Yield the modules of a stage that have their own copies, one after another."""
    decoder: Any = stage.decoder
    if hasattr(stage, "vision_model"):
        yield stage.vision_model
    yield from decoder.layers
    if decoder.final_layernorm is not None:
        yield decoder.final_layernorm


def _widen_output(_module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    return output.float()


class _WidenedModule:
    """A module whose floating-point parameters are replaced by float32 copies while it runs.

    The parameters themselves are not touched: if their `data` gets another dtype, torch drops the
    node that accumulates their gradients, and with it the hooks through which Megatron collects
    gradients.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parameters = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner.named_parameters(recurse=False)
            if parameter.is_floating_point()
        ]
        self._handles = [
            module.register_forward_pre_hook(self._widen),
            module.register_forward_hook(self._restore, always_call=True),
        ]

    def _widen(self, *_: object) -> None:
        for owner, name, narrow in self._parameters:
            copy = nn.Parameter(narrow.detach().float(), requires_grad=narrow.requires_grad)
            owner.register_parameter(name, copy)

    def _restore(self, *_: object) -> None:
        for owner, name, narrow in self._parameters:
            owner.register_parameter(name, narrow)

    def end(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
