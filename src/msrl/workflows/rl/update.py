"""What a step's scored groups become: log-probabilities, advantages, and the optimizer updates on
them.

P prompts, G completions of each, N response tokens of all of them end to end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from msrl import registry
from msrl.algorithms import kl_controller
from msrl.algorithms.mismatch import Correction
from msrl.algorithms.packing import Sequences, rl_sequences
from msrl.algorithms.samples import length_matrix, reward_matrix, training_samples, truncated_matrix
from msrl.algorithms.selection import Flags, sample_weights, trained_samples
from msrl.algorithms.token_rewards import Reals, TokenRewards
from msrl.config.schema import AlgoConfig, Config
from msrl.plan.derived import aggregate_constant, needs_critic, updates_per_step
from msrl.rewards.process import RewardSteps
from msrl.trainer.objective.batches import BatchLimits, num_loss_tokens, select, with_weights
from msrl.trainer.objective.losses import PolicyLoss, required_arguments
from msrl.types import Floats, ScoredGroup, TrainingSample
from msrl.workflows.rl.critic import CriticUpdater, value_metrics, with_targets
from msrl.workflows.rl.rollouts import select_informative
from msrl.workflows.rl.setup import difficulty
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.worker_groups import TrainerGroup
from msrl.workflows.training.settings import policy_schedule


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step's samples with everything that is known of them before its first update."""

    samples: tuple[TrainingSample, ...]
    sequences: Sequences
    metrics: Mapping[str, float]
    for_critic: Sequences | None = None


