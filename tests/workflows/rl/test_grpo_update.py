"""Updates of a train-grpo step, with a fake in place of the ranks, and checks before a run.

`test_train_grpo.py` runs the same with real ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from config_inputs import GENERATING, make_working_folder
from fake_workers import FakeWorkers
from msrl.algorithms.packing import Sequences
from msrl.algorithms.rollout_arrays import rollout_arrays
from msrl.cli.configuration import load_configuration as load
from msrl.errors import MsrlError
from msrl.trainer.objective.batches import BatchLimits
from msrl.trainer.objective.requests import RankValues, TokenRequest, UpdateRequest
from msrl.types import Floats, Image, MicroBatch, PlacedImage, Prompt, ScoredGroup
from msrl.workflows.rl.model_groups import ModelGroups, SeparateGroup
from msrl.workflows.rl.setup import difficulty, prepare
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.update.batches import PreparedStep
from msrl.workflows.rl.update.updater import Updater
from msrl.workflows.training.train_worker import WorkerPosition
from msrl.workflows.training.trainer_group import ForwardResult, TrainerGroup
from msrl.workflows.training.transport.base import Calls
from prepared_steps import scored_group
from support import checked_plan, mentions
from tiny_qwen2 import make_tokenizer
from training_runs import write_rows


class Ranks:
    """Fake ranks with log-probabilities of -1 (policy) and -1.5 (reference).

    Updates return the given report, and their losses are recorded.
    """

    dp_size = 1

    def __init__(self, **report: float) -> None:
        self.report, self.losses = report, list[Any]()
        self.sequences, self.requests = list[Sequences](), list[TokenRequest]()

    def begin_forward(self, *arguments: Any) -> Any:
        values = self.forward(*arguments)
        return SimpleNamespace(wait=lambda: values)

    def forward(self, request: TokenRequest, sequences: Sequences, limits: object) -> ForwardResult:
        """Return 0.25 as sums of squared probabilities, and entropies of 1, 2, 3 and so on."""
        self.requests.append(request)
        entropies = tuple(
            np.arange(1, len(ids) + 1, dtype=np.float32) + 10 * number
            for number, ids in enumerate(sequences.token_ids)
        )
        logprob = -1.5 if request.model == "reference" else -1.0
        values: dict[str, tuple[Floats, ...]] = {
            "logprobs": tuple(np.full_like(row, logprob) for row in entropies),
            "squared_probabilities": tuple(np.full_like(row, 0.25) for row in entropies),
            "entropies": entropies,
        }
        return ForwardResult({name: values[name] for name in request.values})

    def update(
        self, request: UpdateRequest, sequences: Sequences, limits: object
    ) -> dict[str, float]:
        self.losses.append(request.loss)
        self.sequences.append(sequences)
        return self.report


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_working_folder(tmp_path, **GENERATING)


def make_updater(ranks: Ranks, *sets: str, state: dict[str, Any] | None = None) -> Updater:
    sizes = ("rollout.prompts_per_step=2", "rollout.samples_per_prompt=2")
    stand_in: Any = ranks
    return Updater(
        load(["grpo.yaml"], [*sizes, *sets], command="train-grpo").config, stand_in, 10, state or {}
    )


def group(index: int, *rewards: float) -> ScoredGroup:
    """Return a scored group with responses of 1, 2 and so on tokens."""
    lengths = range(1, len(rewards) + 1)
    return scored_group(Prompt(index, np.array([1, 2])), rewards, lengths, logprob=-1.0)


def advantages(prepared: PreparedStep) -> list[float]:
    """Return the advantage of the first token of every sample."""
    return [row[0] for row in all_advantages(prepared)]


def all_advantages(prepared: PreparedStep) -> list[list[float]]:
    """Return the advantages of the sampled tokens of every sample."""
    rows, masks = prepared.sequences.fields["advantages"], prepared.arrays.sequences.loss_masks
    return [row[mask].tolist() for row, mask in zip(rows, masks, strict=True)]


def test_z_scores_over_the_step_exclude_filtered_groups(folder: Path):
    sets = ("algo.preset=reinforce_pp", "algo.kl.reward.coef=0.0", "rollout.filter.kind=all_equal")
    prepared = make_updater(Ranks(), *sets).prepare(
        [group(0, 9.0, 9.0), group(1, 1.0, 0.0)], Clock()
    )
    # One token of 1 and two of 0: mean 1/3, deviation sqrt(1/3).
    np.testing.assert_allclose(
        advantages(prepared), [0.0, 0.0, 2 / 3 * 3**0.5, -1 / 3 * 3**0.5], atol=1e-5
    )
    assert [mask.any() for mask in prepared.sequences.loss_masks] == [False, False, True, True]


def test_dropped_groups_count_in_the_statistics_of_rewards_only(
    folder: Path,
):
    """Rewards 1, 0 and 3, 3 are trained on, 8, 8 were dropped: mean 23 / 6."""
    sets = (
        "algo.advantage.estimator=reinforce",
        "reward.norm={center: batch}",
        "reward.overlong.buffer=64",
    )
    updater = make_updater(Ranks(), *sets, "reward.norm.scale=running")
    prepared = updater.prepare(
        [group(0, 1.0, 0.0), group(1, 3.0, 3.0)], Clock(), [group(2, 8.0, 8.0)]
    )
    shaped = np.array([1.0, 0.0, 3.0, 3.0, 8.0, 8.0]) - np.tile([1 / 64, 2 / 64], 3)
    np.testing.assert_allclose(
        advantages(prepared), ((shaped - shaped.mean()) / shaped.std(ddof=1))[:4], rtol=1e-5
    )
    assert updater.state()["rewards"]["count"] == 6 and prepared.metrics[
        "shaped_reward"
    ] == pytest.approx(shaped.mean())


def test_remax_compares_shaped_rewards_with_those_of_the_greedy_response(folder: Path):
    sets = ("algo.advantage.estimator=remax", "reward.overlong.buffer=64", "reward.clip=1.0")
    groups = [
        replace(group(0, 1.0, 0.0), greedy=group(0, 5.0)),
        replace(group(1, 0.0, 0.0), greedy=group(1, -0.5)),
    ]
    prepared = make_updater(Ranks(), *sets).prepare(groups, Clock())
    shaped = np.array([1.0, 0.0, 0.0, 0.0]) - np.tile([1 / 64, 2 / 64], 2)
    greedy = np.array([1.0, 1.0, -0.5 - 1 / 64, -0.5 - 1 / 64])  # 5 is clipped
    np.testing.assert_allclose(advantages(prepared), shaped - greedy, atol=1e-6)
    assert prepared.metrics["greedy_reward"] == pytest.approx((1.0 - 0.5 - 1 / 64) / 2)


ADAPTIVE = (
    "algo.kl.loss.coef=0.1",
    "algo.kl.controller={kind: adaptive, target: 0.01, horizon: 4}",
)


def run_step(updater: Updater) -> dict[str, float]:
    prepared = updater.prepare([group(0, 1.0, 0.0), group(1, 1.0, 0.0)], Clock())
    return updater.update(prepared, 0, Clock())


@pytest.mark.parametrize("measured", [float("nan"), float("inf")])
def test_an_update_without_a_finite_divergence_leaves_the_adaptive_coefficient_as_it_was(
    folder: Path, measured: float
):
    """4 samples in a horizon of 4 change the factor by a fifth, if there is a divergence."""
    ranks = Ranks(kl=measured, skipped=1.0)
    updater = make_updater(ranks, *ADAPTIVE, state={"kl_factor": 1.5})
    run_step(updater)
    assert updater.state()["kl_factor"] == 1.5
    ranks.report = {"kl": 9.0}
    run_step(updater)
    assert updater.state()["kl_factor"] == pytest.approx(1.8) and [
        loss.kl_coef for loss in ranks.losses
    ] == pytest.approx([0.15] * 2)


def test_a_coefficient_that_is_fixed_from_now_on_is_the_one_of_the_configuration(folder: Path):
    ranks = Ranks(kl=9.0)
    updater = make_updater(ranks, ADAPTIVE[0], state={"kl_factor": 1.5})
    run_step(updater)
    assert [loss.kl_coef for loss in ranks.losses] == [0.1] and updater.state()["kl_factor"] == 1.0


@pytest.mark.parametrize(
    ("level", "keyword"), [(None, "missing"), ("hard", "'hard'"), ("nan", "'nan'")]
)
def test_a_difficulty_that_is_not_a_number_is_reported_before_the_run_starts(
    folder: Path, level: str | None, keyword: str
):
    from msrl.cli.app import app

    make_tokenizer().save_pretrained(folder / "model")
    levels = [{}, {}] if level is None else [{"level": "0.5"}, {"level": level}]
    source = str(
        write_rows(
            folder / "rows.jsonl",
            [{"question": "1+1=", "answer": "#### 2", **column} for column in levels],
        )
    )
    keys = {
        "prompt": "question",
        "response": "answer",
        **({} if level is None else {"extra.difficulty": "level"}),
    }
    arguments = [
        "--input",
        source,
        "--tokenizer",
        "model",
        "--handler",
        "r1",
        "--template",
        "qwen",
        "--map-keys",
        json.dumps(keys),
    ]
    app(["preprocess", *arguments, "--output-prefix", "hard"], standalone_mode=False)
    sets = ("data.train=hard", "algo.sample_weight.difficulty=true", "cluster.platform=cpu")
    with pytest.raises(
        MsrlError, match=mentions("extra.difficulty", f"prompt {int(level is not None)}", keyword)
    ):
        prepare(checked_plan(load(["grpo.yaml"], sets), "train-grpo"))


def test_a_difficulty_is_the_number_of_its_column():
    prompt = Prompt(0, np.array([1]), extra={"difficulty": "0.25"})
    assert difficulty(prompt, "algo.sample_weight.difficulty") == 0.25


def test_only_the_tokens_with_the_highest_entropy_of_an_update_are_selected(folder: Path):
    """Responses of 1, 2, 1 and 2 tokens behind 2 prompt tokens; updates of two samples."""
    ranks = Ranks()
    updater = make_updater(
        ranks, "algo.top_entropy=0.3", "train.updates={samples_per_update: 2, shuffle: false}"
    )
    run_step(updater)
    assert [request.values for request in ranks.requests] == [("logprobs", "entropies")]
    assert len(ranks.sequences) == 2
    for sequences in ranks.sequences:
        selected = [row.tolist() for row in sequences.fields["selected"]]
        assert selected == [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
        assert "entropies" not in sequences.fields
    ranks = Ranks()
    run_step(make_updater(ranks))
    assert ranks.requests == [] and "selected" not in ranks.sequences[0].fields


@pytest.mark.parametrize(
    ("old_logprobs", "num_passes"), [("trainer", 1), ("behavior", 0), ("log-linear", 0)]
)
def test_only_log_probabilities_of_the_trainer_need_another_pass(
    folder: Path, old_logprobs: str, num_passes: int
) -> None:
    ranks = Ranks()
    updates = "train.updates={samples_per_update: 2, shuffle: false}"
    run_step(make_updater(ranks, f"algo.old_logprobs={old_logprobs}", updates))
    assert len(ranks.requests) == num_passes and len(ranks.sequences) == 2
    for sequences in ranks.sequences:
        assert ("old_logprobs" in sequences.fields) == (num_passes > 0)


def test_importance_weights_are_normalized_by_the_mean_of_each_update(folder: Path):
    """The trainer gives -1 and the sampler -1.5 or -0.5: weights e^0.5 and e^-0.5."""
    ranks = Ranks()
    updater = make_updater(ranks, "algo.mismatch={weight: token, upper: 9.0, normalize: true}")
    groups = [group(0, 1.0, 0.0), group(1, 1.0, 0.0)]
    for scored, value in zip(groups, (-1.5, -0.5), strict=True):
        for completion in scored.rollout.completions:
            completion.logprobs[:] = value
    updater.update(updater.prepare(groups, Clock()), 0, Clock())
    (loss,) = ranks.losses
    assert loss.correction.scale == pytest.approx(2 / (np.exp(0.5) + np.exp(-0.5)))
    assert "old_logprobs" in ranks.sequences[0].fields


def test_the_optimal_token_baseline_reads_the_distribution_of_the_policy(folder: Path):
    ranks = Ranks()
    updater = make_updater(ranks, "algo.advantage.estimator=optimal_token_baseline")
    prepared = updater.prepare([group(0, 1.0, 0.0), group(1, 3.0, 1.0)], Clock())
    assert [request.values for request in ranks.requests] == [("logprobs", "squared_probabilities")]
    # Equal norms: the baseline of the first token is the mean, of the second 0.
    expected = ([0.5], [-0.5, 0.0], [1.0], [-1.0, 1.0])
    assert all_advantages(prepared) == [pytest.approx(row) for row in expected]


class RecordedRank(FakeWorkers):
    """Rank of a model whose calls are recorded, with log-probabilities of `value`."""

    def __init__(self, name: str, value: float, events: list[tuple[str, str]]) -> None:
        super().__init__(1)
        self.name, self.value, self.events = name, value, events

    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        self.events.append(("begin", self.name))
        return Calls({0: (method, arguments[0])})

    def wait(self, calls: Calls) -> list[Any]:
        method, arguments = calls.references[0]
        self.events.append(("end", self.name))
        if method == "start":
            return [(WorkerPosition(0, True, 1), {})]
        lengths = [int(batch.cu_seqlens[-1]) for batch in arguments[0]]
        return [RankValues({"logprobs": [np.full(n, self.value, np.float32) for n in lengths]})]


class DataParallelRanks(FakeWorkers):
    """Three data-parallel ranks that record their micro-batches and the divisor of an update."""

    def __init__(self) -> None:
        super().__init__(3)
        self.batches, self.divisors = list[list[MicroBatch]](), list[float | None]()

    def start(self, rank: int, *_: object) -> tuple[WorkerPosition, dict[str, Any]]:
        return WorkerPosition(rank, True, 1), {}

    def update(
        self, rank: int, batches: list[MicroBatch], request: UpdateRequest
    ) -> dict[str, float]:
        self.batches.append(batches)
        self.divisors.append(request.divisor)
        return {}


def test_sequences_without_loss_fill_the_ranks_of_an_update():
    workers, saves = DataParallelRanks(), cast("Any", None)
    trainers = TrainerGroup(workers)
    trainers.start(None, saves)
    sequences = rollout_arrays([group(0, 1.0, 0.0), group(1, 1.0, 0.0)]).sequences
    trainers.update(UpdateRequest(cast("Any", None), 0.1), sequences, BatchLimits(8))
    (batches,) = zip(*workers.batches, strict=True)
    assert [len(batch.cu_seqlens) - 1 for batch in batches] == [2, 2, 2]
    assert sum(int(batch.loss_mask.sum()) for batch in batches) == 6
    assert workers.divisors == [6.0] * 3


def test_micro_batches_have_at_most_the_patches_of_the_limit():
    """Two samples of a prompt share its image, and three images of 16 patches exceed 32."""
    workers, saves = DataParallelRanks(), cast("Any", None)
    trainers = TrainerGroup(workers)
    trainers.start(None, saves)
    ids = tuple(np.arange(4) for _ in range(18))
    shown = [Image(str(number // 2), (1, 4, 4), b"") for number in range(18)]
    placed = tuple((PlacedImage(0, image),) for image in shown)
    sequences = Sequences(ids, tuple(np.ones(4, bool) for _ in ids), {}, None, placed)
    limits = BatchLimits(1, max_tokens=1000, max_patches=32)
    trainers.update(UpdateRequest(cast("Any", None), 0.1), sequences, limits)
    for batches in workers.batches:
        images = [{placed.image for placed in batch.images} for batch in batches]
        assert all(0 < len(each) <= 2 for each in images)
        assert sum(len(batch.images) for batch in batches) == 6


def test_a_reference_on_separate_devices_computes_while_the_policy_does(folder: Path):
    events = list[tuple[str, str]]()
    policy = RecordedRank("policy", -1.0, events)
    reference = TrainerGroup(RecordedRank("reference", -1.5, events))
    saves: Any = None
    separate = SeparateGroup(reference, None, saves, is_critic=False)
    groups = ModelGroups(TrainerGroup(policy), {"reference": separate}, shares_devices=False)
    groups.start(None, saves)
    groups.start_separate(None)
    events.clear()
    config = load(["grpo.yaml"], ["algo.kl.reward.coef=0.1"], command="train-grpo").config
    prepared = Updater(config, groups, 1, {}).prepare([group(0, 1.0, 0.0)], Clock())
    order = [("begin", "policy"), ("begin", "reference"), ("end", "policy"), ("end", "reference")]
    assert events == order
    assert prepared.metrics["reward_kl"] > 0
