"""Soak test: random processes of a run are killed again and again; the run completes regardless."""

from __future__ import annotations

import os
import random
import re
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from test_train_grpo import make_inputs, rollouts, settings
from training_runs import Command, children, files_in, make_tmp, rows, wait_for_end, write_config

pytestmark = [pytest.mark.slow, pytest.mark.full]
TITLES = {"engine": "ray::RolloutActor", "rank": "ray::TrainActor"}


@dataclass(frozen=True)
class Soak:
    """Run with random kills one to three steps apart. Five steps are a pass over 20 prompts."""

    name: str
    num_kills: int
    num_steps: int
    max_staleness: int

    def config(self, inputs: Path) -> dict[str, Any]:
        """Return a run with two ranks and one engine that saves every step."""
        config = settings(
            inputs,
            self.name,
            "tied",
            cluster={"platform": "cpu", "devices_per_node": 2, "rpc_timeout_s": 180.0},
            algo={"mismatch": {"weight": "token"}},
            train={"steps": self.num_steps, "micro_batch": 4, "optimizer": {"lr": 1e-4}},
            checkpoint={"every_steps": 1, "keep": 2},
        )
        if self.max_staleness:
            config["rollout"]["async"] = {"max_staleness": self.max_staleness}
        return config


KINDS = ["engine", "engine", "rank", "rank", "driver"]
SOAKS = [Soak("soak", 20, 100, 0), Soak("soak-async", 10, 40, 2)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_inputs(tmp_path_factory.mktemp("soak"))


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


@pytest.mark.parametrize("soak", SOAKS, ids=lambda soak: soak.name)
def test_a_run_survives_random_kills_without_losing_or_repeating_a_prompt(inputs: Path, soak: Soak):
    file = write_config(inputs / f"{soak.name}.yaml", soak.config(inputs))
    run, logs = inputs / "runs" / soak.name, [inputs / f"{soak.name}-0.log"]
    tmp, choose, kills, last = make_tmp(), random.Random(7), Counter[str](), 0
    started = dict[int, str]()
    arguments = ("train-grpo", "-c", str(file))
    command = Command(*arguments, log=logs[0], tmp=tmp)
    kinds = KINDS * (soak.num_kills // len(KINDS))
    choose.shuffle(kinds)
    while kinds:
        goal = last + choose.randint(1, 3)
        command.when(lambda goal=goal: len(rows(run)) >= goal)
        last, kind = len(rows(run)), kinds[-1]
        if kind == "driver":
            started |= kill_driver(command)
            logs.append(inputs / f"{soak.name}-{kills.total()}.log")
            command = Command(*arguments, "--resume", "auto", log=logs[-1], tmp=tmp)
        elif not kill_worker(command, kind, choose):
            continue
        kills[kinds.pop()] += 1
    assert command.wait() == 0, command.output()
    assert [row["step"] for row in rows(run)] == list(range(1, soak.num_steps + 1))
    assert_every_prompt_is_used_equally(run, soak.num_steps)
    wait_for_end(started, limit_s=90.0)  # Ray's agents look for their head for a minute
    assert files_in(tmp) == []
    output = "".join(path.read_text(errors="replace") for path in logs)
    restarts = re.findall(r"Restarting the \w+ \w+", output)
    # An asynchronous run may complete a step before it notices the loss of its engine.
    noticed = ("rank",) if soak.max_staleness else ("engine", "rank")
    assert len(restarts) >= sum(kills[kind] for kind in noticed)


def assert_every_prompt_is_used_equally(run: Path, num_steps: int) -> None:
    """Check that each pass over the data uses each prompt once."""
    steps = [{row["prompt_index"] for row in rollouts(run, step + 1)} for step in range(num_steps)]
    counts = Counter(index for indices in steps for index in indices)
    assert all(len(indices) == 4 for indices in steps)
    assert len(counts) == 20 and set(counts.values()) == {num_steps * 4 // 20}
    for start in range(0, num_steps, 5):
        assert len(set().union(*steps[start : start + 5])) == 20