class Updater:
    """Turns scored groups into optimizer updates. Its state is the factor of the KL coefficients
    and the moments of the rewards.
    """

    def __init__(
        self, config: Config, trainers: TrainerGroup, num_steps: int, state: Mapping[str, Any]
    ) -> None:
        """`state` is what `state()` returned when the checkpoint to go on from was saved, or empty."""
        self._config, self._trainers = config, trainers
        self._schedule = policy_schedule(config, num_steps)
        self._critic = CriticUpdater(config, trainers, num_steps) if needs_critic(config) else None
        self._kl_factor = (
            float(state.get("kl_factor", 1.0))
            if config.algo.kl.controller.kind == "adaptive"
            else 1.0
        )
        self._rewards = RewardSteps(
            config.reward, config.rollout.max_response_tokens, state.get("rewards", {})
        )
        self._loss = policy_loss(config)

    def state(self) -> dict[str, Any]:
        """What a checkpoint has to hold."""
        return {"kl_factor": self._kl_factor, "rewards": self._rewards.state()}

    def prepare(
        self, groups: Sequence[ScoredGroup], clock: Clock, left_out: Sequence[ScoredGroup] = ()
    ) -> Prepared:
        """Log-probabilities of the policy and of the reference and values of the critic where they
        are needed, then advantages.

        Groups that were `left_out` of the step count in the statistics of its rewards, and in
        nothing else.
        """
        algo = self._config.algo
        keep = selected_samples(self._config, groups)
        plain = rl_sequences(
            training_samples(groups, np.zeros(int(length_matrix(groups).sum())), np.ones_like(keep))
        )
        with clock("logprobs"):
            found = self._logprobs(plain)
        values = None
        if self._critic is not None:
            with clock("values"):
                values = self._critic.values(plain, self._limits(forward=True))
        processed = self._rewards.apply([*groups, *left_out])
        metrics = dict(processed.metrics)
        if algo.kl.controller.kind == "adaptive":
            metrics["kl_factor"] = self._kl_factor
        penalty = None
        if algo.kl.reward.coef:
            divergence = token_divergence(
                plain, found["policy"], found["reference"], algo.kl.reward.estimator
            )
            penalty = -algo.kl.reward.coef * self._kl_factor * divergence
            metrics["reward_kl"] = float(divergence.mean())
        rewards = TokenRewards(
            processed.rewards[: len(groups)], length_matrix(groups), penalty, keep
        )
        estimated = estimates(algo, rewards, values)
        samples = samples_of(self._config, groups, rewards, keep, estimated)
        sequences = rl_sequences(samples)
        fields = dict(sequences.fields)
        if updates_per_step(self._config) > 1:
            fields["old_logprobs"] = found["policy"]
        if algo.kl.loss.coef and algo.kl.loss.estimator != "full":
            fields["reference_logprobs"] = found["reference"]
        if not keep.all():
            metrics["masked"] = 1.0 - float(keep.mean())
        for_critic = None
        if values is not None:
            metrics |= value_metrics(values, estimated + values)
            for_critic = with_targets(sequences, plain, values, estimated + values)
        return Prepared(samples, sequences._replace(fields=fields), metrics, for_critic)

    def update(self, prepared: Prepared, step: int, clock: Clock) -> dict[str, float]:
        """All updates of a step, the critic's first. Returns their mean report; the learning rate
        is the last update's.

        An update whose samples are all masked out is left out, and counted. In the critic's warm-up
        the policy has none.
        """
        parts, metrics = (
            update_parts(self._config, len(prepared.samples), step),
            dict(prepared.metrics),
        )
        if self._critic is not None and prepared.for_critic is not None:
            with clock("critic"):
                metrics |= self._critic.update(prepared.for_critic, parts, step, self._limits())
        warmed_up = step - self._config.algo.value.warmup_steps
        if warmed_up >= 0:
            with clock("update"):
                metrics |= self._update_policy(prepared, parts, warmed_up)
            self._adapt(metrics, len(prepared.samples))
        return metrics

    def _update_policy(
        self, prepared: Prepared, parts: Sequence[Sequence[int]], step: int
    ) -> dict[str, float]:
        """`step` counts from the first one in which the policy learns."""
        loss = replace(self._loss, kl_coef=self._loss.kl_coef * self._kl_factor)
        reports, lr = [], 0.0
        for number, part in enumerate(parts):
            lr = self._schedule.at(step * len(parts) + number)
            sequences = select(prepared.sequences, part)
            if num_loss_tokens(sequences):
                mode, constant = self._config.algo.aggregate.mode, aggregate_constant(self._config)
                reports.append(
                    self._trainers.update(
                        with_weights(sequences, mode, constant), self._limits(), loss, lr
                    )
                )
        means = {
            name: float(np.mean([report[name] for report in reports]))
            for name in (reports[0] if reports else ())
        }
        skipped = (
            {"empty_updates": float(len(parts) - len(reports))} if len(reports) < len(parts) else {}
        )
        return {**means, **skipped, "lr": lr}

    def _adapt(self, metrics: Mapping[str, float], num_samples: int) -> None:
        """The KL coefficients of the next step, from the divergence of this one; of one that is no
        number, in an update that was left out, nothing follows.
        """
        controller = self._config.algo.kl.controller
        measured = metrics.get("reward_kl", metrics.get("kl", math.nan))
        if (
            controller.kind == "adaptive"
            and controller.target is not None
            and math.isfinite(measured)
        ):
            self._kl_factor = kl_controller.adapted(
                self._kl_factor,
                measured,
                num_samples,
                target=controller.target,
                horizon=controller.horizon,
            )

    def _logprobs(self, sequences: Sequences) -> dict[str, tuple[Floats, ...]]:
        """Those of the policy (before the first of several updates, or for a penalty in the
        rewards) and of the reference.
        """
        kl, temperature, limits = (
            self._config.algo.kl,
            self._loss.temperature,
            self._limits(forward=True),
        )
        found: dict[str, tuple[Floats, ...]] = {}
        if updates_per_step(self._config) > 1 or kl.reward.coef:
            found["policy"] = self._trainers.logprobs(sequences, limits, temperature)
        if kl.reward.coef or (kl.loss.coef and kl.loss.estimator != "full"):
            found["reference"] = self._trainers.logprobs(
                sequences, limits, temperature, of_reference=True
            )
        return found

    def _limits(self, *, forward: bool = False) -> BatchLimits:
        train = self._config.train
        count = (train.forward_micro_batch if forward else None) or train.micro_batch
        return BatchLimits(count, train.max_tokens_per_micro_batch)


