"""Log-probabilities, advantages and optimizer updates of a GRPO step.

P prompts, G completions per prompt, N response tokens of all completions, concatenated, T tokens of
a sequence, L mixture layers of the model, k experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from msrl import registry
from msrl.algorithms import kl_controller
from msrl.algorithms.mismatch import Correction
from msrl.algorithms.packing import Sequences, has_all_routes, rl_sequences
from msrl.algorithms.proximal import proximal_shares
from msrl.algorithms.samples import (
    decided_matrix,
    fault_matrix,
    length_matrix,
    reward_matrix,
    sequence_counts,
    token_sequences,
    training_samples,
    truncated_matrix,
)
from msrl.algorithms.selection import Flags, sample_weights, top_share, trained_samples
from msrl.algorithms.token_rewards import Reals, TokenRewards
from msrl.algorithms.turns import Turns, early_rewards, episode_turns, with_turn_rewards
from msrl.config.schema import AlgoConfig, Config
from msrl.errors import MsrlError
from msrl.plan.derived import (
    aggregate_constant,
    needs_critic,
    needs_distribution,
    needs_draws,
    needs_greedy,
    needs_old_logprobs,
    rewards_turns,
)
from msrl.rewards.process import RewardSteps, domains
from msrl.trainer.objective.batches import (
    BatchLimits,
    num_loss_tokens,
    padded,
    select,
    with_weights,
)
from msrl.trainer.objective.losses import PolicyLoss, required_arguments
from msrl.trainer.objective.requests import TokenRequest, TokenValue, UpdateRequest
from msrl.types import Floats, Routes, ScoredGroup, TrainingSample
from msrl.workflows.rl.critic import CriticUpdater, mean_report, value_metrics, with_targets
from msrl.workflows.rl.distillation import (
    distillation,
    sequence_prompts,
    with_teacher_weights,
)
from msrl.workflows.rl.rollouts import select_informative
from msrl.workflows.rl.setup import difficulty
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.teacher_servers import (
    TeacherAnswer,
    TeacherServers,
    teacher_advantages,
)
from msrl.workflows.rl.update_batches import (
    UpdateBatch,
    averaging_groups,
    update_batches,
    with_draws,
)
from msrl.workflows.training.settings import policy_schedule
from msrl.workflows.training.trainer_group import PendingForward, TrainerGroup

if TYPE_CHECKING:
    from torch import Tensor


_EPS = 1e-8  # smallest mean of importance weights that is divided by


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Samples of a step with everything that is computed before its first update.

    Attributes:
        samples: One sample per sequence.
        sequences: Sequences of the samples.
        metrics: Metrics of the preparation.
        critic_sequences: Sequences that the critic is trained on.
        counts: Number of sequences of every completion; empty if each has one.
    """

    samples: tuple[TrainingSample, ...]
    sequences: Sequences
    metrics: Mapping[str, float]
    critic_sequences: Sequences | None = None
    counts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _StepLogprobs:
    """Log-probabilities and statistics of every sequence, [T] each; None if they are not needed."""

    policy: tuple[Floats, ...] | None  # before the first update
    reference: tuple[Floats, ...] | None
    squared_probabilities: tuple[Floats, ...] | None = None  # sums over the vocabulary
    entropies: tuple[Floats, ...] | None = None
    routes: tuple[Routes, ...] | None = None  # [T, L, k] each, of the policy's pass


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
        self._config, self._trainers = config, trainers
        self._teachers, self._has_rewards = teachers or TeacherServers(), has_rewards
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
        """Return the state to save in a checkpoint."""
        return {"kl_factor": self._kl_factor, "rewards": self._rewards.state()}

    def prepare(
        self, groups: Sequence[ScoredGroup], clock: Clock, dropped: Sequence[ScoredGroup] = ()
    ) -> PreparedStep:
        """Compute the required log-probabilities and values, then the advantages.

        The `dropped` groups of a step count only in the statistics of its rewards.
        """
        algo = self._config.algo
        keep = selected_samples(self._config, groups)
        lengths = length_matrix(groups)
        plain = rl_sequences(
            training_samples(groups, np.zeros(int(lengths.sum())), np.ones_like(keep))
        )
        if self._config.train.router.replay == "engine":
            _check_routes(plain)
        is_trained = np.repeat(keep.ravel(), sequence_counts(groups)).tolist()
        with self._teachers.request(plain, sequence_prompts(groups), is_trained) as answers:
            logprobs, values = self._forward(plain, clock)
            taught = self._taught(plain, logprobs, answers, clock)
        processed = self._rewards.apply([*groups, *dropped])
        metrics = dict(processed.metrics)
        if algo.kl.controller.kind == "adaptive":
            metrics["kl_factor"] = self._kl_factor
        penalty, reward_kl = self._kl_penalty(plain, logprobs)
        metrics |= reward_kl
        decided = _decided_samples(groups)
        rewards = TokenRewards(
            processed.rewards[: len(groups)],
            lengths,
            penalty,
            keep,
            self._domains(groups),
            decided,
            algo.advantage.correction,
        )
        turns = episode_turns(groups) if self._config.environment.is_on else None
        if turns is not None:
            rewards = placed_rewards(self._config, rewards, groups, turns)
        distribution = _distribution(plain, logprobs)
        greedy_rewards = self._greedy_rewards(groups, decided, metrics)
        advantages = estimate_advantages(algo, rewards, values, distribution, greedy_rewards, turns)
        if taught is not None:
            is_kept = rewards.everywhere(keep)
            metrics["distill_kl"] = -float(taught[is_kept].sum()) / max(1, int(is_kept.sum()))
        if not self._has_rewards:
            advantages = np.zeros_like(advantages)
        samples = samples_with_advantages(self._config, groups, rewards, keep, advantages, taught)
        sequences = self._with_logprobs(rl_sequences(samples), logprobs)
        sequences = self._with_groups(sequences, groups)
        if not keep.all():
            metrics["masked"] = 1.0 - float(keep.mean())
        critic_sequences = None
        if values is not None:
            returns = advantages + values
            metrics |= value_metrics(values, returns)
            critic_sequences = with_targets(sequences, plain, values, returns)
        counts = sequence_counts(groups)
        return PreparedStep(samples, sequences, metrics, critic_sequences, counts)

    def _greedy_rewards(
        self,
        groups: Sequence[ScoredGroup],
        decided: NDArray[np.bool_],  # [P, G]
        metrics: dict[str, float],
    ) -> Reals | None:  # [P]
        """Return the rewards of greedy responses if needed, and add their mean to the metrics."""
        if not needs_greedy(self._config):
            return None
        rewards = self._rewards.greedy_rewards(groups)
        metrics["greedy_reward"] = _mean(rewards[decided.any(axis=1)])
        return rewards

    def _kl_penalty(
        self, plain: Sequences, logprobs: _StepLogprobs
    ) -> tuple[Reals | None, dict[str, float]]:
        """Return the KL penalty of each token in its reward, and its metric; none without it."""
        coef = self._config.algo.kl.reward.coef
        if not coef:
            return None, {}
        divergence = self._divergence(plain, logprobs)
        return -coef * self._kl_factor * divergence, {"reward_kl": float(divergence.mean())}

    def _domains(self, groups: Sequence[ScoredGroup]) -> NDArray[np.int64] | None:  # [P]
        """Return the domains within which advantages are whitened; None for one domain."""
        if self._config.algo.advantage.whiten_scope == "batch":
            return None
        return np.unique(domains(self._config.reward, groups), return_inverse=True)[1].ravel()

    def _forward(self, sequences: Sequences, clock: Clock) -> tuple[_StepLogprobs, Reals | None]:
        """Return the log-probabilities, and the critic's values [N] if there is a critic."""
        with clock("logprobs"):
            logprobs = self._logprobs(sequences)
        if self._critic is None:
            return logprobs, None
        with clock("values"):
            return logprobs, self._critic.values(sequences, self._limits(forward=True))

    def _taught(
        self,
        sequences: Sequences,
        logprobs: _StepLogprobs,
        answers: Callable[[], Sequence[TeacherAnswer]],
        clock: Clock,
    ) -> Reals | None:  # [N]
        """Return the advantages of teachers on servers without the coefficient, if there are any.

        `answers` waits for the servers.
        """
        if not self._teachers:
            return None
        assert logprobs.policy is not None
        with clock("teachers"):
            rows = teacher_advantages(logprobs.policy, answers())
        return loss_token_values(sequences, rows)

    def _divergence(self, sequences: Sequences, logprobs: _StepLogprobs) -> Reals:  # [N]
        """Return the divergence for the KL penalty in the rewards."""
        assert logprobs.policy is not None
        assert logprobs.reference is not None
        estimator = self._config.algo.kl.reward.estimator
        return token_divergence(sequences, logprobs.policy, logprobs.reference, estimator)

    def _with_groups(self, sequences: Sequences, groups: Sequence[ScoredGroup]) -> Sequences:
        """Return the sequences with what the loss reads of rows, samples and versions."""
        algo = self._config.algo
        sequences = with_teacher_weights(sequences, groups, algo.distill.on_ranks)
        if algo.old_logprobs == "log-linear":
            sequences = with_versions(sequences, groups)
        if algo.options.get("split") == "reward":
            sequences = with_scores(sequences, groups)
        return sequences

    def _with_logprobs(self, sequences: Sequences, logprobs: _StepLogprobs) -> Sequences:
        """Return the sequences with the log-probabilities that the policy's loss reads."""
        kl_loss, fields = self._config.algo.kl.loss, dict(sequences.fields)
        if needs_old_logprobs(self._config):
            assert logprobs.policy is not None
            fields["old_logprobs"] = logprobs.policy
        if kl_loss.coef and kl_loss.estimator != "full":
            assert logprobs.reference is not None
            fields["reference_logprobs"] = logprobs.reference
        if logprobs.entropies is not None:
            fields["entropies"] = logprobs.entropies
        routes = sequences.routes if logprobs.routes is None else logprobs.routes
        return sequences._replace(fields=fields, routes=routes)

    def update(self, prepared: PreparedStep, step: int, clock: Clock) -> dict[str, float]:
        """Run all updates of a step, the critic's first.

        The policy has none in the critic's warm-up.

        An update whose samples are all masked is skipped and counted.

        Returns:
            The mean of the updates' metrics with the learning rate of the last update.
        """
        metrics = dict(prepared.metrics)
        counts = prepared.counts or (1,) * len(prepared.samples)
        batches = update_batches(self._config, counts, step)
        if self._critic is not None and prepared.critic_sequences is not None:
            with clock("critic"):
                metrics |= self._critic.update(
                    prepared.critic_sequences, batches, step, self._limits()
                )
        policy_step = step - self._config.algo.value.warmup_steps
        if policy_step >= 0:
            with clock("update"):
                metrics |= self._update_policy(prepared, batches, policy_step)
            self._adapt_kl(metrics, len(prepared.samples))
        return metrics

    def _update_policy(
        self,
        prepared: PreparedStep,
        batches: Sequence[UpdateBatch],
        step: int,  # counted from the first step after the critic's warm-up
    ) -> dict[str, float]:
        """Update the policy once per batch; return the mean of the updates' metrics."""
        aggregate, constant = self._config.algo.aggregate, aggregate_constant(self._config)
        loss = replace(self._loss, kl_coef=self._loss.kl_coef * self._kl_factor)
        reports, lr = [], 0.0
        for number, batch in enumerate(batches):
            lr = self._schedule.at(step * len(batches) + number)
            sequences = select(prepared.sequences, batch.sequences)
            groups = averaging_groups(aggregate, batch, sequences)
            if needs_draws(self._config):
                sequences = with_draws(sequences, (self._config.run.seed, step, number))
            sequences = padded(sequences, self._trainers.dp_size)
            if self._config.algo.top_entropy < 1.0:
                sequences = with_top_entropy(sequences, self._config.algo.top_entropy)
            if self._config.algo.old_logprobs == "log-linear":
                version = step + self._config.algo.value.warmup_steps
                sequences = with_proximal_shares(sequences, version, number / len(batches))
            if num_loss_tokens(sequences):
                weighted = with_weights(sequences, aggregate.mode, constant, groups)
                request = UpdateRequest(self._normalized(loss, sequences), lr)
                reports.append(self._trainers.update(request, weighted, self._limits()))
        metrics = mean_report(reports)
        if len(reports) < len(batches):
            metrics["empty_updates"] = float(len(batches) - len(reports))
        return {**metrics, "lr": lr}

    def _normalized(self, loss: PolicyLoss, sequences: Sequences) -> PolicyLoss:
        """Return the loss of an update with importance weights of mean 1, if that is configured."""
        if not self._config.algo.mismatch.normalize:
            return loss
        mean = mean_importance_weight(loss.correction, sequences)
        return replace(loss, correction=replace(loss.correction, scale=1.0 / max(mean, _EPS)))

    def _adapt_kl(self, metrics: Mapping[str, float], num_samples: int) -> None:
        """Set the KL coefficients of the next step from the divergence of this one.

        They stay the same if it is not finite, as after skipped updates.
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

    def _logprobs(self, sequences: Sequences) -> _StepLogprobs:
        """Return the log-probabilities that the loss or a KL penalty in the rewards needs.

        A step with one update needs those of the policy only for the penalty: its loss computes
        them. A reference on separate devices computes alongside the policy.
        """
        kl, limits = self._config.algo.kl, self._limits(forward=True)
        begun: dict[str, PendingForward] = {}
        if values := self._policy_values():
            # The updates of the step replay the routes of this pass, which itself replays the
            # engine's.
            routes = self._config.train.router.replay == "trainer" and "logprobs" in values
            request = self._request("policy", values, records_routes=routes)
            begun["policy"] = self._trainers.begin_forward(request, sequences, limits)
        if kl.reward.coef or (kl.loss.coef and kl.loss.estimator != "full"):
            request = self._request("reference", ("logprobs",))
            begun["reference"] = self._trainers.begin_forward(request, sequences, limits)
        done = {model: pending.wait() for model, pending in begun.items()}
        reference = done["reference"]["logprobs"] if "reference" in done else None
        if "policy" not in done:
            return _StepLogprobs(None, reference)
        policy = done["policy"]
        return _StepLogprobs(
            policy.by_name.get("logprobs"),
            reference,
            policy.by_name.get("squared_probabilities"),
            policy.by_name.get("entropies"),
            policy.routes,
        )

    def _policy_values(self) -> tuple[TokenValue, ...]:
        """Return the values of the policy that a step needs before its first update."""
        algo, values = self._config.algo, list[TokenValue]()
        has_norms = needs_distribution(self._config)
        if needs_old_logprobs(self._config) or algo.kl.reward.coef or has_norms or self._teachers:
            values.append("logprobs")
        if has_norms:
            values.append("squared_probabilities")
        if algo.top_entropy < 1.0:
            values.append("entropies")
        return tuple(values)

    def _request(
        self, model: str, values: tuple[TokenValue, ...], *, records_routes: bool = False
    ) -> TokenRequest:
        return TokenRequest(values, model, self._loss.temperature, records_routes)

    def _limits(self, *, forward: bool = False) -> BatchLimits:
        train = self._config.train
        count = (train.forward_micro_batch if forward else None) or train.micro_batch
        return BatchLimits(count, train.max_tokens_per_micro_batch)


def _check_routes(sequences: Sequences) -> None:
    """Raise MsrlError if a sampled token has no route of the engine."""
    if not has_all_routes(sequences):
        raise MsrlError(
            "train.router.replay=engine: a response has no routes, because a run without them "
            "sampled it. Resume with the value of that run, or set it to trainer."
        )


def policy_loss(config: Config) -> PolicyLoss:
    """Return the configured loss."""
    algo, mismatch = config.algo, config.algo.mismatch
    plugin = registry.load(registry.LOSSES, algo.policy_loss, key="algo.policy_loss").policy_loss
    return PolicyLoss(
        temperature=config.rollout.sampling.temperature,
        policy_loss=algo.policy_loss,
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


def _decided_samples(groups: Sequence[ScoredGroup]) -> Flags:  # [P, G]
    """Return the samples with a real reward, whose greedy response, if any, has one too."""
    decided = decided_matrix(groups)
    for number, group in enumerate(groups):
        if group.greedy is not None:
            decided[number] &= all(group.greedy.is_decided)
    return decided


def _mean(values: Reals) -> float:
    """Return the mean, or 0 without values."""
    return float(values.mean()) if values.size else 0.0


def selected_samples(config: Config, groups: Sequence[ScoredGroup]) -> Flags:  # [P, G]
    """Return which samples the updates train on."""
    mask = config.algo.mask
    unmasked = trained_samples(
        reward_matrix(groups),
        truncated_matrix(groups),
        decided_matrix(groups),
        drop_truncated=mask.truncated,
        drop_equal_groups=mask.equal_groups,
        difficulty=mask.difficulty,
    )
    unmasked = unmasked & ~fault_matrix(groups)
    return unmasked & select_informative(config.rollout.filter, groups)[:, None]


def placed_rewards(
    config: Config, rewards: TokenRewards, groups: Sequence[ScoredGroup], turns: Turns
) -> TokenRewards:
    """Give the reward of a turn to its last token.

    With `environment.reward_at` "end", the last token of an episode has all rewards.
    """
    if not rewards_turns(config):
        return rewards
    early = early_rewards(groups, turns, config.environment.reward_weight)
    return with_turn_rewards(rewards, turns, early)


def estimate_advantages(
    algo: AlgoConfig,
    rewards: TokenRewards,
    values: Reals | None = None,  # [N], if the estimator needs a critic
    distribution: Mapping[str, Reals] | None = None,  # [N] each, if the estimator needs it
    greedy_rewards: Reals | None = None,  # [P], if the estimator needs them
    turns: Turns | None = None,
) -> Reals:  # [N]
    """Return the advantages of the configured estimator, before whitening and clipping.

    They are 0 for responses without a real score.
    """
    advantage = algo.advantage
    estimate = registry.load(
        registry.ADVANTAGES, advantage.estimator, key="algo.advantage.estimator"
    ).advantages
    if advantage.whiten_rewards:
        rewards = rewards.whitened(advantage.eps)
    options = {
        name: value
        for name, value in algo.options.items()
        if name in registry.plugin_options(estimate)
    }
    arguments = {
        "eps": advantage.eps,
        "gamma": advantage.gamma,
        "lam": advantage.lam,
        "values": values,
        "turns": turns,
        "greedy_rewards": greedy_rewards,
        **(distribution or {}),
    }
    advantages = estimate(rewards, **required_arguments(estimate, arguments), **options)
    return np.where(rewards.everywhere(rewards.is_decided), advantages, 0.0)


def samples_with_advantages(
    config: Config,
    groups: Sequence[ScoredGroup],
    rewards: TokenRewards,
    keep: Flags,  # [P, G]
    advantages: Reals,  # [N]
    taught: Reals | None = None,  # [N], advantages of teachers
) -> tuple[TrainingSample, ...]:
    """Return a sample per completion.

    Advantages are whitened over the trained samples. Those of teachers are added. The sums are
    clipped, then weighted.
    """
    settings = config.algo.advantage
    if settings.whiten:
        advantages = rewards.whiten(advantages, settings.eps)
    if taught is not None:
        advantages = advantages + config.algo.distill.coef * taught
    if settings.clip is not None:
        advantages = advantages.clip(-settings.clip, settings.clip)
    weights = rewards.everywhere(_sample_weights(config.algo, groups, keep))
    return training_samples(
        groups,
        advantages * weights,
        keep,
        drop_invalid_turns=config.algo.mask.invalid_actions,
    )


def _sample_weights(
    algo: AlgoConfig, groups: Sequence[ScoredGroup], keep: Flags
) -> Reals:  # [P, G]
    weight, difficulties = algo.sample_weight, None
    if weight.difficulty:
        difficulties = np.array([difficulty(group.rollout.prompt) for group in groups])
    return sample_weights(
        length_matrix(groups), keep, by_length=weight.length, difficulties=difficulties
    )


def token_divergence(
    sequences: Sequences,
    policy: Sequence[Floats],  # each [T]
    reference: Sequence[Floats],  # each [T]
    estimator: str,
) -> Reals:  # [N]
    """Return the estimated divergence of the policy from the reference at every response token."""
    import torch

    from msrl.algorithms import kl

    def response_tokens(rows: Sequence[Floats]) -> Tensor:  # [N]
        return torch.from_numpy(loss_token_values(sequences, rows))

    policy_logprobs, reference_logprobs = response_tokens(policy), response_tokens(reference)
    mask = torch.ones(len(policy_logprobs), dtype=torch.bool)
    return kl.per_token(estimator, policy_logprobs, reference_logprobs, mask).numpy()


def _distribution(sequences: Sequences, logprobs: _StepLogprobs) -> dict[str, Reals]:  # [N] each
    """Return the statistics of the policy's distribution at every response token."""
    if logprobs.squared_probabilities is None:
        return {}
    assert logprobs.policy is not None
    return {
        "logprobs": loss_token_values(sequences, logprobs.policy),
        "squared_probabilities": loss_token_values(sequences, logprobs.squared_probabilities),
    }


