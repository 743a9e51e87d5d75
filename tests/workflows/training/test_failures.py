"""Workers that die or hang in a run: the run restarts them and ends with the same numbers.

Real engines, ranks and Ray; the driver of `killing_driver.py` kills its own workers.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from msrl.tracking.log_file import SAVED
from msrl.trainer.checkpointing.resume import SavedTraining
from support import assert_mentions, locate
from test_train_grpo import SAMPLED, make_inputs, settings
from training_runs import (
    LIMIT_S,
    Command,
    children,
    files_in,
    make_tmp,
    metrics,
    rows,
    run_training,
    shared_memory,
    still_running,
    succeed,
    wait_for_end,
    write_config,
    write_rows,
)

pytestmark = [pytest.mark.slow, pytest.mark.full]
STEPS = 4
DRIVER = (str(locate("killing_driver.py")),)
Kill = dict[str, Any]


def kill(role: str, method: str, call: int, worker: int = 0, **options: Any) -> Kill:
    return {"role": role, "method": method, "call": call, "worker": worker, **options}


def config(inputs: Path, name: str, **sections: Any) -> dict[str, Any]:
    """Return a run with two ranks, two engines, refills, evaluations and running moments."""
    cluster = {"platform": "cpu", "devices_per_node": 2, "rpc_timeout_s": 180.0}
    return settings(
        inputs,
        name,
        "tied",
        cluster={**cluster, **sections.get("cluster", {})},
        rollout={
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "max_prompt_tokens": 160,
            "max_response_tokens": 12,
            "sampling": {"temperature": 0.9},
            "engine": {"max_num_seqs": 8, "dp": 2},
            "filter": {"kind": "all_equal", "source": "acc", "refill": True, "max_refills": 1},
        },
        reward={"sources": [{"verifier": "acc"}], "norm": {"center": "running"}},
        train={"steps": STEPS, "micro_batch": 4, "optimizer": {"lr": 5e-4, "schedule": "cosine"}},
        eval=SAMPLED,
        checkpoint={"every_steps": 2, "keep_best": True, **sections.get("checkpoint", {})},
    )


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("failures"))


@pytest.fixture(scope="module")
def undisturbed(inputs: Path) -> Path:
    return run_training(inputs, config(inputs, "undisturbed"))


def run_with_kills(
    inputs: Path, name: str, kills: list[Kill], command: str = "train-grpo", **sections: Any
) -> tuple[Path, Command, list[str]]:
    """Run the configuration of a name, and return its folder, command and remaining files."""
    file = inputs / f"{name}.yaml"
    if not file.exists():
        write_config(file, config(inputs, name, **sections))
    tmp = make_tmp()
    program = (*DRIVER, json.dumps(kills))
    run = Command(command, "-c", str(file), log=inputs / f"{name}.log", tmp=tmp, program=program)
    assert run.wait() in (0, 1), run.output()
    return inputs / "runs" / name, run, files_in(tmp)


def assert_equal(run: Path, undisturbed: Path) -> None:
    """Compare metrics, rollouts, evaluations, weights, optimizer and random states."""
    assert [row["step"] for row in rows(run)] == [row["step"] for row in rows(undisturbed)]
    assert metrics(run) == metrics(undisturbed)
    for folder in ("rollouts", "eval"):
        names = sorted(path.name for path in (undisturbed / folder).glob("*"))
        assert names == sorted(path.name for path in (run / folder).glob("*"))
        for name in names:
            assert (run / folder / name).read_text() == (undisturbed / folder / name).read_text()
    states = [SavedTraining(path / "checkpoints", STEPS).state() for path in (run, undisturbed)]
    assert states[0] == states[1]


def num_kills(command: Command) -> int:
    return len(re.findall(r"^killing ", command.output(), re.M))


def test_engines_that_die_are_restarted_and_the_run_equals_the_undisturbed_one(
    inputs: Path, undisturbed: Path
):
    kills = [
        kill("rollout", "generate", 2, after_s=0.05),  # in the second batch of an evaluation
        kill("rollout", "generate", 6, 1, after_s=0.1),
        kill("rollout", "load_weights", 5),
        kill("rollout", "onload", 12, 1),
    ]
    run, command, left = run_with_kills(inputs, "engines", kills)
    assert command.process.returncode == 0, command.output()
    assert num_kills(command) == len(kills)
    # Two kills may hit the same engine before it is restarted.
    assert 1 <= command.output().count("Restarting the lost engine") <= len(kills), command.output()
    assert re.search(r"^rollout engine 0.*died.*Restarting the lost engine", command.output(), re.M)
    assert_equal(run, undisturbed)
    assert left == []


def test_ranks_that_die_continue_from_the_newest_checkpoint_and_the_curve_is_undisturbed(
    inputs: Path, undisturbed: Path
):
    kills = [
        kill("actor", "update", 1),  # no checkpoint yet
        kill("actor", "send_weights", 4, 1),
        kill("actor", "save", 2),
    ]
    run, command, left = run_with_kills(inputs, "ranks", kills)
    assert command.process.returncode == 0, command.output()
    assert num_kills(command) == len(kills)
    restarts = command.output().count("Restarting the training ranks")
    assert 1 <= restarts <= len(kills), command.output()
    assert "initial weights" in command.output() and "checkpoint of step 2" in command.output()
    assert_equal(run, undisturbed)
    assert left == []


def kill_after_a_save(command: Command, pattern: str) -> dict[int, str]:
    """Kill a process after the save of step 2; return the command lines of all processes."""
    command.when(lambda: SAVED.format(step=2, folder="") in command.output())
    started = children(command.process.pid)
    if pattern == "driver":
        os.kill(command.process.pid, signal.SIGKILL)
    else:
        os.kill(next(pid for pid, line in started.items() if pattern in line), signal.SIGKILL)
    return started


@pytest.mark.parametrize("process", ["gcs_server", "raylet", "RuntimeEnvAgent", "DashboardAgent"])
def test_a_run_that_loses_ray_names_the_command_that_resumes_it_and_leaves_nothing(
    inputs: Path, undisturbed: Path, process: str
):
    file, tmp = write_config(inputs / f"{process}.yaml", config(inputs, process)), make_tmp()
    arguments = ("train-grpo", "-c", str(file))
    command = Command(*arguments, log=inputs / f"{process}.log", tmp=tmp)
    pattern = f"ray::{process}" if process.endswith("Agent") else f"/{process} --"
    started = kill_after_a_save(command, pattern)
    mapped = shared_memory(started)
    assert command.wait() == 1
    assert_mentions(command.output(), "checkpoint of step 2", "--resume auto", "log.txt")
    assert "Traceback" not in command.output() and "state-dump" not in command.output()
    assert not still_running(started) and not [path for path in mapped if path.exists()]
    assert files_in(tmp) == []
    succeed(*arguments, "--resume", "auto", log=inputs / f"{process}-2.log")
    assert_equal(inputs / "runs" / process, undisturbed)


@pytest.mark.parametrize(
    "process",
    [
        "msrl.rewards.worker",
        "ray/_private/log_monitor.py",
        "ray/autoscaler/_private/monitor.py",
        "ray/dashboard/dashboard.py",
    ],
)
def test_a_run_goes_on_without_a_reward_worker_or_a_monitor_of_ray(
    inputs: Path, undisturbed: Path, process: str
):
    name = Path(process).stem
    file, tmp = write_config(inputs / f"{name}.yaml", config(inputs, name)), make_tmp()
    command = Command("train-grpo", "-c", str(file), log=inputs / f"{name}.log", tmp=tmp)
    kill_after_a_save(command, process)
    assert command.wait() == 0, command.output()
    assert_equal(inputs / "runs" / name, undisturbed)
    assert files_in(tmp) == []


def test_a_killed_command_leaves_no_process_and_the_next_one_removes_its_files(
    inputs: Path, undisturbed: Path
):
    file, tmp = write_config(inputs / "driver.yaml", config(inputs, "driver")), make_tmp()
    arguments = ("train-grpo", "-c", str(file))
    command = Command(*arguments, log=inputs / "driver.log", tmp=tmp)
    started = kill_after_a_save(command, "driver")
    assert command.wait() == -signal.SIGKILL
    wait_for_end(started, limit_s=90.0)  # Ray's agents look for their head for a minute
    assert_mentions(command.output(), "killed", "--resume auto", "log.txt")
    succeed(*arguments, "--resume", "auto", log=inputs / "driver-2.log", tmp=tmp)
    assert_equal(inputs / "runs" / "driver", undisturbed)
    assert files_in(tmp) == []


def long_run(inputs: Path, name: str) -> dict[str, Any]:
    """Return a run of two ranks and one engine on two devices that does not end by itself."""
    train = {"steps": 10_000, "micro_batch": 4, "optimizer": {"lr": 1e-4}}
    cluster = {"platform": "cpu", "devices_per_node": 2, "rpc_timeout_s": 180.0}
    return settings(inputs, name, "tied", cluster=cluster, train=train, checkpoint={})


def test_sigterm_to_every_process_of_a_job_saves_and_ends_the_run(inputs: Path):
    """Slurm and systemd signal all processes of a job, Ray's included."""
    file, tmp = write_config(inputs / "job.yaml", long_run(inputs, "job")), make_tmp()
    run = inputs / "runs" / "job"
    command = Command("train-grpo", "-c", str(file), log=inputs / "job.log", tmp=tmp)
    command.when(lambda: len(rows(run)) >= 2)
    started = children(command.process.pid)
    mapped = shared_memory(started)
    for pid in (*started, command.process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert command.wait() == 130, command.output()
    assert_mentions(command.output(), f"checkpoint of step {len(rows(run))}")
    assert "Restarting" not in command.output()
    assert not still_running(started)
    assert files_in(tmp) == []
    assert not [path for path in mapped if path.exists()]


def test_a_run_that_is_the_first_process_of_a_container_saves_on_sigterm(inputs: Path):
    """Kubernetes and docker stop signal the first process only."""
    probe = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*probe, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces on this machine")
    file = write_config(inputs / "container.yaml", long_run(inputs, "container"))
    run = inputs / "runs" / "container"
    command = [*probe, "--kill-child", sys.executable, "-m", "msrl", "train-grpo", "-c", str(file)]
    with (inputs / "container.log").open("w") as log:
        container = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    deadline = time.monotonic() + LIMIT_S
    while len(rows(run)) < 2:
        assert container.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    (first,) = psutil.Process(container.pid).children()
    started = children(container.pid)
    first.terminate()
    assert container.wait(LIMIT_S) == 130
    output = (inputs / "container.log").read_text()
    assert_mentions(output, f"checkpoint of step {len(rows(run))}")
    assert not still_running(started)


def test_an_engine_and_a_rank_that_hang_are_restarted(inputs: Path, undisturbed: Path):
    kills = [
        kill("rollout", "generate", 4, 1, signal="SIGSTOP", after_s=0.02),
        kill("actor", "update", 3, 1, signal="SIGSTOP"),
    ]
    cluster = {"rpc_timeout_s": 60.0}
    run, command, left = run_with_kills(inputs, "hanging", kills, cluster=cluster)
    assert command.process.returncode == 0, command.output()
    assert num_kills(command) == len(kills)
    assert command.output().count("rpc_timeout_s") == len(kills), command.output()
    assert_equal(run, undisturbed)
    assert left == []


@pytest.fixture(scope="module")
def sft(inputs: Path) -> dict[str, Any]:
    """Return the configuration of an SFT run with two local ranks."""
    from msrl.cli import app

    examples = [
        {"instruction": f"{i}+{i}=", "input": "", "output": f"{2 * i}" * (1 + i % 7)}
        for i in range(24)
    ]
    source = ["--input", str(write_rows(inputs / "sft.jsonl", examples))]
    source += ["--tokenizer", str(inputs / "tokenizer"), "--output-prefix", str(inputs / "sft")]
    command = ["preprocess", *source, "--handler", "alpaca", "--template", "qwen"]
    app.app(command, standalone_mode=False)
    return {
        "run": {"dir": str(inputs / "runs"), "seed": 5},
        "model": {"path": str(inputs / "untied"), "dtype": "float32"},
        "data": {"train": str(inputs / "sft"), "eval_fraction": 0.25},
        "cluster": {"platform": "cpu", "devices_per_node": 2, "rpc_timeout_s": 120.0},
        "train": {"steps": 6, "global_batch": 4, "micro_batch": 2, "optimizer": {"lr": 1e-3}},
        "eval": {"every_steps": 2},
        "checkpoint": {"every_steps": 2},
    }


def test_local_ranks_that_die_continue_from_the_newest_checkpoint(
    inputs: Path, sft: dict[str, Any]
):
    kills = [
        kill("actor", "update", 2),
        kill("actor", "update", 8, 1),  # the evaluation after step 4
        kill("actor", "save", 3, 1),
    ]
    for name in ("sft-undisturbed", "sft-killed"):
        named = {**sft, "run": {**sft["run"], "name": name}}
        write_config(inputs / f"{name}.yaml", named)
    undisturbed, _, _ = run_with_kills(inputs, "sft-undisturbed", [], "train-sft")
    run, command, left = run_with_kills(inputs, "sft-killed", kills, "train-sft")
    assert command.process.returncode == 0, command.output()
    assert num_kills(command) == len(kills)
    assert 1 <= command.output().count("Restarting the training ranks") <= len(kills)
    assert [row["step"] for row in rows(run)] == list(range(1, 7))
    assert metrics(run) == metrics(undisturbed)
    states = [SavedTraining(path / "checkpoints", 6).state() for path in (run, undisturbed)]
    assert states[0] == states[1]
    assert left == []
