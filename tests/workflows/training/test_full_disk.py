"""A full disk in every phase of a training: one message, exit code 2, and the run can resume.

The operating system refuses to open a file of the phase for writing, as on a full disk.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from msrl.platforms import get
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.workflows.training.transport.local import LocalWorkers, local_workers
from one_process import Runner
from support import assert_mentions, mentions, python_path
from test_train_from_rows import CHAT, write
from test_train_grpo import make_inputs, rollouts, settings
from tiny_qwen2 import save_model
from training_runs import Command, metrics, rows, write_config

pytestmark = [pytest.mark.full, pytest.mark.slow]
STEPS = 4
# Files of each phase, and the newest checkpoint after it.
PHASES = {
    "cache of rows": (r"/cache/.*\.(bin|json)", 0),
    "configuration": (r"/\.?config\.yaml", 0),
    "attempts": (r"/\.?attempts\.jsonl", 0),
    "sources of rows": (r"/\.?data\.json", 0),
    "metrics": (r"/metrics\.jsonl", 0),
    "tracker": (r"/tensorboard/", 0),
    "first checkpoint": (r"iter_0000002.*/", 0),
    "second checkpoint": (r"iter_0000004.*/", 2),
    "export": (r"/\.?hf\.new", STEPS),
    "curves": (r"/\.?curves\.png", STEPS),
    "report": (r"/\.?report\.md", STEPS),
    "log": (r"/log\.txt", 0),
}


class FullDisk(Runner):
    """Runner of commands on a disk that is full for some files."""

    full: re.Pattern[str] | None = None

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        os.chdir(os.environ["MPLCONFIGDIR"])  # for the stores of the ranks
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or self.full is None or not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes)) else ""
        if self.full.search(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def run_full(self, pattern: str, *arguments: str) -> tuple[int, str]:
        """Run `msrl ARGUMENTS`; return its exit code and what it wrote to standard error."""
        from msrl.cli.app import run

        self.full = re.compile(pattern) if pattern else None
        sys.argv = ["msrl", *arguments]
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            try:
                run()
            except SystemExit as end:
                return int(end.code or 0), errors.getvalue()
        return 0, errors.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("full")
    save_model(folder / "model", tied=True, positions=256)
    write(folder / "rows.jsonl", CHAT)
    return folder


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[LocalWorkers]:
    env = {"MPLCONFIGDIR": str(folder), "PYTHONPATH": python_path()}
    env["MSRL_DATA_CACHE"] = str(folder / "cache")
    with local_workers(FullDisk, num_workers=1, platform=get("cpu"), env=env) as workers:
        yield workers


@pytest.fixture(scope="module")
def whole(folder: Path, workers: LocalWorkers) -> Path:
    """Return the folder of a run on a disk that is not full."""
    code, errors = train(workers, folder, "whole", "")
    assert code == 0, errors
    return folder / "runs" / "whole"


def train(workers: LocalWorkers, folder: Path, name: str, pattern: str) -> tuple[int, str]:
    settings = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "rows.jsonl")},
        "train": {"steps": STEPS, "global_batch": 2},
        "run": {"dir": str(folder / "runs"), "name": name},
        "checkpoint": {"every_steps": 2, "export_hf": True},
        "log": {"trackers": ["tensorboard"]},
        "cluster": {"platform": "cpu"},
    }
    file = write_config(folder / f"{name}.yaml", settings)
    arguments = ("train-sft", "-c", str(file), "--resume", "auto")
    (answer,) = workers.call("run_full", pattern, *arguments)
    return answer


@pytest.mark.parametrize("phase", PHASES)
def test_a_training_on_a_full_disk_ends_with_one_message_and_resumes_exactly(
    phase: str, folder: Path, workers: LocalWorkers, whole: Path
):
    pattern, newest = PHASES[phase]
    name, run = phase.replace(" ", "-"), folder / "runs" / phase.replace(" ", "-")
    if phase == "cache of rows":
        (folder / "rows.jsonl").write_text((folder / "rows.jsonl").read_text() + "\n")
    code, errors = train(workers, folder, name, pattern)
    assert code == 2
    assert re.search(mentions(os.strerror(errno.ENOSPC)), errors)
    assert "Traceback" not in errors
    if newest:
        assert SavedTraining(run / "checkpoints", newest).damage() is None
    assert train(workers, folder, name, "")[0] == 0
    assert [row["metrics"]["train/loss"] for row in rows(run)] == [
        row["metrics"]["train/loss"] for row in rows(whole)
    ]
    file = "hf/model.safetensors"
    assert (run / file).read_bytes() == (whole / file).read_bytes()
    assert (run / "report.md").exists() and (run / "curves.png").exists()
    assert not [path for path in run.rglob("*") if path.suffix in (".part", ".partial", ".new")]


# Python executes this module at its start: the disk is full for the files that FULL_DISK matches.
SITE = """
import errno, os, re, sys
pattern = re.compile(os.environ["FULL_DISK"])
def audit(event, arguments):
    if event == "open" and isinstance(arguments[0], str) and pattern.search(arguments[0]):
        if arguments[2] & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), arguments[0])
if pattern.pattern:
    sys.addaudithook(audit)
"""
GRPO_PHASES = {
    "rollouts": r"/rollouts/\.?step_000003",
    "evaluation": r"/eval/\.?step_000002",
}


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the inputs of GRPO and of a run on a disk that is not full."""
    folder = make_inputs(tmp_path_factory.mktemp("grpo"))
    (folder / "sitecustomize.py").write_text(SITE)
    assert train_grpo(folder, "whole", "")[0] == 0
    return folder


def train_grpo(folder: Path, name: str, pattern: str) -> tuple[int, str]:
    """Run GRPO on a disk that is full for some files; return its exit code and its output."""
    sections = settings(folder, name, "tied", eval={"every_steps": 2, "prompts": 4})
    file = write_config(folder / f"{name}.yaml", sections)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), python_path()]))
        patch.setenv("FULL_DISK", pattern)
        command = Command("train-grpo", "-c", str(file), "--resume", "auto", log=folder / name)
        return command.wait(), command.output()


@pytest.mark.parametrize("phase", GRPO_PHASES)
def test_grpo_on_a_full_disk_ends_with_one_message_and_resumes_exactly(phase: str, grpo: Path):
    code, output = train_grpo(grpo, phase, GRPO_PHASES[phase])
    assert code == 2, output
    assert_mentions(output, os.strerror(errno.ENOSPC))
    assert "Traceback" not in output
    code, output = train_grpo(grpo, phase, "")
    assert code == 0, output
    whole, run = grpo / "runs" / "whole", grpo / "runs" / phase
    assert metrics(run) == metrics(whole)
    for step in range(1, STEPS + 1):
        assert rollouts(run, step) == rollouts(whole, step)
    assert not [path for path in run.rglob("*") if path.suffix in (".part", ".partial", ".new")]
