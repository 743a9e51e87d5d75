"""The critic's part of a step: values of every response token before the updates, then its own
updates on what they should have been.

N response tokens of all samples end to end, T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from msrl.algorithms.packing import Sequences
from msrl.algorithms.token_rewards import Reals
from msrl.algorithms.value import explained_variance
from msrl.config.schema import Config
from msrl.plan.derived import critic_optimizer, updates_per_step
from msrl.trainer.objective.batches import BatchLimits, num_loss_tokens, select
from msrl.trainer.objective.losses import ValueLoss
from msrl.trainer.schedule import Schedule
from msrl.types import Floats
from msrl.workflows.rl.worker_groups import TrainerGroup


class CriticUpdater:
    """Asks the ranks' critics for values and trains them. All that it needs to go on is in the
    ranks' checkpoints.
    """

    def __init__(self, config: Config, trainers: TrainerGroup, num_steps: int) -> None:
        optimizer = critic_optimizer(config)
        self._trainers, self._loss = trainers, ValueLoss(config.algo.value.clip)
        self._schedule = Schedule(
            optimizer.schedule,
            optimizer.lr,
            optimizer.min_lr,
            optimizer.warmup,
            num_steps * updates_per_step(config),
            optimizer.decay,
        )

    def values(self, sequences: Sequences, limits: BatchLimits) -> Reals:  # [N]
        """What the critic expects behind what precedes each response token; `sequences` mark all of
        these tokens.
        """
        rows = self._trainers.values(sequences, limits)
        return np.concatenate(
            [row[mask] for row, mask in zip(rows, sequences.loss_masks, strict=True)]
        ).astype(np.float64)

    def update(
        self, sequences: Sequences, parts: Sequence[Sequence[int]], step: int, limits: BatchLimits
    ) -> dict[str, float]:
        """One update for each part of the sequences, as `with_targets` made them. Returns their
        mean report; `value_lr` is the last's.
        """
        reports, lr = list[Mapping[str, float]](), 0.0
        for number, part in enumerate(parts):
            lr = self._schedule.at(step * len(parts) + number)
            chosen = select(sequences, part)
            if num_loss_tokens(chosen):
                reports.append(self._trainers.update_critic(chosen, limits, self._loss, lr))
        means = {
            name: float(np.mean([report[name] for report in reports]))
            for name in (reports[0] if reports else ())
        }
        return {**{_NAMES.get(name, name): value for name, value in means.items()}, "value_lr": lr}


_NAMES = {name: f"value_{name}" for name in ("grad_norm", "lr", "skipped")}


def with_targets(
    sequences: Sequences, responses: Sequences, values: Reals, returns: Reals
) -> Sequences:
    """The sequences with the fields that the critic's loss reads. `responses` mark the tokens that
    the [N] numbers are of.
    """
    fields = {"old_values": _spread(responses, values), "returns": _spread(responses, returns)}
    return sequences._replace(fields=fields)


def _spread(responses: Sequences, numbers: Reals) -> tuple[Floats, ...]:  # [N] -> S of [T]
    found, start = list[Floats](), 0
    for mask in responses.loss_masks:
        row, count = np.zeros(len(mask), np.float32), int(mask.sum())
        row[mask] = numbers[start : start + count]
        found.append(row)
        start += count
    return tuple(found)


def value_metrics(values: Reals, returns: Reals) -> dict[str, Any]:  # [N] each
    """How good the critic was before the step's updates."""
    return {
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
        "value_explained_variance": explained_variance(values, returns),
    }
