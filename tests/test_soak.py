"""Soak test: random processes of a run are killed again and again; the run completes regardless."""

from __future__ import annotations

import os
import random
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from test_train_grpo import make_inputs, rollouts, settings
from training_runs import Command, children, files_in, make_tmp, rows, wait_for_end, write_config

pytestmark = [pytest.mark.slow, pytest.mark.full]
NUM_KILLS = 20
STEPS = 100  # 20 passes over 20 prompts; the kills come one to three steps apart
TITLES = {"engine": "ray::RolloutActor", "rank": "ray::TrainActor"}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("soak"))


def config(inputs: Path) -> dict[str, Any]:
    """Return a run with two ranks and one engine that saves every step."""
    return settings(
        inputs,
        "soak",
        "tied",
        cluster={"platform": "cpu", "devices_per_node": 2, "rpc_timeout_s": 180.0},
        train={"steps": STEPS, "micro_batch": 4, "optimizer": {"lr": 1e-4}},
        checkpoint={"every_steps": 1, "keep": 2},
    )


def kill_worker(command: Command, kind: str, choose: random.Random) -> bool:
    """Kill a worker of this kind; return False if none runs at the moment."""
    processes = children(command.process.pid)
    victims = [pid for pid, line in processes.items() if line.startswith(TITLES[kind])]
    if not victims:
        return False
    psutil.Process(choose.choice(victims)).kill()
    return True


def kill_driver(command: Command) -> dict[int, str]:
    """Kill the command, wait for the end of its workers, and return its processes."""
    processes = children(command.process.pid)
    os.kill(command.process.pid, signal.SIGKILL)
    command.process.wait()
    workers = [pid for pid, line in processes.items() if line.startswith(tuple(TITLES.values()))]
    wait_for_end(workers, limit_s=60.0)
    return processes


def test_a_run_survives_twenty_random_kills_without_losing_or_repeating_a_prompt(inputs: Path):
    file, run = write_config(inputs / "soak.yaml", config(inputs)), inputs / "runs" / "soak"
    tmp, choose, kills, last = make_tmp(), random.Random(7), Counter[str](), 0
    started = dict[int, str]()
    arguments = ("train-grpo", "-c", str(file))
    command = Command(*arguments, log=inputs / "soak-0.log", tmp=tmp)
    while kills.total() < NUM_KILLS:
        goal = last + choose.randint(1, 3)
        command.when(lambda goal=goal: len(rows(run)) >= goal)
        last, kind = len(rows(run)), choose.choice(("engine", "engine", "rank", "rank", "driver"))
        if kind == "driver":
            started |= kill_driver(command)
            log = inputs / f"soak-{kills.total()}.log"
            command = Command(*arguments, "--resume", "auto", log=log, tmp=tmp)
        elif not kill_worker(command, kind, choose):
            continue
        kills[kind] += 1
    assert command.wait() == 0, command.output()
    assert min(kills[kind] for kind in ("engine", "rank", "driver")) > 0
    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    assert_every_prompt_is_used_equally(run)
    wait_for_end(started, limit_s=90.0)  # Ray's agents look for their head for a minute
    assert files_in(tmp) == []
    restarts = re.findall(r"Restarting the \w+ \w+", "".join(_logs(inputs)))
    assert len(restarts) >= kills["engine"] + kills["rank"]


def assert_every_prompt_is_used_equally(run: Path) -> None:
    """Check that each pass over the data uses each prompt once."""
    steps = [{row["prompt_index"] for row in rollouts(run, step)} for step in range(1, STEPS + 1)]
    counts = Counter(index for indices in steps for index in indices)
    assert all(len(indices) == 4 for indices in steps)
    assert len(counts) == 20 and set(counts.values()) == {STEPS * 4 // 20}
    for start in range(0, STEPS, 5):
        assert len(set().union(*steps[start : start + 5])) == 20


def _logs(inputs: Path) -> list[str]:
    return [path.read_text(errors="replace") for path in sorted(inputs.glob("soak-*.log"))]
