"""Sequences of a step with the fields of the losses, and the batch of each optimizer update.

In: the arrays of a step, its values of tokens and its advantages. Out: `PreparedStep`, then the
sequences of every update of policy and critic. Batches depend on the order of the samples, the seed
and the step, never on the parallel layout.

P prompts, G completions per prompt, N sampled tokens, end to end, S sequences of T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from msrl.algorithms.aggregate import AveragingGroup
from msrl.algorithms.averaging_groups import Members, balanced_groups, consecutive_groups
from msrl.algorithms.packing import Sequences, gather_tokens, scatter_tokens
from msrl.algorithms.proximal import proximal_shares
from msrl.algorithms.rollout_arrays import RolloutArrays
from msrl.algorithms.selection import Flags, top_share
from msrl.config.schema import Config
from msrl.config.sections.algo import AggregateConfig, AlgoConfig
from msrl.plan.derived import aggregate_constant, needs_draws, needs_old_logprobs
from msrl.trainer.objective.batches import (
    loss_token_counts,
    num_loss_tokens,
    select,
    with_weights,
)
from msrl.types import Bools, Floats
from msrl.workflows.rl.distillation import teacher_fields
from msrl.workflows.rl.update.advantages import StepAdvantages
from msrl.workflows.rl.update.values import StepValues


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """Sequences of a step with everything that is computed before its first update.

    Attributes:
        arrays: Arrays of the groups of the step.
        trainable: Tokens of each sequence that have a loss if its completion is trained on.
        sequences: Sequences with the fields of the policy's loss. Their loss masks select the
            trained tokens.
        metrics: Metrics of the preparation.
        critic_sequences: Sequences with the fields of the critic's loss; None without a critic.
    """

    arrays: RolloutArrays
    trainable: tuple[Bools, ...]  # S of [T]
    sequences: Sequences
    metrics: Mapping[str, float]
    critic_sequences: Sequences | None = None


def prepared_step(
    arrays: RolloutArrays,
    is_trained: Flags,  # [P, G]
    advantages: StepAdvantages,
    values: StepValues,
    metrics: Mapping[str, float],
    config: Config,
) -> PreparedStep:
    """Return the sequences of a step with the fields of the configured losses."""
    trainable = arrays.sequences.loss_masks
    if config.algo.mask.invalid_actions:
        trainable = arrays.scatter(arrays.turns.valid_tokens)
    flags = arrays.repeat_by_sequence(is_trained)
    masks = tuple(mask & flag for mask, flag in zip(trainable, flags, strict=True))
    fields = {
        "advantages": arrays.scatter(advantages.advantages.astype(np.float32)),
        **arrays.sequences.fields,
        **_value_fields(values, config),
        **_completion_fields(arrays, config.algo),
    }
    routes = arrays.sequences.routes if values.routes is None else values.routes
    sequences = arrays.sequences._replace(loss_masks=masks, fields=fields, routes=routes)
    critic = None
    if values.critic is not None and advantages.returns is not None:
        critic = sequences._replace(
            fields={
                "old_values": arrays.scatter(values.critic.astype(np.float32)),
                "returns": arrays.scatter(advantages.returns.astype(np.float32)),
            },
            routes=None,
        )
    return PreparedStep(arrays, trainable, sequences, metrics, critic)


def _value_fields(values: StepValues, config: Config) -> dict[str, tuple[Floats, ...]]:
    """Return the fields with the values of tokens that the policy's loss reads."""
    kl_loss, fields = config.algo.kl.loss, dict[str, tuple[Floats, ...]]()
    if needs_old_logprobs(config):
        assert values.policy is not None
        fields["old_logprobs"] = values.policy
    if kl_loss.coef and kl_loss.estimator != "full":
        assert values.reference is not None
        fields["reference_logprobs"] = values.reference
    if values.entropies is not None:
        fields["entropies"] = values.entropies
    return fields


def _completion_fields(arrays: RolloutArrays, algo: AlgoConfig) -> dict[str, tuple[Floats, ...]]:
    """Return the fields that the policy's loss reads of prompts, completions and versions."""
    fields = teacher_fields(arrays, algo.distill.on_ranks)
    if algo.old_logprobs == "log-linear":
        fields["behavior_versions"] = arrays.scatter(arrays.versions)
    if algo.options.get("split") == "reward":
        rewards = arrays.repeat_by_token(arrays.rewards).astype(np.float32)
        fields["scores"] = arrays.scatter(rewards)
    return fields


@dataclass(frozen=True, slots=True)
class UpdateBatch:
    """Sequences of an update.

    Attributes:
        sequences: Indices of its sequences in the step, sample by sample.
        shards: Number of sequences of each of its samples, by shard.
    """

    sequences: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...]


def update_batches(config: Config, counts: Sequence[int], step: int) -> list[UpdateBatch]:
    """Return the batches of a step's updates; a sample is in one update of each epoch.

    Args:
        config: configuration of the run.
        counts: number of sequences of each sample of the step.
        step: number of the step.
    """
    updates = config.train.updates
    size = updates.samples_per_update or len(counts)
    starts = np.cumsum((0, *counts)).tolist()
    batches: list[UpdateBatch] = []
    for epoch in range(updates.epochs):
        order = np.arange(len(counts))
        if updates.shuffle and size < len(counts):
            seed = np.random.SeedSequence([config.run.seed, step, epoch])
            np.random.Generator(np.random.Philox(seed)).shuffle(order)
        for shards in _split(order.tolist(), size, updates.shards):
            sequences = [
                sequence
                for samples in shards
                for sample in samples
                for sequence in range(starts[sample], starts[sample + 1])
            ]
            sizes = tuple(tuple(counts[sample] for sample in samples) for samples in shards)
            batches.append(UpdateBatch(tuple(sequences), sizes))
    return batches


