"""What happens to a step's scored groups: samples with advantages, log-probabilities, updates; and how a step is reported."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from msrl import registry
from msrl.algorithms.packing import Sequences, rl_sequences
from msrl.algorithms.samples import reward_matrix, training_samples
from msrl.config.schema import Config
from msrl.rewards.score import Scores
from msrl.trainer.batches import BatchLimits, select
from msrl.trainer.losses import PolicyLoss
from msrl.trainer.schedule import Schedule
from msrl.types import ScoredGroup, TrainingSample
from msrl.workflows.grpo_team import Trainers


class Clock:
    """Seconds per stage of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - started


def samples_of(config: Config, groups: Sequence[ScoredGroup]) -> tuple[TrainingSample, ...]:
    """Every completion with its advantage."""
    import torch

    advantage = config.algo.advantage
    estimator = registry.load("msrl.algorithms.advantages", advantage.estimator, key="algo.advantage.estimator")
    values = estimator.advantages(torch.from_numpy(reward_matrix(groups)), eps=advantage.eps)
    return training_samples(groups, values.numpy())


@dataclass(frozen=True, slots=True)
class Updater:
    """Turns samples into optimizer updates."""

    config: Config
    trainers: Trainers
    schedule: Schedule
    loss: PolicyLoss
    with_reference: bool

    @classmethod
    def create(cls, config: Config, trainers: Trainers, schedule: Schedule) -> Updater:
        algo = config.algo
        loss = PolicyLoss(
            temperature=config.rollout.sampling.temperature,
            policy_loss=algo.policy_loss,
            clip_low=algo.clip.low,
            clip_high=algo.clip.high,
            dual=algo.clip.dual,
            kl_coef=algo.kl.loss.coef,
            kl_estimator=algo.kl.loss.estimator,
            entropy_coef=algo.entropy_coef,
            options=algo.options,
        )
        return cls(config, trainers, schedule, loss, algo.kl.loss.coef > 0)

    def update(self, samples: Sequence[TrainingSample], step: int, clock: Clock) -> dict[str, float]:
        """All updates of a step. Returns their mean report; the learning rate is the last update's."""
        with clock("logprobs"):
            sequences = self._with_logprobs(rl_sequences(samples))
        parts = update_parts(self.config, len(samples), step)
        reports = []
        with clock("update"):
            for number, part in enumerate(parts):
                lr = self.schedule.at(step * len(parts) + number)
                reports.append(self.trainers.update(select(sequences, part), self._limits(), self.loss, lr))
        means = {name: float(np.mean([report[name] for report in reports])) for name in reports[0]}
        return {**means, "lr": reports[-1]["lr"]}

    def _with_logprobs(self, sequences: Sequences) -> Sequences:
        """Log-probabilities of the reference, and of the policy before the first of several updates."""
        temperature, fields = self.loss.temperature, dict(sequences.fields)
        limits = self._limits(forward=True)
        if updates_per_step(self.config) > 1:
            fields["old_logprobs"] = self.trainers.logprobs(sequences, limits, temperature)
        if self.with_reference:
            fields["reference_logprobs"] = self.trainers.logprobs(sequences, limits, temperature, of_reference=True)
        return Sequences(sequences.token_ids, sequences.loss_masks, fields)

    def _limits(self, *, forward: bool = False) -> BatchLimits:
        train = self.config.train
        count = (train.forward_micro_batch if forward else None) or train.micro_batch
        return BatchLimits(count, train.max_tokens_per_micro_batch, train.parallel.tp if train.parallel.sp else 1)


def updates_per_step(config: Config) -> int:
    """Optimizer updates on the samples of one step."""
    updates, samples = config.train.updates, config.rollout.prompts_per_step * config.rollout.samples_per_prompt
    return updates.epochs * (samples // (updates.samples_per_update or samples))


def update_parts(config: Config, num_samples: int, step: int) -> list[list[int]]:
    """Which samples each update of a step takes; a function of the seed and the step."""
    updates = config.train.updates
    size = updates.samples_per_update or num_samples
    parts: list[list[int]] = []
    for epoch in range(updates.epochs):
        order = np.arange(num_samples)
        if updates.shuffle and size < num_samples:
            np.random.Generator(np.random.Philox(np.random.SeedSequence([config.run.seed, step, epoch]))).shuffle(order)
        parts += [order[start : start + size].tolist() for start in range(0, num_samples, size)]
    return parts


def report_of(scores: Scores, trained: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step."""
    groups = scores.groups
    completions = [c for group in groups for c in group.rollout.completions]
    totals = reward_matrix(groups)
    lengths = np.array([len(c.token_ids) for c in completions])
    num_tokens = int(lengths.sum()) + sum(len(g.rollout.prompt.token_ids) * len(g.rewards) for g in groups)
    by_source = {f"reward/{name}": mean for name, mean in scores.means().items()}
    return {
        "reward/mean": float(totals.mean()),
        "reward/std": float(totals.std()),
        "reward/equal_groups": float((np.ptp(totals, axis=1) == 0).mean()),
        **by_source,
        **{f"reward/failed/{name}": float(count) for name, count in scores.failures.items()},
        "rollout/response_length": float(lengths.mean()),
        "rollout/response_length_max": float(lengths.max()),
        "rollout/truncated": float(np.mean([c.finish_reason == "length" for c in completions])),
        "rollout/tokens_per_s": float(lengths.sum()) / max(seconds["rollout"], 1e-9),
        **{f"train/{name}": value for name, value in trained.items()},
        "perf/tokens_per_s": num_tokens / max(sum(seconds.values()), 1e-9),
    }
