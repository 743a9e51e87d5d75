"""Clusters of two and three simulated machines: trainings across them, and a lost machine.

The tests of three machines are the last ones: the third machine joins the cluster of the others.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from machines import Machines, why_impossible
from msrl import platforms
from msrl.trainer.checkpointing.resume import SavedTraining
from support import ROOT, assert_mentions, python_path, wait_until
from test_train_grpo import make_inputs, rollouts, settings
from training_runs import LIMIT_S, metrics, rows, run_training, write_config

pytestmark = [pytest.mark.slow, pytest.mark.full]
STEPS = 4
PORTS = "20000-20199"
HEAD = f"{Machines.address(1)}:6344"


class Site:
    """Machines with a shared folder, in which all commands run."""

    def __init__(self, machines: Machines, folder: Path) -> None:
        self.machines, self.folder = machines, folder
        excluded = [
            *("TMPDIR", "RAY_TMPDIR", "RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"),
            *platforms.get("cpu").network_environment("lo"),  # of ranks in the process of the tests
        ]
        self._env = {
            **{name: value for name, value in os.environ.items() if name not in excluded},
            "MSRL_STATE_DIR": str(folder / "state"),
            "MPLCONFIGDIR": str(folder),
            "PYTHONPATH": python_path(),
        }

    def start(self, machine: int, name: str, *arguments: str) -> Any:
        """Start `msrl ARGUMENTS` on a machine, with its output in `NAME.log`."""
        with (self.folder / f"{name}.log").open("w") as log:
            command = (sys.executable, "-m", "msrl", *arguments)
            return self.machines.popen(
                machine, *command, env=self._env, cwd=self.folder, output=log
            )

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def succeed(self, machine: int, name: str, *arguments: str) -> str:
        code = self.start(machine, name, *arguments).wait(LIMIT_S)
        assert code == 0, self.output(name)
        return self.output(name)

    def join(self, name: str, machine: int = 2) -> None:
        ports = ("--set", f"cluster.ports={PORTS}")
        self.succeed(machine, name, "cluster", "join", HEAD, "--devices", "1", *ports)

    def wait_for(self, text: str, name: str, command: Any) -> None:
        """Wait until the output of a running command has this text."""
        self.when(lambda: text in self.output(name), name, command)

    def when(self, condition: Callable[[], bool], name: str, command: Any) -> None:
        """Wait until the condition holds while a command runs."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert command.poll() is None and time.monotonic() < deadline, self.output(name)
            time.sleep(0.05)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two machines with a cluster of one device each."""
    problem = why_impossible()
    if problem is not None:
        pytest.skip(problem)
    folder = make_inputs(tmp_path_factory.mktemp("site"))
    with Machines([folder, ROOT]) as machines:
        machines.start(1)
        machines.start(2)
        site = Site(machines, folder)
        up = ("cluster", "up", "--host", Machines.address(1), "--devices", "1", "--wait", "2")
        waits = ("--set", f"cluster.ports={PORTS}", "--set", "cluster.wait_for_nodes_s=300")
        head = site.start(1, "up", *up, *waits)
        site.wait_for("msrl cluster join", "up", head)
        site.join("join")
        assert head.wait(LIMIT_S) == 0, site.output("up")
        assert_mentions(site.output("up"), "1 of 2", "All 2 machines")
        yield site


def config(
    site: Site, name: str, *, is_local: bool, machines: int = 2, **sections: Any
) -> dict[str, Any]:
    """Return a GRPO run with a rank and an engine per machine, on one machine if `is_local`."""
    cluster: dict[str, Any] = {
        "platform": "cpu",
        "rpc_timeout_s": 180.0,
        "devices_per_node": machines,
        "env": {"OMP_NUM_THREADS": "1"},
    }
    if not is_local:
        cluster |= {"address": HEAD, "nodes": machines, "devices_per_node": 1}
        cluster |= {"ports": PORTS, "wait_for_nodes_s": 300.0}
    return settings(
        site.folder,
        name,
        "tied",
        cluster=cluster,
        rollout={
            "prompts_per_step": 2 * machines,
            "samples_per_prompt": 4,
            "max_prompt_tokens": 160,
            "max_response_tokens": 12,
            "sampling": {"temperature": 0.9},
            "engine": {"max_num_seqs": 8, "dp": machines},
        },
        train={
            "steps": STEPS,
            "micro_batch": 4,
            "optimizer": {"lr": 5e-4},
            "parallel": {"tp": 2 if machines == 2 else 1},
        },
        checkpoint={"every_steps": 1},
        **sections,
    )


@pytest.fixture(scope="module")
def local_run(site: Site) -> Path:
    """Folder of a run on one machine."""
    return run_training(site.folder, config(site, "local", is_local=True))


def assert_equal(run: Path, expected: Path) -> None:
    assert metrics(run) == metrics(expected) and len(rows(run)) == STEPS
    for step in range(1, STEPS + 1):
        assert rollouts(run, step) == rollouts(expected, step)
    states = [SavedTraining(path / "checkpoints", STEPS).state() for path in (run, expected)]
    assert states[0] == states[1]


def assert_sft_equals_the_run_on_one_machine(
    site: Site, name: str, train: dict[str, Any], machines: int
) -> None:
    """Run SFT on several machines and on one; compare the metrics of all steps."""
    examples = "".join(
        f'{{"instruction": "{i}+{i}=", "input": "", "output": "{2 * i}"}}\n' for i in range(24)
    )
    (site.folder / f"{name}.jsonl").write_text(examples)
    source = ["--input", f"{name}.jsonl", "--tokenizer", "tokenizer", "--output-prefix", name]
    source += ["--handler", "alpaca", "--template", "qwen"]
    site.succeed(1, f"{name}-data", "preprocess", *source)
    runs = {name: False, f"{name}-local": True}
    for run, is_local in runs.items():
        sections = config(site, run, is_local=is_local, machines=machines)
        sections = {key: sections[key] for key in ("run", "model", "cluster", "checkpoint")}
        file = write_config(
            site.folder / f"{run}.yaml", {**sections, "train": train, "data": {"train": name}}
        )
        site.succeed(1, run, "train-sft", "-c", str(file))
    spread, local = (site.folder / "runs" / run for run in runs)
    assert metrics(spread) == metrics(local) and len(rows(spread)) == STEPS


def test_sft_across_machines_trains_all_steps(site: Site):
    train = {"steps": STEPS, "global_batch": 8, "micro_batch": 4, "parallel": {"tp": 2}}
    assert_sft_equals_the_run_on_one_machine(site, "sft", train, machines=2)


def test_grpo_across_machines_equals_the_run_on_one(site: Site, local_run: Path):
    file = write_config(site.folder / "spread.yaml", config(site, "spread", is_local=False))
    site.succeed(1, "spread", "train-grpo", "-c", str(file))
    assert_equal(site.folder / "runs" / "spread", local_run)


def test_a_run_waits_for_a_lost_machine_and_continues_when_it_has_rejoined(
    site: Site, local_run: Path
):
    command, run = start_two_steps(site, config(site, "lost", is_local=False))
    lose_and_rejoin(site, 2, "lost", command)
    assert_equal(run, local_run)


def test_a_run_goes_on_after_a_machine_was_cut_off_the_network_for_a_minute(
    site: Site, local_run: Path
):
    command, run = start_two_steps(site, config(site, "cut", is_local=False))
    site.machines.unplug(2)
    time.sleep(60)
    site.machines.plug(2)
    wait_until(lambda: command.poll() is not None or "Waiting for devices" in site.output("cut"))
    if command.poll() is None:  # Ray ended the machine that it could not reach
        site.join("rejoin-cut")
    assert command.wait(LIMIT_S) == 0, site.output("cut")
    assert_equal(run, local_run)


def start_two_steps(site: Site, configuration: dict[str, Any]) -> tuple[Any, Path]:
    """Start a run and wait for two steps; return the command, which still runs, and its folder."""
    name = configuration["run"]["name"]
    file, run = (
        write_config(site.folder / f"{name}.yaml", configuration),
        site.folder / "runs" / name,
    )
    command = site.start(1, name, "train-grpo", "-c", str(file))
    site.when(lambda: len(rows(run)) >= 2, name, command)
    return command, run


def lose_and_rejoin(site: Site, machine: int, name: str, command: Any) -> None:
    """Cut the power of a machine during a run, start it again and wait for the end of the run."""
    site.machines.cut_power(machine)
    site.wait_for("Waiting for devices", name, command)
    site.machines.start(machine)
    site.join(f"rejoin-{machine}", machine)
    assert command.wait(LIMIT_S) == 0, site.output(name)
    assert_mentions(site.output(name), "Restarting the training ranks", "checkpoint of step")


@pytest.fixture(scope="module")
def third(site: Site) -> Site:
    """Cluster of three machines."""
    site.machines.start(3)
    site.join("join-3", 3)
    return site


def test_sft_across_three_machines_trains_all_steps(third: Site):
    train = {"steps": STEPS, "global_batch": 6, "micro_batch": 2}
    assert_sft_equals_the_run_on_one_machine(third, "sft3", train, machines=3)


def test_grpo_on_three_machines_survives_the_loss_of_one_and_equals_the_run_on_one(third: Site):
    local = run_training(third.folder, config(third, "local3", is_local=True, machines=3))
    spread = config(third, "spread3", is_local=False, machines=3)
    command, run = start_two_steps(third, spread)
    lose_and_rejoin(third, 3, "spread3", command)
    assert_equal(run, local)
