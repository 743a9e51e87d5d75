"""A training rank that computes with a model larger than memory, to prove a conversion of it. Import this after `platform.prepare()`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from msrl.checkpoint.source import open_weights
from msrl.models.cut import WHOLE, Coords
from msrl.models.rules import Rule
from msrl.models.shape import Shape
from msrl.models.stages import stage_tensors
from msrl.trainer import megatron
from msrl.trainer.policy import PolicyModel
from msrl.trainer.streaming import Fetch, stream_weights
from msrl.trainer.worker import TrainWorker

EMBEDDING = "embedding.word_embeddings.weight"


class LayerwiseWorker(TrainWorker):
    """A training rank that holds the whole model, one layer at a time; forward passes on the CPU only."""

    def load_model(self, path: Path, iteration: int | None = None) -> tuple[PolicyModel, Shape]:
        """Megatron does not touch the memory of weights that are not initialised, so that building the model takes none."""
        assert self.device.type == "cpu" and self.layout.ranks_per_model == 1, "layer by layer is for one rank on the CPU"
        source = open_weights(path)
        padded = source.shape.padded_vocab_size(1)
        model = megatron.build_model(source.shape, self.layout, self.dtype, self.device, padded)
        assert isinstance(model, PolicyModel)
        rules: dict[str, Rule] = {placed.name: placed.rule for placed in stage_tensors(source.shape, WHOLE, Coords())}

        def fetch(name: str) -> Tensor:
            return source.shard(rules[name], 0, 1, padded)

        stream_weights(model, fetch)
        for name, weight in megatron.named_weights(model).items():
            if not isinstance(weight, nn.Parameter):  # the biases of experts, a number for each
                weight.copy_(fetch(name))
        if source.shape.tie_word_embeddings:
            model.output_layer.register_forward_pre_hook(_tied(fetch), with_kwargs=True)
        return model, source.shape


def _tied(fetch: Fetch) -> Callable[[nn.Module, Any, dict[str, Any]], tuple[Any, dict[str, Any]]]:
    """Megatron hands the embedding's weight to a tied output layer, when the embedding holds it no longer."""

    def replaced(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "weight": fetch(EMBEDDING).float()}

    return replaced
