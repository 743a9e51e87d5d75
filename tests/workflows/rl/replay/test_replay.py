"""train-grpo from recorded rollouts: real engines record runs, which real ranks train again."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msrl.checkpoint.source import open_mcore
from msrl.cli.app import app
from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.tracking.rollouts import read_records
from msrl.tracking.run import read_attempts
from one_process import one_process
from support import assert_mentions, mentions
from test_train_grpo import make_inputs, model_after, settings
from training_runs import Command, metrics, write_config
from transformers_logprobs import token_logprobs

pytestmark = pytest.mark.slow
STEPS = 3
RETRY = {
    "name": "retry",
    "options": {"verifier": "acc", "feedback": "no", "max_attempts": 3},
    "max_turn_tokens": 12,
}
OTHER: dict[str, Any] = {
    "advantage": {"estimator": "reinforce_baseline"},
    "policy_loss": "cispo",
}
FIRST = "step_000001.parquet"
NORMED = "--set=algo.advantage.estimator=group_norm"
# One algorithm each for: filtered groups, greedy responses, several updates, turns of episodes.
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {
        "algo": {"kl": {"loss": {"coef": 0.05}}, "mismatch": {"weight": "token"}},
        "filter": {"kind": "all_equal", "refill": True, "max_refills": 1},
        "updates": {"samples_per_update": 8},
    },
    "remax": {"algo": {"advantage": {"estimator": "remax"}}},
    "other": {"algo": OTHER, "steps": 1},
    "episodes": {"algo": {"advantage": {"estimator": "gigpo"}}, "environment": RETRY, "reward": {}},
}


def recorded_settings(inputs: Path, name: str) -> dict[str, Any]:
    """Return the configuration of a run of `RUNS`."""
    sections = dict(RUNS[name])
    train = {
        "steps": sections.pop("steps", STEPS),
        "micro_batch": 2,
        "optimizer": {"lr": 3e-4},
        "updates": sections.pop("updates", {}),
    }
    filter, log = sections.pop("filter", {}), {"trackers": [], "rollouts": "parquet"}
    config = settings(inputs, name, "untied", **{"train": train, "log": log, **sections})
    config["rollout"]["filter"] = filter
    config["rollout"]["max_response_tokens"] = 24
    return config


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with models, data and the recorded runs of `RUNS` in `runs/NAME`."""
    folder = make_inputs(tmp_path_factory.mktemp("replay"), ["untied"])
    with one_process(folder) as workers:
        for name in RUNS:
            file = write_config(folder / f"{name}.yaml", recorded_settings(folder, name))
            (problem,) = workers.call("run", "train-grpo", "-c", str(file))
            assert not problem, problem
    return folder


def replay(inputs: Path, recorded: str, name: str, *arguments: str) -> Path:
    """Train from a recorded run with its own configuration; return the folder of the new run."""
    run = inputs / "runs" / recorded
    words = ["-c", str(run / "config.yaml"), "--from-rollouts", str(run), "--name", name]
    app(["train-grpo", *words, *arguments], standalone_mode=False)
    return inputs / "runs" / name


def weights(run: Path, step: int = STEPS) -> dict[str, np.ndarray]:
    source = open_mcore(run / "checkpoints", iteration=step)
    return {
        name: tensor.numpy()
        for rule in all_rules(source.shape)
        for name, tensor in zip(rule.hf, source.hf_tensors(rule), strict=True)
    }


def are_equal(first: Path, second: Path, step: int = STEPS) -> bool:
    """Return True if two runs have the same weights after a step."""
    before, after = weights(first, step), weights(second, step)
    assert before.keys() == after.keys()
    return all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("name", ["grpo", "episodes"])
