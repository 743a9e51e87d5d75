"""Values and updates of the critic in a GRPO step.

N response tokens of all samples, concatenated; S sequences of T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from msrl.algorithms.packing import Sequences
from msrl.algorithms.token_rewards import Reals
from msrl.algorithms.value import explained_variance
from msrl.config.schema import Config
from msrl.plan.derived import aggregate_constant, critic_optimizer, updates_per_step
from msrl.trainer.objective.batches import (
    BatchLimits,
    num_loss_tokens,
    padded,
    select,
    with_weights,
)
from msrl.trainer.objective.losses import ValueLoss
from msrl.trainer.objective.requests import TokenRequest, UpdateRequest
from msrl.trainer.schedule import Schedule
from msrl.types import Floats
from msrl.workflows.rl.update_batches import UpdateBatch, averaging_groups
from msrl.workflows.training.trainer_group import TrainerGroup


class CriticUpdater:
    """Computes values with the critics of the ranks and trains them.

    The ranks' checkpoints hold all of its state.
    """

    def __init__(self, config: Config, trainers: TrainerGroup, num_steps: int) -> None:
        optimizer, num_updates = critic_optimizer(config), num_steps * updates_per_step(config)
        self._config, self._trainers = config, trainers
        self._loss = ValueLoss(config.algo.value.clip)
        self._schedule = Schedule.of(optimizer, num_updates)

    def values(self, sequences: Sequences, limits: BatchLimits) -> Reals:  # [N]
        """Return the value of the state before each response token.

        The loss masks of `sequences` mark all response tokens.
        """
        request = TokenRequest(("values",), model="critic")
        rows = self._trainers.forward(request, sequences, limits)["values"]
        values = [row[mask] for row, mask in zip(rows, sequences.loss_masks, strict=True)]
        return np.concatenate(values).astype(np.float64)

    def update(
        self, sequences: Sequences, batches: Sequence[UpdateBatch], step: int, limits: BatchLimits
    ) -> dict[str, float]:
        """Update the critic once per batch of sequences that have the fields of `with_targets`.

        Returns:
            The mean of the updates' metrics, and the learning rate of the last update as
            `value_lr`.
        """
        reports, lr = list[Mapping[str, float]](), 0.0
        for number, batch in enumerate(batches):
            lr = self._schedule.at(step * len(batches) + number)
            weighted = value_batch(self._config, sequences, batch, self._trainers.dp_size)
            if num_loss_tokens(weighted):
                request = UpdateRequest(self._loss, lr, model="critic")
                reports.append(self._trainers.update(request, weighted, limits))
        means = {_NAMES.get(name, name): mean for name, mean in mean_report(reports).items()}
        return {**means, "value_lr": lr}


def value_batch(
    config: Config, sequences: Sequences, batch: UpdateBatch, dp_size: int
) -> Sequences:
    """Return the sequences of an update, with the weights of `algo.value.aggregate`."""
    own, mode = select(sequences, batch.sequences), config.algo.value.aggregate
    groups = averaging_groups(config.algo.aggregate, batch, own)
    own = padded(own, dp_size)
    if mode == "token-mean" or not num_loss_tokens(own):
        return own
    return with_weights(own, mode, aggregate_constant(config), groups)


_NAMES = {name: f"value_{name}" for name in ("grad_norm", "lr", "skipped")}


def mean_report(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every metric; the reports have the same metrics."""
    if not reports:
        return {}
    return {name: float(np.mean([report[name] for report in reports])) for name in reports[0]}


def with_targets(
    sequences: Sequences,
    responses: Sequences,  # their loss masks mark the N response tokens
    values: Reals,  # [N]
    returns: Reals,  # [N]
) -> Sequences:
    """Return the sequences with the fields that the critic's loss reads, without routes."""
    fields = {
        "old_values": _by_sequence(responses, values),
        "returns": _by_sequence(responses, returns),
    }
    return sequences._replace(fields=fields, routes=None)


def _by_sequence(responses: Sequences, numbers: Reals) -> tuple[Floats, ...]:  # [N] -> S of [T]
    """Split numbers of response tokens by sequence; all other tokens get 0."""
    rows, start = list[Floats](), 0
    for mask in responses.loss_masks:
        row, count = np.zeros(len(mask), np.float32), int(mask.sum())
        row[mask] = numbers[start : start + count]
        rows.append(row)
        start += count
    return tuple(rows)


def value_metrics(values: Reals, returns: Reals) -> dict[str, Any]:  # [N] each
    """Return metrics of the critic's values before the updates of a step."""
    return {
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
        "value_explained_variance": explained_variance(values, returns),
    }