def policy_loss(config: Config) -> PolicyLoss:
    """The loss that the configuration describes."""
    algo, mismatch = config.algo, config.algo.mismatch
    plugin = registry.load(
        "msrl.algorithms.losses", algo.policy_loss, key="algo.policy_loss"
    ).policy_loss
    return PolicyLoss(
        temperature=config.rollout.sampling.temperature,
        policy_loss=algo.policy_loss,
        ratio=algo.ratio,
        clip_low=algo.clip.low,
        clip_high=algo.clip.high,
        dual=algo.clip.dual,
        kl_coef=algo.kl.loss.coef,
        kl_estimator=algo.kl.loss.estimator,
        entropy_coef=algo.entropy_coef,
        rl_coef=algo.rl_coef,
        sft_coef=algo.sft.coef,
        correction=Correction(
            mismatch.weight, mismatch.upper, mismatch.filter, mismatch.low, mismatch.high
        ),
        options={
            name: value
            for name, value in algo.options.items()
            if name in registry.plugin_options(plugin)
        },
    )


def selected_samples(config: Config, groups: Sequence[ScoredGroup]) -> Flags:  # [P, G]
    """Which samples have a part in the updates."""
    mask = config.algo.mask
    found = trained_samples(
        reward_matrix(groups), truncated_matrix(groups),
        drop_truncated=mask.truncated, drop_equal_groups=mask.equal_groups, difficulty=mask.difficulty,
    )  # fmt: skip
    return found & select_informative(config.rollout.filter, groups)[:, None]


def estimates(algo: AlgoConfig, rewards: TokenRewards, values: Reals | None = None) -> Reals:  # [N]
    """What the estimator makes of the rewards, and of the critic's values, [N], where it needs
    them.
    """
    advantage = algo.advantage
    estimate = registry.load(
        "msrl.algorithms.advantages", advantage.estimator, key="algo.advantage.estimator"
    ).advantages
    if advantage.whiten_rewards:
        rewards = rewards.whitened(advantage.eps)
    options = {
        name: value
        for name, value in algo.options.items()
        if name in registry.plugin_options(estimate)
    }
    given = {
        "eps": advantage.eps,
        "gamma": advantage.gamma,
        "lam": advantage.lam,
        "values": values,
        "turns": None,
    }
    return estimate(rewards, **required_arguments(estimate, given), **options)


def samples_of(
    config: Config,
    groups: Sequence[ScoredGroup],
    rewards: TokenRewards,
    keep: Flags,  # [P, G]
    estimated: Reals,  # [N]
) -> tuple[TrainingSample, ...]:
    """Every completion with its advantages: estimated, then whitened over what is learnt from, cut,
    weighed, in this order.
    """
    advantage, values = config.algo.advantage, estimated
    if advantage.whiten:
        values = rewards.whiten(values, advantage.eps)
    if advantage.clip is not None:
        values = values.clip(-advantage.clip, advantage.clip)
    return training_samples(
        groups, values * rewards.everywhere(_weights(config.algo, groups, keep)), keep
    )


def _weights(algo: AlgoConfig, groups: Sequence[ScoredGroup], keep: Flags) -> Reals:  # [P, G]
    difficulties = (
        np.array([difficulty(group.rollout.prompt) for group in groups])
        if algo.sample_weight.difficulty
        else None
    )
    return sample_weights(
        length_matrix(groups), keep, by_length=algo.sample_weight.length, difficulties=difficulties
    )


def token_divergence(
    sequences: Sequences,
    policy: Sequence[Floats],  # each [T]
    reference: Sequence[Floats],  # each [T]
    estimator: str,
) -> Reals:  # [N]
    """Estimated divergence of the policy from the reference at every response token."""
    import torch

    from msrl.algorithms import kl

    learnt = [mask for mask in sequences.loss_masks]
    flat = [
        torch.from_numpy(
            np.concatenate([row[mask] for row, mask in zip(rows, learnt, strict=True)])
        )
        for rows in (policy, reference)
    ]
    return kl.per_token(
        estimator, flat[0].double(), flat[1].double(), torch.ones(len(flat[0]), dtype=torch.bool)
    ).numpy()


def update_parts(config: Config, num_samples: int, step: int) -> list[list[int]]:
    """Which samples each update of a step takes; a function of the seed and the step."""
    updates = config.train.updates
    size = updates.samples_per_update or num_samples
    parts: list[list[int]] = []
    for epoch in range(updates.epochs):
        order = np.arange(num_samples)
        if updates.shuffle and size < num_samples:
            np.random.Generator(
                np.random.Philox(np.random.SeedSequence([config.run.seed, step, epoch]))
            ).shuffle(order)
        parts += [order[start : start + size].tolist() for start in range(0, num_samples, size)]
    return parts
