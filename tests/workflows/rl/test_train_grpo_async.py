"""Asynchronous train-grpo with real ranks, engines and rewards.

Every sampled token is scored again under the version that it records.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from msrl.data.dataset import PromptDataset
from msrl.data.order import RowOrder
from support import locate
from test_train_grpo import all_logprobs, make_inputs, model_after, rollouts, settings
from training_runs import (
    Command,
    children,
    make_tmp,
    metrics,
    rows,
    run_training,
    succeed,
    write_config,
)

pytestmark = pytest.mark.slow
STEPS, BATCH = 6, 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("grpo-async"))


def asynchronous(inputs: Path, name: str, options: dict[str, Any], **sections: Any) -> Any:
    """Return a configuration with long responses, so that updates arrive while they run."""
    config = settings(
        inputs,
        name,
        "untied",
        **{
            "algo": {"mismatch": {"weight": "token"}},
            "train": {"steps": STEPS, "micro_batch": 2, "optimizer": {"lr": 2e-3}},
            **sections,
        },
    )
    engine = {"max_num_seqs": 6}  # makes generation about as slow as an update
    config["rollout"] |= {"async": options, "max_response_tokens": 96, "engine": engine}
    return config


def trained_rows(run_dir: Path, num_samples: int = 4) -> list[int]:
    """Return the data rows of all steps, one per group."""
    indices = list[int]()
    for step in range(1, STEPS + 1):
        indices += [row["prompt_index"] for row in rollouts(run_dir, step)][::num_samples]
    return indices


def expected_rows(inputs: Path) -> list[int]:
    order = RowOrder(len(PromptDataset(inputs / "data")), BATCH, seed=5, shuffle=True)
    return order.after(0, STEPS * BATCH).tolist()


def assert_tokens_belong_to_their_versions(
    run_dir: Path, inputs: Path, scratch: Path, staleness: int
) -> int:
    """Score all tokens again; return the number of samples with several versions."""
    models = [model_after(run_dir, step, inputs / "untied", scratch) for step in range(STEPS)]
    num_mixed = 0
    for step in range(STEPS):
        for row in rollouts(run_dir, step + 1):
            versions = np.repeat(*np.array(row["versions"]).T)
            assert len(versions) == len(row["response_ids"])
            assert step - staleness <= versions.min() <= versions.max() <= step
            num_mixed += len(row["versions"]) > 1
            for version in set(versions.tolist()):
                own = versions == version
                expected = all_logprobs(models[version], [row])[own]
                assert np.abs(np.array(row["logprobs"])[own] - expected).max() < 1e-4
    return num_mixed


@pytest.mark.full
def test_every_token_of_an_asynchronous_run_has_the_logprob_of_its_recorded_version(
    inputs: Path, tmp_path: Path
) -> None:
    evaluation = {"every_steps": 2, "prompts": 4, "sampling": {"temperature": 0.9}}
    config = asynchronous(inputs, "s2", {"max_staleness": 2}, eval=evaluation)
    config["rollout"]["engine"]["max_num_seqs"] = 1  # slower than the updates
    run_dir = run_training(inputs, config)
    assert_tokens_belong_to_their_versions(run_dir, inputs, tmp_path, 2)
    reports = metrics(run_dir)
    assert max(report["rollout/staleness_max"] for report in reports) in (1, 2)
    assert trained_rows(run_dir) == expected_rows(inputs)
    for step in (2, 4, 6):
        model = model_after(run_dir, step, inputs / "untied", tmp_path)
        answers = rollouts(run_dir, step, "eval")
        assert {row["policy_version"] for row in answers} == {step}
        sampled = np.concatenate([row["logprobs"] for row in answers])
        assert np.abs(sampled - all_logprobs(model, answers)).max() < 1e-4
    assert {"perf/trainer_idle", "perf/engine_idle", "rollout/buffer_depth"} <= set(reports[0])


@pytest.mark.full
def test_an_asynchronous_run_is_trained_again_from_its_record(inputs: Path) -> None:
    log = {"rollouts": "parquet"}
    run = run_training(inputs, asynchronous(inputs, "recorded", {"max_staleness": 1}, log=log))
    words = ("-c", str(run / "config.yaml"), "--from-rollouts", str(run), "--name", "replayed")
    succeed("train-grpo", *words, log=inputs / "replayed.log")
    for step in range(1, STEPS + 1):
        before, after = (
            model_after(inputs / "runs" / name, step, inputs / "untied", inputs)
            for name in ("recorded", "replayed")
        )
        pairs = zip(before.parameters(), after.parameters(), strict=True)
        assert all(torch.equal(first, second) for first, second in pairs)
    assert metrics(run)[-1]["train/loss"] == metrics(inputs / "runs" / "replayed")[-1]["train/loss"]


@pytest.mark.full
def test_partial_rollouts_continue_in_the_next_step(inputs: Path, tmp_path: Path) -> None:
    options = {"max_staleness": 2, "partial": True}
    config = asynchronous(inputs, "partial", options)
    run_dir = run_training(inputs, config)
    assert assert_tokens_belong_to_their_versions(run_dir, inputs, tmp_path, 2) > 0
    assert trained_rows(run_dir) == expected_rows(inputs)


@pytest.mark.full
def test_dropped_prompts_are_issued_again_and_trained_once(inputs: Path, tmp_path: Path) -> None:
    options = {"max_staleness": 1, "on_stale": "drop"}
    run_dir = run_training(inputs, asynchronous(inputs, "drop", options))
    assert_tokens_belong_to_their_versions(run_dir, inputs, tmp_path, 1)
    assert Counter(trained_rows(run_dir)) == Counter(expected_rows(inputs))


@pytest.mark.full
def test_filtered_groups_are_replaced_and_have_greedy_rewards(inputs: Path, tmp_path: Path) -> None:
    algo = {"mismatch": {"weight": "token"}, "advantage": {"estimator": "remax"}}
    config = asynchronous(inputs, "refill", {"max_staleness": 1}, algo=algo)
    config["rollout"]["filter"] = {"kind": "all_equal", "refill": True}
    run_dir = run_training(inputs, config)
    assert_tokens_belong_to_their_versions(run_dir, inputs, tmp_path, 1)
    num_replaced = 0
    for step, report in enumerate(metrics(run_dir), 1):
        rows_of_step = rollouts(run_dir, step)
        groups = [rows_of_step[n : n + 4] for n in range(0, len(rows_of_step), 4)]
        assert all("greedy_reward" in row for row in rows_of_step)
        assert len(groups) == report["rollout/prompts"]
        differ = [len({row["reward"] for row in group}) > 1 for group in groups]
        assert sum(differ[:BATCH]) == BATCH - report["rollout/missing"]
        assert not any(differ[BATCH:])
        num_replaced += len(groups) - BATCH
    assert num_replaced > 0


@pytest.mark.full
def test_a_killed_run_resumes_and_trains_each_prompt_once(inputs: Path, tmp_path: Path) -> None:
    config = asynchronous(
        inputs,
        "killed",
        {"max_staleness": 2},
        checkpoint={"every_steps": 1, "resume": "auto"},
        algo={"old_logprobs": "behavior"},
    )
    file, run_dir = write_config(inputs / "killed.yaml", config), inputs / "runs" / "killed"
    command = Command("train-grpo", "-c", str(file), log=inputs / "killed-1.log", tmp=make_tmp())
    command.when(lambda: run_dir.exists() and len(rows(run_dir)) >= 3)
    command.signal_group(signal.SIGKILL)
    command.wait()
    run_training(inputs, config)
    assert_tokens_belong_to_their_versions(run_dir, inputs, tmp_path, 2)
    assert trained_rows(run_dir) == expected_rows(inputs)


AT_BOUND_ZERO = """
from msrl.config.sections.rollout import AsyncConfig
AsyncConfig.is_on = property(lambda self: True)
from msrl.__main__ import main
main()
"""


@pytest.mark.full
def test_the_asynchronous_loop_at_bound_zero_equals_the_synchronous_loop(inputs: Path) -> None:
    """Run the loop of asynchronous training with a bound of 0, which users cannot select."""
    algo, evaluation = {"mismatch": {"weight": "token"}}, {"every_steps": 2}
    for name in ("sync", "bound-0"):
        config = settings(inputs, name, "untied", algo=algo, eval=evaluation)
        config["data"]["curriculum"] = {"sampler": "replay"}
        write_config(inputs / f"{name}.yaml", config)
    run_training(inputs, yaml.safe_load((inputs / "sync.yaml").read_text()))
    command = [sys.executable, "-c", AT_BOUND_ZERO, "train-grpo", "-c"]
    with (inputs / "bound-0.log").open("w") as log:
        subprocess.run(
            [*command, str(inputs / "bound-0.yaml")],
            check=True,
            stdout=log,
            stderr=log,
            timeout=600,
        )
    synchronous, asynchronous_run = inputs / "runs" / "sync", inputs / "runs" / "bound-0"
    for folder, steps in (("rollouts", range(1, 5)), ("eval", (2, 4))):
        for step in steps:
            expected = rollouts(synchronous, step, folder)
            actual = rollouts(asynchronous_run, step, folder)
            for row in actual:
                row.pop("versions", None)
            assert actual == expected, (folder, step)
    # An asynchronous loss has tokens of several versions, so its mean is not the gap of one.
    excluded = ("perf/", "rollout/tokens_per_s", "rollout/logprob_gap")
    for expected_metrics, actual_metrics in zip(
        metrics(synchronous), metrics(asynchronous_run), strict=True
    ):
        for name, value in expected_metrics.items():
            if not name.startswith(excluded):
                assert actual_metrics[name] == value, name
    assert max(report["rollout/staleness_max"] for report in metrics(asynchronous_run)) == 0


HANGS = {"cluster": {"platform": "cpu", "rpc_timeout_s": 60.0}}


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_the_prompts_of_a_lost_engine_are_sampled_again_without_a_rewind(
    inputs: Path, tmp_path: Path, number: signal.Signals
) -> None:
    name = f"engine-{number.name}"
    config = asynchronous(inputs, name, {"max_staleness": 2}, **HANGS)
    file, run_dir = write_config(inputs / f"{name}.yaml", config), inputs / "runs" / name
    command = Command("train-grpo", "-c", str(file), log=inputs / f"{name}.log", tmp=make_tmp())
    command.when(lambda: run_dir.exists() and len(rows(run_dir)) >= 2)
    processes = children(command.process.pid)
    (engine,) = (pid for pid, line in processes.items() if "RolloutActor" in line)
    os.kill(engine, number)
    assert command.wait() == 0, command.output()
    assert "Restarting the lost engine" in command.output()
    assert "Continuing from" not in command.output(), "the training was not repeated"
    assert_tokens_belong_to_their_versions(run_dir, inputs, tmp_path, 2)
    assert trained_rows(run_dir) == expected_rows(inputs)


RECEIVING = {"role": "rollout", "worker": 0, "method": "update_weights", "call": 2}
KILLS = {
    "engine": RECEIVING,
    "hanging engine": {**RECEIVING, "signal": "SIGSTOP"},
    "rank": {"role": "actor", "worker": 0, "method": "update", "call": 3},
}


@pytest.mark.full
@pytest.mark.parametrize("victim", KILLS)
def test_only_a_lost_rank_repeats_steps_and_each_prompt_is_trained_once(
    inputs: Path, tmp_path: Path, victim: str
) -> None:
    """Kill or stop an engine while it receives weights, or kill a rank in an update."""
    name = f"killed-{victim.replace(' ', '-')}"
    config = asynchronous(inputs, name, {"max_staleness": 2}, **HANGS)
    config["rollout"]["weights"] = {"verify": "every"}
    file, run_dir = write_config(inputs / f"{name}.yaml", config), inputs / "runs" / name
    program = (str(locate("killing_driver.py")), json.dumps([KILLS[victim]]))
    log = inputs / f"{name}.log"
    command = Command("train-grpo", "-c", str(file), log=log, tmp=make_tmp(), program=program)
    assert command.wait() == 0, command.output()
    restarted = "the training ranks" if victim == "rank" else "the lost engine"
    assert command.output().count(f"Restarting {restarted}") == 1, command.output()
    assert ("Continuing from" in command.output()) == (victim == "rank"), command.output()
    assert_tokens_belong_to_their_versions(run_dir, inputs, tmp_path, 2)
    assert trained_rows(run_dir) == expected_rows(inputs)