def test_recorded_tokens_have_the_log_probabilities_of_the_policy_of_their_step(
    inputs: Path, name: str, tmp_path: Path
) -> None:
    run = inputs / "runs" / name
    for step in (1, 2):
        model = model_after(run, step - 1, inputs / "untied", tmp_path)
        for record in read_records(run / "rollouts" / f"step_{step:06d}.parquet"):
            is_sampled = record.is_sampled[1:]
            expected = token_logprobs(model, record.token_ids, temperature=0.9)[is_sampled]
            assert np.abs(record.behavior_logprobs[1:][is_sampled] - expected).max() < 1e-4
            if not record.is_dropped:
                assert np.array_equal(record.loss_mask, record.is_sampled)
        # The ranks compute the same log-probabilities as the engine.
        assert metrics(run)[step - 1]["train/sampler_logprob_difference"] < 1e-5


@pytest.mark.parametrize(
    "name", ["grpo", pytest.param("remax", marks=pytest.mark.full), "episodes"]
)
def test_a_replay_with_the_same_settings_trains_the_same_weights(inputs: Path, name: str) -> None:
    run, again = inputs / "runs" / name, replay(inputs, name, f"{name}-again")
    for step in range(1, STEPS + 1):
        assert are_equal(run, again, step)
    for before, after in zip(metrics(run), metrics(again), strict=True):
        names = [name for name in before if name.startswith("train/")]
        assert {name: after[name] for name in names} == {name: before[name] for name in names}
        assert after["reward/mean"] == pytest.approx(before["reward/mean"])
    for step in range(1, STEPS + 1):
        file = f"rollouts/step_{step:06d}.parquet"
        for before, after in zip(read_records(run / file), read_records(again / file), strict=True):
            for field in ("token_ids", "behavior_logprobs", "advantages", "loss_mask"):
                assert np.array_equal(getattr(before, field), getattr(after, field)), field
            for field in ("reward", "is_dropped", "episode", "greedy", "messages", "is_right"):
                assert getattr(before, field) == getattr(after, field), field


@pytest.mark.full
def test_the_report_compares_a_replay_with_the_recorded_run(inputs: Path) -> None:
    run, again = inputs / "runs" / "remax", inputs / "runs" / "remax-again"
    if not again.exists():
        replay(inputs, "remax", "remax-again")
    (line,) = [line for line in report_lines(again) if str(run) in line and "differ" in line]
    assert line.partition(": ")[2].startswith("0 of ") or ", 0 of " in line
    other = replay(inputs, "remax", "faster", "--lr", "1e-3")
    (row,) = [line for line in report_lines(other) if line.startswith("| train/lr | 0.0003 |")]
    assert row == "| train/lr | 0.0003 | 0.001 | 1 |"
    app(["report", str(other)], standalone_mode=False)
    assert row in report_lines(other)
    assert not any("recorded run" in line for line in report_lines(run))


def report_lines(run: Path) -> list[str]:
    return (run / "report.md").read_text().splitlines()


def test_another_loss_and_estimator_train_as_they_do_online(inputs: Path) -> None:
    # The first step of both runs samples the same responses from the same weights.
    sets = [f"--set=algo.advantage.estimator={OTHER['advantage']['estimator']}"]
    sets.append(f"--set=algo.policy_loss={OTHER['policy_loss']}")
    again = replay(inputs, "remax", "other-replayed", *sets, "--steps", "1")
    assert are_equal(inputs / "runs" / "other", again, 1)
    assert not are_equal(inputs / "runs" / "remax", again, 1)


@pytest.mark.full
def test_rewards_are_computed_again(inputs: Path) -> None:
    computed = ("--set=rollout.replay.rewards=computed", "--steps", "1")
    again = replay(inputs, "remax", "computed", *computed)
    assert are_equal(inputs / "runs" / "remax", again, 1)


@pytest.mark.full
def test_other_sources_score_recorded_episodes(inputs: Path) -> None:
    computed = ("--set=rollout.replay.rewards=computed", "--steps", "1")
    source = "--set=reward.sources=[{verifier: acc, weight: 2.0}]"
    other = replay(inputs, "episodes", "doubled", *computed, source)
    before = read_records(inputs / "runs" / "episodes" / "rollouts" / "step_000001.parquet")
    for record, new in zip(before, read_records(other / "rollouts" / FIRST), strict=True):
        assert np.array_equal(record.token_ids, new.token_ids)
        assert new.reward == pytest.approx(record.reward + 2 * new.scores["acc"])


