"""Groups of samples whose token means are averaged, beside plain loops and MindSpeed-RL."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import mindspeed_rl_oracle
from config_inputs import GENERATING, make_working_folder
from msrl.algorithms.aggregate import AveragingGroup, sequence_weights
from msrl.algorithms.averaging_groups import balanced_groups
from msrl.algorithms.packing import Sequences
from msrl.cli.configuration import load_configuration as load
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.trainer.objective.batches import with_weights
from msrl.trainer.objective.losses import ValueLoss
from msrl.workflows.rl.update.batches import (
    UpdateBatch,
    averaging_groups,
    update_batches,
    value_batch,
)
from support import mentions

PROMPT = 3  # tokens


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return make_working_folder(tmp_path, **GENERATING)


def config(*sets: str) -> Config:
    sizes = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=6")
    more = ("train.updates.shuffle=false", "algo.aggregate.mode=micro-batch-mean")
    return load(["grpo.yaml"], [*sizes, *more, *sets], command="train-grpo").config


def step(lengths: list[int], *, masked: tuple[int, ...] = ()) -> Sequences:
    """Return sequences with responses of the lengths, of which some have no loss."""
    rows = tuple(np.arange(PROMPT + length) for length in lengths)
    masks = tuple(
        (np.arange(len(row)) >= PROMPT) & (number not in masked) for number, row in enumerate(rows)
    )
    return Sequences(rows, masks, {})


def update_losses(
    config: Config, sequences: Sequences, losses: list[torch.Tensor], counts: list[int]
) -> list[float]:
    """Return the aggregated loss of every update."""
    values: list[float] = []
    for batch in update_batches(config, counts, 0):
        own = Sequences(
            tuple(sequences.token_ids[i] for i in batch.sequences),
            tuple(sequences.loss_masks[i] for i in batch.sequences),
            {},
        )
        groups = averaging_groups(config.algo.aggregate, batch, own)
        weighted = with_weights(own, config.algo.aggregate.mode, None, groups)
        weights = [
            float(row[-1]) * bool(mask.any())
            for row, mask in zip(weighted.fields["weights"], weighted.loss_masks, strict=True)
        ]
        rows = zip(batch.sequences, weights, strict=False)
        values.append(sum(weight * float(losses[i].sum()) for i, weight in rows))
    return values


def test_the_loss_is_the_mean_over_groups_of_consecutive_samples_of_a_shard(folder):
    """Two updates of two shards: samples 0 to 5 and 12 to 17, in groups of 4 and 2, then others."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (24,), generator=generator).tolist()
    losses = [torch.randn(length, generator=generator) for length in lengths]
    sets = (
        "train.updates={samples_per_update: 12, shards: 2}",
        "algo.aggregate.samples_per_group=4",
    )
    values = update_losses(config(*sets), step(lengths), losses, [1] * 24)
    for value, starts in zip(values, ((0, 12), (6, 18)), strict=True):
        means = []
        for start in starts:
            for first, last in ((start, start + 4), (start + 4, start + 6)):
                means.append(float(torch.cat(losses[first:last]).mean()))
        assert value == pytest.approx(sum(means) / 4, rel=1e-6)


@pytest.mark.parametrize("mode", ["micro-batch-mean", "seq-mean-token-mean", "token-mean"])
def test_the_value_loss_of_updates_is_that_of_the_critic_of_mindspeed_rl(folder, mode: str):
    """Two ranks with micro-batches of 4 samples, or of 1; or one micro-batch of all samples."""
    compute = mindspeed_rl_oracle.functions()._compute_value_loss
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 9, (24,), generator=generator).tolist()
    names = ("vpreds", "returns", "values", "response_mask")
    data = dict(zip(names, _padded_batch(lengths, generator).values(), strict=True))
    size = {"micro-batch-mean": 4, "seq-mean-token-mean": 1, "token-mean": 24}[mode]
    parts = [
        {name: rows[start : start + size] for name, rows in data.items()}
        for start in range(0, 24, size)
    ]
    expected = [float(compute(**part, cliprange_value=0.2)[0]) for part in parts]
    is_grouped = mode == "micro-batch-mean"
    policy = "algo.aggregate={mode: token-mean, samples_per_group: null}"
    sizes = "algo.aggregate={mode: token-mean, samples_per_group: 4}" if is_grouped else policy
    shards = f"train.updates.shards={1 if mode == 'token-mean' else 2}"
    own = config(f"algo.value.aggregate={mode}", "algo.advantage.estimator=gae", shards, sizes)
    fields = {name: _rows(data[name], lengths) for name in names[:3]}
    (batch,) = update_batches(own, [1] * 24, 0)
    weighted = value_batch(own, step(lengths)._replace(fields=fields), batch)
    mask = np.concatenate(weighted.loss_masks)
    flat = {
        name: torch.from_numpy(np.concatenate(rows)[mask]) for name, rows in weighted.fields.items()
    }
    flat["old_values"] = flat["values"]
    loss, _ = ValueLoss(0.2)(flat["vpreds"], flat, sum(lengths))
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-5)


