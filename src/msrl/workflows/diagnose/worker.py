"""Training rank that also reports what `msrl diagnose` compares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msrl.diagnose.recorder import Recorder, layer_name, layer_output
from msrl.models.shape import Shape
from msrl.types import Floats
from msrl.workflows.diagnose.images import ImageProbe, rank_stages
from msrl.workflows.training.train_worker import TrainWorker

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RankRecording:
    """Layers and routers of a rank in one forward pass.

    Attributes:
        tp_rank: Rank among those that split the tokens of a stage.
        is_split: Whether each of them has a part of the tokens (sequence parallelism).
        layers: Outputs of its layers, [T, H], by name.
        experts: Routed experts, [T, E] of 0 and 1, by name of the layer.
    """

    tp_rank: int
    is_split: bool
    layers: dict[str, Floats]
    experts: dict[str, Floats]


class DiagnoseWorker(TrainWorker):
    """Worker of one training rank with methods that describe its model."""

    _layers: Recorder
    _routers: Recorder

    def describe_model(self) -> tuple[str, Shape]:
        """Return the dtype and the shape of the policy."""
        policy = self._training_rank.policy
        return str(policy.position.dtype).removeprefix("torch."), policy.shape

    def begin_recording(self) -> None:
        """Record the outputs of all layers and routers until `end_recording`."""
        from msrl.trainer.model import pipeline

        policy = self._training_rank.policy
        position = policy.position
        self._layers, self._routers = Recorder(), Recorder()
        chunks = position.layout.chunks(policy.shape.num_layers, position.pp_rank)
        stages = pipeline.virtual_stages(policy.model)
        for stage, numbers in zip(stages, chunks, strict=True):
            layers: Any = stage.decoder.layers  # pyright: ignore[reportAttributeAccessIssue]
            for number, layer in zip(numbers, layers, strict=True):
                if number is not None:
                    self._watch(number, layer)

    def record_image(self, probe: ImageProbe) -> dict[str, Floats]:
        """Return the stages of an image before the decoder layers; none without the tower."""
        policy = self._training_rank.policy
        tower, loader = policy.tower, policy.image_loader
        return {} if tower is None or loader is None else rank_stages(tower, loader, probe)

    def _watch(self, number: int, layer: Any) -> None:
        name = layer_name(number)
        self._layers.watch(name, layer, layer_output)
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            self._routers.watch(name, router, _choice)

    def end_recording(self) -> RankRecording:
        """Return the outputs since `begin_recording`."""
        position = self._training_rank.position
        return RankRecording(
            position.tp_rank,
            position.layout.sp and position.layout.tp > 1,
            self._layers.end(),
            self._routers.end(),
        )


def _choice(output: Any) -> Tensor:
    """Return the choice of a router, which is its second output."""
    return output[1]