def loss_token_values(sequences: Sequences, rows: Sequence[Floats]) -> Reals:  # [T] each -> [N]
    """Return the values of all loss tokens, end to end."""
    masked = [row[mask] for row, mask in zip(rows, sequences.loss_masks, strict=True)]
    return np.concatenate(masked).astype(np.float64)


def with_top_entropy(sequences: Sequences, share: float) -> Sequences:
    """Return the sequences of an update with the field `selected` in place of `entropies`.

    It is 1 for the loss tokens with the highest entropies, `share` of all of them, else 0.
    """
    fields = dict(sequences.fields)
    entropies = fields.pop("entropies")
    flags = top_share(loss_token_values(sequences, entropies), share).astype(np.float32)
    counts = [int(mask.sum()) for mask in sequences.loss_masks]
    pieces = np.split(flags, np.cumsum(counts)[:-1])
    selected = tuple(np.zeros(len(mask), np.float32) for mask in sequences.loss_masks)
    for row, mask, piece in zip(selected, sequences.loss_masks, pieces, strict=True):
        row[mask] = piece
    return sequences._replace(fields={**fields, "selected": selected})


def with_scores(sequences: Sequences, groups: Sequence[ScoredGroup]) -> Sequences:
    """Return the sequences with the field `scores`, the reward of their sample at every token."""
    totals = [reward.total for group in groups for reward in group.rewards]
    scores = np.repeat(np.array(totals, np.float32), sequence_counts(groups))
    rows = tuple(
        np.full(len(ids), score, np.float32)
        for ids, score in zip(sequences.token_ids, scores, strict=True)
    )
    return sequences._replace(fields={**sequences.fields, "scores": rows})