def test_masked_samples_keep_their_place_in_a_group_and_count_in_no_mean(folder):
    losses = [torch.full((2,), float(number)) for number in range(24)]
    masked = (0, 4, 5, 6, 7)  # the second group has no loss token
    sequences = step([2] * 24, masked=masked)
    (value,) = update_losses(
        config("algo.aggregate.samples_per_group=4"), sequences, losses, [1] * 24
    )
    groups = [[1, 2, 3], *([4 * n, 4 * n + 1, 4 * n + 2, 4 * n + 3] for n in range(2, 6))]
    assert value == pytest.approx(np.mean([np.mean(group) for group in groups]))
    batch = UpdateBatch(tuple(range(24)), ((1,) * 24,))
    sizes = config("algo.aggregate={samples_per_group: 4, tokens_per_group: 20}").algo.aggregate
    weights = [group.weight for group in averaging_groups(sizes, batch, sequences)]
    assert sum(weights) == 24 - len(masked)


def test_all_sequences_of_an_episode_are_in_one_group(folder):
    """Episodes of 2, 1 and 3 sequences, and so on."""
    counts = [2, 1, 3, 1, 1, 4] * 4
    losses = [torch.full((1,), float(number)) for number in range(sum(counts))]
    (value,) = update_losses(
        config("algo.aggregate.samples_per_group=2"), step([1] * sum(counts)), losses, counts
    )
    bounds = np.cumsum((0, *counts))[::2]
    means = [np.arange(a, b).mean() for a, b in pairwise(bounds)]
    assert value == pytest.approx(np.mean(means))


def test_groups_of_one_sample_are_the_mean_over_sequences_and_one_group_the_mean_over_tokens():
    counts = [3, 1, 0, 5]
    single = [AveragingGroup((number,)) for number in range(4)]
    for mode, groups in (
        ("seq-mean-token-mean", single),
        ("token-mean", [AveragingGroup((0, 1, 2, 3))]),
    ):
        trained = np.array(counts) > 0
        np.testing.assert_allclose(
            sequence_weights(counts, "micro-batch-mean", groups=groups)[trained],
            sequence_weights(counts, mode)[trained],  # type: ignore[arg-type]
        )
    with pytest.raises(ValueError, match="group"):
        sequence_weights(counts, "micro-batch-mean", groups=single[:1])


