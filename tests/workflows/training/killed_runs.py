"""Kill trainings again and again. A process that has imported everything forks each run.

Run as a program: `killed_runs.py CONFIG.yaml NUM_KILLS`; the result is JSON on standard output. The
driver and its ranks come from `msrl train-sft`; only the ranks' processes are forked instead of
started, and the driver's reports are also sent to this program.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe, connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import yaml

from msrl.config.schema import Config
from msrl.plan.run_plan import resolve
from msrl.platforms import get
from msrl.trainer import launch
from msrl.types import StepReport
from msrl.workflows.sft import run as train_sft
from msrl.workflows.training import run_log
from support import HANG_S


@dataclass
class Attempt:
    """Driver of one start as a child of this process, and the pipe with its reports."""

    pid: int
    pipe: connection.Connection

    @staticmethod
    def begin(settings: dict[str, Any]) -> Attempt:
        parent_end, driver_end = Pipe()
        pid = os.fork()
        if not pid:
            parent_end.close()
            _run_driver(settings, driver_end)
        driver_end.close()
        return Attempt(pid, parent_end)

    def next_step(self) -> tuple[int, float] | None:
        """Return the next reported step and its loss.

        Returns None once the driver and all ranks, which share the pipe, have ended.
        """
        assert self.pipe.poll(HANG_S), "no report came"
        try:
            report = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return None
        with contextlib.suppress(OSError):  # the driver was killed
            self.pipe.send(None)
        return report

    def kill(self) -> None:
        """Kill the driver; the kernel kills its ranks with it."""
        os.kill(self.pid, signal.SIGKILL)

    def end(self) -> int:
        """Return the exit code of the driver."""
        self.pipe.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkedProcess:
    """Stand-in for `subprocess.Popen` in `trainer/launch.py` that forks a rank."""

    def __init__(self, command: list[str], *, env: dict[str, str], **_: object) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if not self.pid:
            os.environ.update(env)
            sys.argv = command[command.index("-m") + 1 :]
            _exit_after(launch.main)

    def poll(self) -> int | None:
        return self._wait(os.WNOHANG)

    def wait(self) -> int:
        code = self._wait(0)
        assert code is not None
        return code

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def _wait(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def _run_driver(settings: dict[str, Any], pipe: connection.Connection) -> NoReturn:
    """Train in this process, and report every step to the parent."""
    log_report = run_log.RunLog.log

    def log_and_send(log: run_log.RunLog, report: StepReport) -> None:
        log_report(log, report)
        pipe.send((report.step, report.metrics["train/loss"]))
        pipe.recv()  # a slow parent is at most a step behind

    launch.subprocess = SimpleNamespace(Popen=ForkedProcess, DEVNULL=None)  # pyright: ignore
    launch.get = lambda name: SimpleNamespace(prepare=lambda: None)  # this process is prepared
    type(get("cpu")).forks_ranks = False
    run_log.RunLog.log = log_and_send
    config = Config.model_validate(settings, strict=False)
    os.dup2(2, 1)
    _exit_after(lambda: train_sft.run(resolve(config, "train-sft")))


def _exit_after(function: Callable[[], None]) -> NoReturn:
    """End this process after a call, without the parent's cleanup."""
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


@dataclass
class Run:
    """Result of a training in all attempts."""

    losses: dict[int, float] = field(default_factory=dict)
    kills: int = 0
    kills_in_a_save: int = 0
    repeated: int = 0

    def note(self, step: int, loss: float) -> None:
        self.repeated += step in self.losses
        assert self.losses.setdefault(step, loss) == loss, (
            f"step {step} had loss {self.losses[step]!r} before, now {loss!r}"
        )


def train(
    settings: dict[str, Any], num_kills: int, seconds_per_step: float = 0.0
) -> tuple[Run, float]:
    """Return a training that is killed `num_kills` times, and its seconds per step.

    Each kill comes one to three steps and a part of another step after the start of an attempt.
    """
    run, saves, choose = Run(), Path(settings["checkpoint"]["save"]), random.Random(num_kills)
    while run.kills < num_kills:
        attempt = Attempt.begin(settings)
        for _ in range(choose.randint(1, 3)):
            report = attempt.next_step()
            assert report is not None, f"the training ended after {run.kills} kills"
            run.note(*report)
        time.sleep(random.random() * 1.2 * seconds_per_step)
        run.kills_in_a_save += any(saves.glob(".iter_*.partial")) or any(
            saves.glob("training/.iter_*.partial")
        )
        attempt.kill()
        while (
            report := attempt.next_step()
        ) is not None:  # reported before the kill, and not read yet
            run.note(*report)
        assert attempt.end() == -signal.SIGKILL
        run.kills += 1
    attempt, times = Attempt.begin(settings), list[float]()
    while (report := attempt.next_step()) is not None:
        run.note(*report)
        times.append(time.monotonic())
    assert attempt.end() == 0
    return run, (times[-1] - times[0]) / max(1, len(times) - 1)


def main() -> None:
    path, num_kills = sys.argv[1], int(sys.argv[2])
    get("cpu").prepare()
    launch.quiet_megatron()
    from msrl.trainer import rank  # noqa: F401  imported once for all attempts

    settings = yaml.safe_load(Path(path).read_text())
    results: dict[str, Any] = {}
    seconds = 0.0
    for name, in_background, kills in (
        ("uninterrupted", False, 0),
        ("killed", False, num_kills),
        ("killed in background", True, num_kills),
    ):
        saves = {
            "save": str(Path(path).with_name(name)),
            "async": in_background,
            "resume": "auto",
            "every_steps": 1,
        }
        sections = {
            "run": {**settings["run"], "name": name},
            "checkpoint": {**settings["checkpoint"], **saves},
        }
        run, per_step = train({**settings, **sections}, kills, seconds)
        seconds = seconds or per_step
        results[name] = vars(run)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
