"""Workers that die or hang in a run: the run restarts them and ends with the same numbers.

Real engines, ranks and Ray; the driver of `killing_driver.py` kills its own workers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from msrl.trainer.checkpointing.resume import SavedTraining
from test_train_grpo import SAMPLED, make_inputs, settings
from training_runs import Command, files_in, make_tmp, metrics, rows, succeed, write_config

pytestmark = pytest.mark.slow
STEPS = 4
DRIVER = (str(Path(__file__).with_name("killing_driver.py")),)
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
    file = write_config(inputs / "undisturbed.yaml", config(inputs, "undisturbed"))
    succeed("train-grpo", "-c", str(file), log=inputs / "undisturbed.log")
    return inputs / "runs" / "undisturbed"


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
    assert command.output().count("Restarting the lost engine") == len(kills), command.output()
    assert re.search(r"^rollout engine 0.*died.*Restarting the lost engine", command.output(), re.M)
    assert_equal(run, undisturbed)
    assert left == []


def test_ranks_that_die_continue_from_the_newest_checkpoint_and_the_curve_is_undisturbed(
    inputs: Path, undisturbed: Path
):
    kills = [
        kill("actor", "update", 1),  # no checkpoint yet
        kill("actor", "weights", 4, 1),
        kill("actor", "save", 2),
    ]
    run, command, left = run_with_kills(inputs, "ranks", kills)
    assert command.process.returncode == 0, command.output()
    assert num_kills(command) == len(kills)
    assert command.output().count("Restarting the training ranks") == len(kills), command.output()
    assert "initial weights" in command.output() and "checkpoint of step 2" in command.output()
    assert_equal(run, undisturbed)
    assert left == []
