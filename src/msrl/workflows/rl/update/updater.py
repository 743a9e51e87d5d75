"""Updates of policy and critic in a GRPO step.

In: scored groups, and the models on the ranks. Out: new weights, and metrics. `Updater.prepare`
calls the stages before the updates, one file each: arrays of the groups
(`algorithms/rollout_arrays.py`), values of tokens (`values.py`), advantages (`advantages.py`)
and sequences (`batches.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from msrl import registry
from msrl.algorithms import kl_controller
from msrl.algorithms.mismatch import Correction
from msrl.algorithms.packing import Sequences, gather_tokens
from msrl.algorithms.rollout_arrays import rollout_arrays
from msrl.config.schema import Config
from msrl.plan.derived import critic_optimizer, needs_greedy, updates_per_step
from msrl.registry import own
from msrl.rewards.process import RewardSteps
from msrl.trainer.objective.batches import BatchLimits, num_loss_tokens
from msrl.trainer.objective.losses import PolicyLoss, ValueLoss
from msrl.trainer.objective.requests import UpdateRequest
from msrl.trainer.schedule import Schedule
from msrl.types import ScoredGroup
from msrl.workflows.rl.distillation import distillation
from msrl.workflows.rl.rollouts import select_informative
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.teacher_servers import TeacherServers
from msrl.workflows.rl.update.advantages import compute_advantages, selected_samples
from msrl.workflows.rl.update.batches import (
    PreparedStep,
    UpdateBatch,
    policy_batches,
    prepared_step,
    update_batches,
    value_batch,
)
from msrl.workflows.rl.update.values import step_values
from msrl.workflows.training.settings import policy_schedule
from msrl.workflows.training.trainer_group import TrainerGroup

_EPS = 1e-8  # smallest mean of importance weights that is divided by
_CRITIC_NAMES = {name: f"value_{name}" for name in ("grad_norm", "lr", "skipped")}  # of metrics


class Updater:
    """Computes advantages of scored groups and updates the models.

    Its state is the factor of the KL coefficients and the moments of the rewards.
    """

    def __init__(
        self,
        config: Config,
        trainers: TrainerGroup,
        num_steps: int,
        state: Mapping[str, Any],
        teachers: TeacherServers | None = None,
        *,
        has_rewards: bool = True,
    ) -> None:
        """Start from `state()` of the checkpoint to resume from, or from an empty state.

        With `has_rewards` False, rewards are only reported and give no advantages.
        """
        self._config, self._trainers, self._num_steps = config, trainers, num_steps
        self._teachers, self._has_rewards = teachers or TeacherServers(), has_rewards
        self._schedule = policy_schedule(config, num_steps)
        self._is_adaptive = config.algo.kl.controller.kind == "adaptive"
        self._kl_factor = float(state.get("kl_factor", 1.0)) if self._is_adaptive else 1.0
        self._rewards = RewardSteps(
            config.reward, config.rollout.max_response_tokens, state.get("rewards", {})
        )
        self._loss = policy_loss(config)

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {"kl_factor": self._kl_factor, "rewards": self._rewards.state()}

    def prepare(
        self, groups: Sequence[ScoredGroup], clock: Clock, dropped: Sequence[ScoredGroup] = ()
    ) -> PreparedStep:
        """Compute the required values of tokens, the advantages and the sequences to train on.

        The `dropped` groups of a step count only in the statistics of its rewards.
        """
        config, arrays = self._config, rollout_arrays(groups)
        is_informative = select_informative(config.rollout.filter, groups)
        is_trained = selected_samples(config, arrays, is_informative)
        values = step_values(arrays, is_trained, self._trainers, self._teachers, config, clock)
        processed = self._rewards.apply([*groups, *dropped])
        advantages = compute_advantages(
            arrays,
            is_trained,
            processed.rewards[: len(groups)],
            values,
            config,
            greedy_rewards=self._rewards.greedy_rewards(groups) if needs_greedy(config) else None,
            kl_factor=self._kl_factor,
            has_rewards=self._has_rewards,
        )
        factor = {"kl_factor": self._kl_factor} if self._is_adaptive else {}
        metrics = {**processed.metrics, **factor, **advantages.metrics}
        return prepared_step(arrays, is_trained, advantages, values, metrics, config)

    def update(self, prepared: PreparedStep, step: int, clock: Clock) -> dict[str, float]:
        """Run all updates of a step, the critic's first.

        The policy has none in the critic's warm-up. An update whose samples are all masked is
        skipped and counted.

        Returns:
            The mean of the updates' metrics with the learning rate of the last update.
        """
        metrics = dict(prepared.metrics)
        batches = update_batches(self._config, prepared.arrays.counts, step)
        if prepared.critic_sequences is not None:
            with clock("critic"):
                metrics |= self._update_critic(prepared.critic_sequences, batches, step)
        if step >= self._config.algo.value.warmup_steps:
            with clock("update"):
                metrics |= self._update_policy(prepared.sequences, batches, step)
            self._adapt_kl(metrics, len(prepared.sequences.token_ids))
        return metrics

    def _update_critic(
        self, sequences: Sequences, batches: Sequence[UpdateBatch], step: int
    ) -> dict[str, float]:
        """Update the critic once per batch; return the mean of the updates' metrics."""
        config = self._config
        schedule = Schedule.of(critic_optimizer(config), self._num_steps * updates_per_step(config))
        own = (value_batch(config, sequences, batch) for batch in batches)
        reports, lr = self._run("critic", own, schedule, step * len(batches))
        means = {_CRITIC_NAMES.get(name, name): mean for name, mean in _means(reports).items()}
        return {**means, "value_lr": lr}

    def _update_policy(
        self, sequences: Sequences, batches: Sequence[UpdateBatch], step: int
    ) -> dict[str, float]:
        """Update the policy once per batch; return the mean of the updates' metrics."""
        first = (step - self._config.algo.value.warmup_steps) * len(batches)
        own = policy_batches(self._config, sequences, batches, step)
        reports, lr = self._run("policy", own, self._schedule, first)
        metrics = _means(reports)
        if len(reports) < len(batches):
            metrics["empty_updates"] = float(len(batches) - len(reports))
        return {**metrics, "lr": lr}

    def _run(
        self, model: str, updates: Iterable[Sequences], schedule: Schedule, first: int
    ) -> tuple[list[dict[str, float]], float]:
        """Run the updates that have a loss token; return their metrics and the last learning rate.

        `first` is the number of the first update in the schedule.
        """
        train = self._config.train
        limits = BatchLimits.of(train, train.micro_batch)
        reports, lr = list[dict[str, float]](), 0.0
        for number, sequences in enumerate(updates, first):
            lr = schedule.at(number)
            if num_loss_tokens(sequences):
                request = UpdateRequest(self._update_loss(model, sequences), lr, model)
                reports.append(self._trainers.update(request, sequences, limits))
        return reports, lr

    def _update_loss(self, model: str, sequences: Sequences) -> PolicyLoss | ValueLoss:
        """Return the loss of an update, whose importance weights may be normalized to mean 1."""
        algo = self._config.algo
        if model == "critic":
            return ValueLoss(algo.value.clip)
        loss = replace(self._loss, kl_coef=self._loss.kl_coef * self._kl_factor)
        if not algo.mismatch.normalize:
            return loss
        mean = mean_importance_weight(loss.correction, sequences)
        return replace(loss, correction=replace(loss.correction, scale=1.0 / max(mean, _EPS)))

    def _adapt_kl(self, metrics: Mapping[str, float], num_samples: int) -> None:
        """Set the KL coefficients of the next step from the divergence of this one.

        They stay the same if it is not finite, as after skipped updates.
        """
        controller = self._config.algo.kl.controller
        measured = metrics.get("reward_kl", metrics.get("kl", math.nan))
        if self._is_adaptive and controller.target is not None and math.isfinite(measured):
            self._kl_factor = kl_controller.adapted(
                self._kl_factor,
                measured,
                num_samples,
                target=controller.target,
                horizon=controller.horizon,
            )