@pytest.mark.full
def test_a_shuffled_record_has_the_same_groups_in_another_order(inputs: Path) -> None:
    again = replay(inputs, "remax", "shuffled", "--set=rollout.replay.order=shuffled")
    before, after = (
        [
            [(record.prompt_index, record.reward) for record in read_records(file)]
            for file in sorted((run / "rollouts").iterdir())
        ]
        for run in (inputs / "runs" / "remax", again)
    )
    assert before != after
    assert sorted(chain(*before)) == sorted(chain(*after))


@pytest.mark.full
def test_a_killed_replay_resumes_bit_for_bit(inputs: Path) -> None:
    run, again = inputs / "runs" / "grpo", inputs / "runs" / "killed"
    words = ("-c", str(run / "config.yaml"), "--from-rollouts", str(run), "--name", "killed")
    first = Command("train-grpo", *words, log=inputs / "killed.log")
    first.when(lambda: (again / "checkpoints" / "iter_0000001").exists())
    first.kill()
    app(["train-grpo", *words, "--resume", "auto"], standalone_mode=False)
    assert len(read_attempts(again)) == 2
    assert are_equal(run, again)
    others = ("--from-rollouts", str(inputs / "runs" / "remax"), "--resume", "auto")
    with pytest.raises(MsrlError, match=mentions("rollout.replay.path", "have changed")):
        app(["train-grpo", *words, *others], standalone_mode=False)
    online = ("-c", str(inputs / "grpo.yaml"), "--name", "killed", "--resume", "auto")
    with pytest.raises(MsrlError, match=mentions("rollout.replay.path", "was a record")):
        app(["train-grpo", *online], standalone_mode=False)


@pytest.mark.full
def test_a_replay_starts_no_engine_and_imports_no_vllm(inputs: Path) -> None:
    code = "import sys; from msrl.cli.app import app; app(sys.argv[1:], standalone_mode=False)"
    code += "; assert 'vllm' not in sys.modules; assert not __import__('ray').is_initialized()"
    run = inputs / "runs" / "grpo"
    words = ["-c", str(run / "config.yaml"), "--from-rollouts", str(run), "--name", "light"]
    done = subprocess.run(
        [sys.executable, "-c", code, "train-grpo", *words, "--dry-run"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert_mentions(done.stdout, f"{STEPS * 4} recorded groups")
    assert_mentions(done.stderr, "data.train", "rollout.engine.max_num_seqs", "no effect")
    assert "engine" not in done.stdout.replace("engine.max_num_seqs", "").partition("derived")[2]


@pytest.mark.parametrize(
    ("recorded", "sets", "expected"),
    [
        ("grpo", ["rollout.prompts_per_step=2"], ["prompts_per_step=2", "have 4 groups"]),
        ("grpo", ["rollout.samples_per_prompt=2"], ["samples_per_prompt=2", "have 4 responses"]),
        ("grpo", ["rollout.sampling.temperature=1.0"], ["temperature=1", "sampled with 0.9"]),
        ("grpo", ["rollout.max_response_tokens=8"], ["max_response_tokens=8", "24 tokens"]),
        ("grpo", ["algo.advantage.estimator=remax"], ["remax", "greedy responses"]),
        ("grpo", ["environment.name=single_turn"], ["environment", "no episodes"]),
        ("grpo", ["train.steps=4"], ["train.steps=4", "has 3 steps", "train.epochs"]),
        ("episodes", ["environment=null"], ["environment.name", "episodes"]),
    ],
)
def test_settings_that_do_not_fit_the_record_are_refused(
    inputs: Path, recorded: str, sets: list[str], expected: list[str]
) -> None:
    words = [f"--set={text}" for text in sets]
    with pytest.raises(MsrlError, match=mentions(*expected)):
        replay(inputs, recorded, "refused", *words)
    assert not (inputs / "runs" / "refused").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--set=rollout.replay.order=shuffled"], ["rollout.replay.order", "rollout.replay.path"]),
        (["--from-rollouts", "missing"], ["rollout.replay.path=missing", "no such"]),
    ],
)
def test_a_replay_needs_a_record(inputs: Path, arguments: list[str], expected: list[str]) -> None:
    file = str(inputs / "grpo.yaml")
    with pytest.raises(MsrlError, match=mentions(*expected)):
        app(["train-grpo", "-c", file, "--name", "none", *arguments], standalone_mode=False)


