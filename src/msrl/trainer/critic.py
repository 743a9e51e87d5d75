"""The critic of a rank: a second model in the same processes and groups, cut as the policy is, whose head gives one value per token.

It starts from a reward model, whose score head it keeps, or from a model that generates, whose output layer gives way to a head of zeros:
then all values are 0 before the first update, whatever the layout. Adapters and frozen parameters are the policy's alone. Without an
optimizer it is a reward model.
Letters: N tokens of a packed micro-batch, M of them selected by the loss mask.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from msrl.checkpoint.weights import WeightSource
from msrl.models.reward_head import BIAS, OUTPUT_LAYER, WEIGHT, with_score
from msrl.models.shape import Shape
from msrl.trainer.objective.device_batch import DeviceBatch, spread
from msrl.trainer.objective.losses import ValueLoss
from msrl.trainer.replica import Learner
from msrl.types import Floats, MicroBatch


class Critic(Learner):
    """The value model of a rank; its settings are `WorkerSettings.of_critic`, or `of_reward_model`."""

    def shape_of(self, source: WeightSource) -> Shape:
        return source.shape if source.shape.reward_head else with_score(source.shape, source.shape.architecture)

    def fill(self, weights: dict[str, Tensor], source: WeightSource) -> None:
        if source.shape.reward_head:
            return super().fill(weights, source)
        head = [name for name in weights if name.endswith((WEIGHT, BIAS))]
        with torch.no_grad():
            for name in head:
                weights.pop(name).zero_()
            for name, tensor in source.local_tensors(self.layout, self.coords, dtype=self.dtype):
                if not name.endswith(OUTPUT_LAYER):
                    weights.pop(name).copy_(tensor)
        assert not weights, f"weights that no rule fills: {sorted(weights)}"
        return None

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Floats] | None:
        """The value of what precedes each label, [N] per micro-batch, 0 where the mask is not set. None except on the last stage."""

        def keep(output: Tensor, batch: DeviceBatch) -> dict[str, Tensor]:
            return {"values": _values(output, batch)}

        found = self.run(self.model.eval(), micro_batches, keep, forward_only=True)
        if not self.is_last_stage:
            return None
        return [spread(batch, row["values"]).numpy() for batch, row in zip(micro_batches, found, strict=True)]

    def train_step(self, micro_batches: Sequence[MicroBatch], loss: ValueLoss, *, num_tokens: int, lr: float) -> dict[str, float]:
        """One optimizer step over this data-parallel rank's micro-batches, as `Learner.update` says."""
        return self.update(micro_batches, functools.partial(_minimise, loss, num_tokens), num_tokens=num_tokens, lr=lr)


def _values(output: Tensor, batch: DeviceBatch) -> Tensor:  # [m, 1] -> [M]
    return batch.whole(output.squeeze(-1).float())


def _minimise(loss: ValueLoss, num_tokens: int, output: Tensor, batch: DeviceBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return loss(_values(output, batch), batch.fields, num_tokens)