def policy_loss(config: Config) -> PolicyLoss:
    """Return the configured loss."""
    algo, mismatch = config.algo, config.algo.mismatch
    plugin = registry.load(registry.LOSSES, algo.policy_loss, key="algo.policy_loss").policy_loss
    return PolicyLoss(
        temperature=config.rollout.sampling.temperature,
        policy_loss=own.located(algo.policy_loss),
        ratio=algo.ratio,
        clip_low=algo.clip.low,
        clip_high=algo.clip.high,
        dual=algo.clip.dual,
        kl_coef=algo.kl.loss.coef,
        kl_estimator=algo.kl.loss.estimator,
        kl_bias_correction=algo.kl.loss.bias_correction,
        entropy_coef=algo.entropy_coef,
        rl_coef=algo.rl_coef,
        sft_coef=algo.sft.coef,
        correction=Correction(
            mismatch.weight, mismatch.upper, mismatch.filter, mismatch.low, mismatch.high
        ),
        old_logprobs=algo.old_logprobs,
        off_policy_limit=mismatch.off_policy_limit,
        options={
            name: value
            for name, value in algo.options.items()
            if name in registry.plugin_options(plugin)
        },
        distillation=distillation(algo.distill),
    )


def mean_importance_weight(correction: Correction, sequences: Sequences) -> float:
    """Return the mean importance weight over the loss tokens or sequences of an update."""
    old, sampler = (
        torch.from_numpy(gather_tokens(sequences.fields[name], sequences.loss_masks))
        for name in ("old_logprobs", "sampler_logprobs")
    )
    counts = np.array([int(mask.sum()) for mask in sequences.loss_masks])
    numbers = np.repeat(np.arange(np.count_nonzero(counts)), counts[counts > 0])
    return correction.mean_weight(old, sampler, torch.from_numpy(numbers))


def _means(reports: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of every metric; the reports have the same metrics."""
    if not reports:
        return {}
    return {name: float(np.mean([report[name] for report in reports])) for name in reports[0]}