def with_versions(sequences: Sequences, groups: Sequence[ScoredGroup]) -> Sequences:
    """Return the sequences with the field `behavior_versions`. They are in the groups' order."""
    rows = tuple(behavior_versions(groups))
    return sequences._replace(fields={**sequences.fields, "behavior_versions": rows})


def behavior_versions(groups: Sequence[ScoredGroup]) -> Iterator[Floats]:
    """Yield the version that sampled each token, [T], of every sequence; 0 if not sampled."""
    for group in groups:
        for completion in group.rollout.completions:
            versions, counts = zip(*completion.version_runs, strict=True)
            response, position = np.repeat(np.array(versions, np.float32), counts), 0
            for sequence in token_sequences(group.rollout.prompt, completion):
                row = np.zeros(len(sequence.token_ids), np.float32)
                end = position + int(sequence.is_sampled.sum())
                row[sequence.is_sampled] = response[position:end]
                position = end
                yield row


def with_proximal_shares(sequences: Sequences, version: int, fraction: float) -> Sequences:
    """Return the sequences of an update with `proximal_shares` in place of `behavior_versions`."""
    fields = dict(sequences.fields)
    rows = fields.pop("behavior_versions")
    shares = tuple(proximal_shares(row, version, fraction) for row in rows)
    return sequences._replace(fields={**fields, "proximal_shares": shares})


def mean_importance_weight(correction: Correction, sequences: Sequences) -> float:
    """Return the mean importance weight over the loss tokens or sequences of an update."""
    import torch

    old, sampler = (
        torch.from_numpy(loss_token_values(sequences, sequences.fields[name]))
        for name in ("old_logprobs", "sampler_logprobs")
    )
    counts = np.array([int(mask.sum()) for mask in sequences.loss_masks])
    numbers = np.repeat(np.arange(np.count_nonzero(counts)), counts[counts > 0])
    return correction.mean_weight(old, sampler, torch.from_numpy(numbers))