def write_responses(inputs: Path, recorded: str, *, with_logprobs: bool) -> Path:
    """Write the record of a run as responses of another program, without values of msrl."""
    rows = list[dict[str, Any]]()
    for file in sorted((inputs / "runs" / recorded / "rollouts").iterdir()):
        for record in read_records(file):
            sampled = record.is_sampled
            row: dict[str, Any] = {
                "prompt_ids": record.token_ids[~sampled].tolist(),
                "response_ids": record.token_ids[sampled].tolist(),
                "finish_reason": record.finish_reason,
                "reward": record.reward,
                "answer": record.answer,
                "group": f"{record.step}-{record.group}",
            }
            if with_logprobs:
                row["logprobs"] = record.behavior_logprobs[sampled].tolist()
            rows.append(row)
    path = inputs / f"{recorded}-{with_logprobs}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def train_from(inputs: Path, file: Path, name: str, *arguments: str) -> Path:
    """Train from a file of responses with the settings of the run `remax` and another estimator."""
    config = str(inputs / "runs" / "remax" / "config.yaml")
    words = ["-c", config, "--from-rollouts", str(file), "--name", name, NORMED, *arguments]
    app(["train-grpo", *words], standalone_mode=False)
    return inputs / "runs" / name


def test_responses_of_others_train_the_weights_of_the_record(inputs: Path) -> None:
    again = replay(inputs, "remax", "normed", NORMED)
    file = write_responses(inputs, "remax", with_logprobs=True)
    assert are_equal(again, train_from(inputs, file, "others"))


@pytest.mark.full
def test_rewards_of_responses_of_others_are_computed(inputs: Path) -> None:
    again = replay(inputs, "remax", "normed-once", NORMED, "--steps=1")
    file = write_responses(inputs, "remax", with_logprobs=True)
    scored = ("--set=rollout.replay.rewards=computed", "--steps=1")
    assert are_equal(again, train_from(inputs, file, "others-scored", *scored), 1)


def test_missing_log_probabilities_are_those_of_the_initial_weights(inputs: Path) -> None:
    file = write_responses(inputs, "remax", with_logprobs=False)
    weight = "--set=algo.mismatch.weight=token"
    run = train_from(inputs, file, "unknown", weight)
    # In the first step, the initial policy sampled with the log-probabilities of the engine.
    engine = [
        record.behavior_logprobs[record.is_sampled]
        for record in read_records(inputs / "runs" / "remax" / "rollouts" / FIRST)
    ]
    expected = np.concatenate(engine)
    computed = np.load(run / "initial_logprobs.npy")
    assert np.abs(computed[: len(expected)] - expected).max() < 1e-4
    assert metrics(run)[0]["train/sampler_kl"] < 1e-6 < metrics(run)[2]["train/sampler_kl"]
    resumed = train_from(inputs, file, "resumed", weight, "--steps=1")
    train_from(inputs, file, "resumed", weight, "--resume=auto")
    assert are_equal(run, resumed)
    (resumed / "initial_logprobs.npy").unlink()
    with pytest.raises(MsrlError, match=mentions("initial_logprobs.npy", "Restore")):
        train_from(inputs, file, "resumed", weight, "--resume=auto")
