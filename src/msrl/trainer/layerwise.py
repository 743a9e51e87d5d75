"""Replica of a model larger than memory, to verify a conversion of it.

Import this after `platform.prepare()`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from msrl.checkpoint.source import open_weights
from msrl.models.parallel_layout import SINGLE_RANK, Coords
from msrl.models.rules import Rule
from msrl.models.shape import Shape
from msrl.models.stages import stage_tensors
from msrl.trainer.language_model import LanguageModelReplica
from msrl.trainer.model import build as megatron
from msrl.trainer.model.gpt import PolicyModel
from msrl.trainer.streaming import put, stream_weights

EMBEDDING = "embedding.word_embeddings.weight"


class LayerwiseReplica(LanguageModelReplica):
    """Replica of a model that holds one layer at a time. Runs only forward passes on CPU."""

    def load_model(self) -> tuple[PolicyModel, Shape]:
        """Return the model without weights, which a layer reads when it runs."""
        position = self.position
        assert position.device.type == "cpu" and position.layout.ranks_per_model == 1, (
            "layer by layer needs one rank on the CPU"
        )
        source = open_weights(self.settings.model)
        padded = source.shape.padded_vocab_size(1)
        with _WithoutMemory():
            model = megatron.build_model(
                source.shape, position.layout, position.dtype, position.device, padded
            )
        assert isinstance(model, PolicyModel)
        rules: dict[str, Rule] = {
            placed.name: placed.rule
            for placed in stage_tensors(source.shape, SINGLE_RANK, Coords())
        }

        def read(name: str) -> Tensor:
            return source.shard(rules[name], 0, 1, padded)

        stream_weights(model, lambda name, into: put(into, read(name), name))
        for name, weight in megatron.named_weights(model).items():
            if not isinstance(weight, nn.Parameter):  # biases of experts, one number each
                put(weight, read(name), name)
        if source.shape.tie_word_embeddings:
            model.output_layer.register_forward_pre_hook(_tied_hook(read), with_kwargs=True)
        return model, source.shape


class _WithoutMemory(TorchFunctionMode):
    """Give the CPU tensors that Megatron creates for its weights a shape and no memory.

    Untouched memory is no substitute: with huge pages, which ranks use, touching a small part
    allocates all of it. `torch.device("meta")` does not cover the factories that the CPU platform
    redirects.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        if getattr(func, "__name__", "") == "empty":
            options.setdefault("device", "meta")
        return func(*args, **options)


def _tied_hook(
    read: Callable[[str], Tensor],
) -> Callable[[nn.Module, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]:
    """Return a hook that reads the weight of a tied output layer.

    The embedding owns the weight and has released it before.
    """

    def with_weight(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "weight": read(EMBEDDING).float()}

    return with_weight