@pytest.mark.parametrize("micro", [1, 2, 4, 5])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("mini", [1, 2])
def test_updates_have_the_loss_of_mindspeed_rl_with_its_ranks_and_micro_batches(
    folder, micro: int, ranks: int, mini: int
):
    """MindSpeed-RL's own losses of its own micro-batches, averaged as Megatron does."""
    original = mindspeed_rl_oracle.functions()
    generator = torch.Generator().manual_seed(micro * 10 + ranks)
    lengths = torch.randint(1, 9, (24,), generator=generator).tolist()
    data = _padded_batch(lengths, generator)
    updates = f"train.updates={{samples_per_update: {24 // mini}, shards: {ranks}}}"
    values = update_losses(
        config(updates, f"algo.aggregate.samples_per_group={micro}"),
        step(lengths),
        _token_losses(data, lengths),
        [1] * 24,
    )
    expected = np.zeros(mini)
    for rank in range(ranks):
        (rows,) = original.get_current_dp_range_indexes(24 // ranks, 24 // ranks, rank)
        own = {name: values[rows] for name, values in data.items()}
        for number, batch in enumerate(original._split_batches(own, 24 // ranks // mini, False)):
            parts = original._split_batches(batch, micro, False)
            expected[number] += np.mean([_original_loss(part) for part in parts]) / ranks
    assert values == pytest.approx(expected.tolist(), rel=1e-5)


@pytest.mark.parametrize(("tokens", "limit"), [(16, None), (30, None), (64, 3), (12, 2)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_of_about_equal_length_have_the_loss_of_dynamic_micro_batches_of_mindspeed_rl(
    folder, tokens: int, limit: int | None, ranks: int
):
    original = mindspeed_rl_oracle.functions()
    generator = torch.Generator().manual_seed(tokens + ranks)
    lengths = torch.randint(1, 9, (24,), generator=generator).tolist()
    data = _padded_batch(lengths, generator)
    sizes = f"{{tokens_per_group: {tokens}, samples_per_group: {limit or 'null'}}}"
    aggregate = f"algo.aggregate={sizes[:-1]}, mode: micro-batch-mean}}"
    (value,) = update_losses(
        config(f"train.updates.shards={ranks}", aggregate),
        step(lengths),
        _token_losses(data, lengths),
        [1] * 24,
    )
    share = 24 // ranks
    totals = [PROMPT + length for length in lengths]
    shards = [totals[rank * share : (rank + 1) * share] for rank in range(ranks)]
    # The original's ranks take the largest number of micro-batches that one of them needs.
    number = max(len(original.rearrange_micro_batches(own, tokens, limit)) for own in shards)
    expected = 0.0
    for rank, own in enumerate(shards):
        for rows in original.karmarkar_karp(own, number, equal_size=False):
            picked = [rank * share + row for row in rows]
            part = {name: values[picked] for name, values in data.items()}
            factor = len(rows) / (share / number)
            expected += _original_loss(part) * factor / number / ranks
    assert value == pytest.approx(expected, rel=1e-5)


def test_balanced_groups_are_those_of_mindspeed_rl_for_random_lengths():
    original = mindspeed_rl_oracle.functions()
    random = np.random.default_rng(0)
    for _ in range(200):
        lengths = random.integers(1, random.integers(2, 60), random.integers(1, 40)).tolist()
        tokens, limit = int(random.integers(max(lengths) // 2 + 1, 150)), int(random.integers(1, 9))
        expected = original.rearrange_micro_batches(lengths, tokens, limit)
        (own,) = balanced_groups([lengths], tokens, limit)
        assert {frozenset(group) for group in own} == {
            frozenset(group) for group in expected if group
        }


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        ((), ("algo.aggregate.mode", "micro-batch-mean", "samples_per_group")),
        (
            ("algo.aggregate={mode: token-mean, samples_per_group: 2}",),
            ("algo.aggregate.samples_per_group", "2", "no effect"),
        ),
        (
            ("algo.aggregate.samples_per_group=2", "train.updates.shards=5"),
            ("train.updates.shards", "5", "24"),
        ),
    ],
)
def test_a_group_size_that_is_missing_or_not_read_is_refused(folder, sets, words):
    from support import checked_plan

    more = ("train.updates.shuffle=false", "algo.aggregate.mode=micro-batch-mean")
    sizes = ("rollout.prompts_per_step=4", "rollout.samples_per_prompt=6", "cluster.platform=cpu")
    with pytest.raises(MsrlError, match=mentions(*words)):
        checked_plan(
            load(["grpo.yaml"], [*sizes, *more, *sets], command="train-grpo"), "train-grpo"
        )


def _padded_batch(lengths: list[int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    shape = (len(lengths), max(lengths))
    mask = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
    names = ("log_prob", "old_log_prob", "advantages")
    fields = {name: 0.5 * torch.randn(shape, generator=generator) for name in names}
    return {**fields, "eos_mask": mask}


def _original_loss(batch: dict[str, torch.Tensor]) -> float:
    loss, *_ = mindspeed_rl_oracle.functions()._compute_dapo_policy_loss(
        **batch,
        entropy=torch.zeros(()) * batch["log_prob"],
        entropy_coeff=0.0,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        token_level_loss=True,
    )
    return float(loss)


def _token_losses(data: dict[str, Any], lengths: list[int]) -> list[torch.Tensor]:
    """Return the policy loss of every token of each response."""
    ratio = (data["log_prob"] - data["old_log_prob"]).exp()
    surrogates = [-data["advantages"] * value for value in (ratio, ratio.clip(0.8, 1.28))]
    losses = torch.maximum(*surrogates)
    return [row[:length] for row, length in zip(losses, lengths, strict=True)]


def _rows(values: torch.Tensor, lengths: list[int]) -> tuple[np.ndarray, ...]:
    """Return the values of every response, after zeros for its prompt."""
    return tuple(
        np.concatenate((np.zeros(PROMPT), row[:length])).astype(np.float32)
        for row, length in zip(values.numpy(), lengths, strict=True)
    )
