"""Replica of a value model, critic or reward model: its head gives one value per token.

It starts from a reward model, whose score head it keeps, or from a language model, whose output
layer is replaced by a head of zeros: all values are then 0 before the first update, in every
parallel layout. Letters: N tokens of a packed micro-batch, M of them selected by the loss mask (m
on this rank).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from msrl.checkpoint.scored import with_score_head
from msrl.checkpoint.weights import WeightSource
from msrl.models.reward_head import with_score
from msrl.models.shape import Shape
from msrl.trainer.objective.device_batch import DeviceBatch, spread
from msrl.trainer.objective.losses import ValuesLoss
from msrl.trainer.replica import ModelReplica, Output
from msrl.types import Floats, MicroBatch


class ValueModelReplica(ModelReplica):
    """A replica whose output layer gives one value per token."""

    def trained_shape(self, source: WeightSource) -> Shape:
        """Return the shape of `source` with a score head."""
        return (
            source.shape
            if source.shape.reward_head
            else with_score(source.shape, source.shape.architecture)
        )

    def fill_weights(self, weights: dict[str, Tensor], source: WeightSource) -> None:
        """Copy this rank's tensors of `source`; the head of a language model becomes zero."""
        super().fill_weights(weights, with_score_head(source))

    def values(self, micro_batches: Sequence[MicroBatch]) -> list[Floats] | None:
        """Return the value before each label, [N] per micro-batch, 0 where the mask is not set.

        None except on the last stage.
        """

        def finish(output: Output, batch: DeviceBatch) -> dict[str, Tensor]:
            return {"values": _values(output, batch)}

        rows = self.run(micro_batches, finish)
        if not self.position.is_last_stage:
            return None
        return [
            spread(batch, row["values"]).numpy()
            for batch, row in zip(micro_batches, rows, strict=True)
        ]

    def train_step(
        self, micro_batches: Sequence[MicroBatch], loss: ValuesLoss, *, num_tokens: float, lr: float
    ) -> dict[str, float]:
        """Run one optimizer step over this data-parallel rank's micro-batches.

        See `ModelReplica.update`.
        """
        return self.update(
            micro_batches,
            functools.partial(_minimize, loss, num_tokens),
            num_tokens=num_tokens,
            lr=lr,
        )

    def evaluate(
        self, micro_batches: Sequence[MicroBatch], loss: ValuesLoss, *, num_tokens: float
    ) -> dict[str, float]:
        """Return the metrics of a training step without an update."""
        rows = self.run(micro_batches, functools.partial(_minimize, loss, num_tokens))
        return self.mean_metrics(rows, num_tokens)


def _values(output: Output, batch: DeviceBatch) -> Tensor:  # [m, 1] -> [M]
    assert isinstance(output, Tensor)
    return batch.gather(output.squeeze(-1).float())


def _minimize(
    loss: ValuesLoss, num_tokens: float, output: Output, batch: DeviceBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    return loss(_values(output, batch), batch.fields, num_tokens)
