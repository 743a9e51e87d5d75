"""Replica of a value model, critic or reward model: its head gives one value per token.

It starts from a reward model, whose score head it keeps, or from a language model, whose output
layer is replaced by a head of zeros: all values are then 0 before the first update, in every
parallel layout. Letters: N tokens of a packed micro-batch, M of them selected by the loss mask (m
on this rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from msrl.checkpoint.scored import with_score_head
from msrl.checkpoint.weights import WeightSource
from msrl.models.reward_head import with_score
from msrl.models.shape import Shape
from msrl.trainer.objective.device_batch import DeviceBatch
from msrl.trainer.objective.requests import RankValues, TokenRequest, UpdateRequest
from msrl.trainer.replica import ModelReplica, Output
from msrl.types import MicroBatch


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

    def forward(self, micro_batches: Sequence[MicroBatch], request: TokenRequest) -> RankValues:
        """Return the value before each label."""

        def measure(output: Output, batch: DeviceBatch) -> dict[str, Tensor]:
            return {"values": _values(output, batch)}

        return RankValues(self.by_label(micro_batches, self.run(micro_batches, measure)))

    def update(
        self, micro_batches: Sequence[MicroBatch], request: UpdateRequest
    ) -> dict[str, float]:
        """Run one optimizer step over this data-parallel rank's micro-batches.

        See `ModelReplica.minimize`.
        """

        def finish(output: Output, batch: DeviceBatch) -> tuple[Tensor, dict[str, Tensor]]:
            loss: Any = request.loss
            return loss(_values(output, batch), batch.fields, request.divisor)

        return self.minimize(micro_batches, finish, request)


def _values(output: Output, batch: DeviceBatch) -> Tensor:  # [m, 1] -> [M]
    assert isinstance(output, Tensor)
    return batch.gather(output.squeeze(-1).float())
