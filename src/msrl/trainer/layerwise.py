"""A training rank that computes with a model larger than memory, to prove a conversion of it. Import this after `platform.prepare()`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from msrl.checkpoint.source import open_weights
from msrl.models.parallel_layout import WHOLE, Coords
from msrl.models.rules import Rule
from msrl.models.shape import Shape
from msrl.models.stages import stage_tensors
from msrl.trainer.model import build as megatron
from msrl.trainer.model.gpt import PolicyModel
from msrl.trainer.model.streaming import put, stream_weights
from msrl.trainer.rank import TrainWorker

EMBEDDING = "embedding.word_embeddings.weight"


class LayerwiseWorker(TrainWorker):
    """A training rank that holds the whole model, one layer at a time; forward passes on the CPU only."""

    def load_model(self, path: Path, iteration: int | None = None) -> tuple[PolicyModel, Shape]:
        """The model is made without its weights, which a layer gets when it runs."""
        assert self.device.type == "cpu" and self.layout.ranks_per_model == 1, "layer by layer is for one rank on the CPU"
        source = open_weights(path)
        padded = source.shape.padded_vocab_size(1)
        with _WithoutMemory():
            model = megatron.build_model(source.shape, self.layout, self.dtype, self.device, padded)
        assert isinstance(model, PolicyModel)
        rules: dict[str, Rule] = {placed.name: placed.rule for placed in stage_tensors(source.shape, WHOLE, Coords())}

        def read(name: str) -> Tensor:
            return source.shard(rules[name], 0, 1, padded)

        stream_weights(model, lambda name, into: put(into, read(name), name))
        for name, weight in megatron.named_weights(model).items():
            if not isinstance(weight, nn.Parameter):  # the biases of experts, a number for each
                put(weight, read(name), name)
        if source.shape.tie_word_embeddings:
            model.output_layer.register_forward_pre_hook(_tied(read), with_kwargs=True)
        return model, source.shape


class _WithoutMemory(TorchFunctionMode):
    """What Megatron makes to be filled later, its weights on the CPU, has a shape alone. Untouched memory is no substitute: on huge pages,
    which ranks use, a small part of it takes all. `torch.device("meta")` does not know the factories that the CPU's platform redirects.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if getattr(func, "__name__", "") == "empty":
            given.setdefault("device", "meta")
        return func(*args, **given)


def _tied(read: Callable[[str], Tensor]) -> Callable[[nn.Module, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]:
    """Megatron hands the embedding's weight to a tied output layer, when the embedding holds it no longer."""

    def replaced(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "weight": read(EMBEDDING).float()}

    return replaced