def _split(order: Sequence[int], size: int, num_shards: int) -> list[list[Sequence[int]]]:
    """Return the samples of every update by shard; an update has at most `size` samples."""
    bounds = np.linspace(0, len(order), num_shards + 1).round().astype(int).tolist()
    shards = [order[start:end] for start, end in pairwise(bounds)]
    share = max(size // num_shards, 1)
    longest = max(len(shard) for shard in shards)
    return [
        [shard[start : start + share] for shard in shards] for start in range(0, longest, share)
    ]


def policy_batches(
    config: Config,
    sequences: Sequences,
    batches: Sequence[UpdateBatch],
    step: int,  # counted from the first step of the run
) -> Iterator[Sequences]:
    """Yield the sequences of each update of the policy, with the weights of `algo.aggregate`."""
    algo, constant = config.algo, aggregate_constant(config)
    for number, batch in enumerate(batches):
        own = select(sequences, batch.sequences)
        if needs_draws(config):
            own = with_draws(own, (config.run.seed, step - algo.value.warmup_steps, number))
        if algo.top_entropy < 1.0:
            own = with_top_entropy(own, algo.top_entropy)
        if algo.old_logprobs == "log-linear":
            own = with_proximal_shares(own, step, number / len(batches))
        if num_loss_tokens(own):
            groups = averaging_groups(algo.aggregate, batch, own)
            own = with_weights(own, algo.aggregate.mode, constant, groups)
        yield own


def value_batch(config: Config, sequences: Sequences, batch: UpdateBatch) -> Sequences:
    """Return the sequences of an update of the critic, with weights of `algo.value.aggregate`."""
    own, mode = select(sequences, batch.sequences), config.algo.value.aggregate
    if mode == "token-mean" or not num_loss_tokens(own):
        return own
    groups = averaging_groups(config.algo.aggregate, batch, own)
    return with_weights(own, mode, aggregate_constant(config), groups)


def with_draws(sequences: Sequences, seed: Sequence[int]) -> Sequences:
    """Return the sequences of an update with a random number of each token, the field `draws`.

    It depends on the seed and the order of the sequences alone.
    """
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    draws = tuple(random.random(len(ids), np.float32) for ids in sequences.token_ids)
    return sequences._replace(fields={**sequences.fields, "draws": draws})


def with_top_entropy(sequences: Sequences, share: float) -> Sequences:
    """Return the sequences of an update with the field `selected` in place of `entropies`.

    It is 1 for the loss tokens with the highest entropies, `share` of all of them, else 0.
    """
    fields, masks = dict(sequences.fields), sequences.loss_masks
    flags = top_share(gather_tokens(fields.pop("entropies"), masks), share)
    fields["selected"] = scatter_tokens(flags.astype(np.float32), masks)
    return sequences._replace(fields=fields)


def with_proximal_shares(sequences: Sequences, version: int, fraction: float) -> Sequences:
    """Return the sequences of an update with `proximal_shares` in place of `behavior_versions`."""
    fields = dict(sequences.fields)
    rows = fields.pop("behavior_versions")
    shares = tuple(proximal_shares(row, version, fraction) for row in rows)
    return sequences._replace(fields={**fields, "proximal_shares": shares})


def averaging_groups(
    aggregate: AggregateConfig,
    batch: UpdateBatch,
    sequences: Sequences,  # those of the batch
) -> tuple[AveragingGroup, ...]:
    """Return the groups of an update whose token means are averaged; none without a size.

    The sequences of a sample are in one group. Groups of about equal length count by their number
    of samples that have loss tokens.
    """
    if aggregate.samples_per_group is None and aggregate.tokens_per_group is None:
        return ()
    counts = [count for shard in batch.shards for count in shard]
    starts = np.cumsum((0, *counts)).tolist()
    rows = [range(start, end) for start, end in pairwise(starts)]
    losses = loss_token_counts(sequences)
    groups: list[AveragingGroup] = []
    first = 0
    for shard, divided in zip(
        batch.shards, _members_by_shard(aggregate, batch, sequences), strict=True
    ):
        for members in divided:
            samples = [rows[first + member] for member in members]
            is_trained = [any(losses[row] for row in sample) for sample in samples]
            weight = 1.0 if aggregate.tokens_per_group is None else float(sum(is_trained))
            indices = tuple(row for sample in samples for row in sample)
            groups.append(AveragingGroup(indices, weight))
        first += len(shard)
    return tuple(groups)


def _members_by_shard(
    aggregate: AggregateConfig, batch: UpdateBatch, sequences: Sequences
) -> Sequence[tuple[Members, ...]]:
    """Return the groups of the samples of each shard."""
    if aggregate.tokens_per_group is None:
        assert aggregate.samples_per_group is not None, "checked with the configuration"
        size = aggregate.samples_per_group
        return [consecutive_groups(len(shard), size) for shard in batch.shards]
    lengths = [len(ids) for ids in sequences.token_ids]
    shards: list[list[int]] = []
    row = 0
    for shard in batch.shards:
        shards.append([])
        for count in shard:
            shards[-1].append(sum(lengths[row : row + count]))
            row += count
    return balanced_groups(shards, aggregate.tokens_per_group, aggregate.samples_per_group)
