"""Trainings that are killed again and again: a process that has imported everything forks the ranks of each life, so that a life is cheap.

Run as a program: `killed_runs.py CONFIG.yaml NUM_KILLS`; the result is JSON on standard output. Everything of a life is the product's own
(`train_sft.prepare`, which looks for the checkpoint to go on from, and `sft_rank.main`); only the starting of ranks is not.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe, connection
from pathlib import Path
from typing import Any

import yaml

LIMIT_S = 120.0


@dataclass
class Life:
    """The ranks of one start, as children of this process; `pipe` is that of rank 0."""

    pids: list[int]
    pipe: connection.Connection

    @staticmethod
    def begin(settings: dict[str, Any]) -> Life:
        world = settings["cluster"]["devices_per_node"]
        ours, theirs = Pipe()
        store = f"file://{tempfile.mkdtemp()}/store"
        pids = [
            pid for rank in range(world) if (pid := _fork(settings, rank, world, store, theirs))
        ]
        theirs.close()
        return Life(pids, ours)

    def next_step(self) -> tuple[int, float] | None:
        """The next step that rank 0 reports, and its loss; None when the life has come to its end."""
        from msrl.types import StepReport

        while True:
            assert self.pipe.poll(LIMIT_S), "no report came"
            try:
                _, message = self.pipe.recv()
            except (EOFError, ConnectionResetError):
                return None
            if isinstance(message, StepReport):
                return message.step, message.metrics["train/loss"]

    def kill(self) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def end(self) -> list[int]:
        """How every rank ended."""
        self.pipe.close()
        return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]


def _fork(
    settings: dict[str, Any], rank: int, world: int, store: str, pipe: connection.Connection
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        from msrl.config.schema import Config
        from msrl.plan.run_plan import resolve
        from msrl.trainer.launch import RankContext
        from msrl.workflows.sft import rank as sft_rank
        from msrl.workflows.sft import run as train_sft

        config = Config.model_validate(settings, strict=False)
        os.dup2(2, 1)
        sft_rank.main(
            RankContext(rank, world, store, pipe),
            train_sft.prepare(resolve(config, "train-sft"), "cpu"),
        )
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


@dataclass
class Run:
    """What became of a training over all of its lives."""

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
    """A training with `num_kills` kills on its way, each after one to three steps and a part of another; (run, seconds per step)."""
    run, saves, choose = Run(), Path(settings["checkpoint"]["save"]), random.Random(num_kills)
    while run.kills < num_kills:
        life = Life.begin(settings)
        for _ in range(choose.randint(1, 3)):
            found = life.next_step()
            assert found is not None, f"the training ended after {run.kills} kills"
            run.note(*found)
        time.sleep(random.random() * 1.2 * seconds_per_step)
        run.kills_in_a_save += any(saves.glob(".iter_*.partial")) or any(
            saves.glob("training/.iter_*.partial")
        )
        life.kill()
        while (found := life.next_step()) is not None:  # reported before the kill, and not read yet
            run.note(*found)
        codes = life.end()
        assert set(codes) == {-signal.SIGKILL}, codes
        run.kills += 1
    life, times = Life.begin(settings), list[float]()
    while (found := life.next_step()) is not None:
        run.note(*found)
        times.append(time.monotonic())
    assert set(life.end()) == {0}
    return run, (times[-1] - times[0]) / max(1, len(times) - 1)


def main() -> None:
    path, num_kills = sys.argv[1], int(sys.argv[2])
    from msrl.platforms import get

    get("cpu").prepare()
    from msrl.trainer.launch import quiet_megatron

    quiet_megatron()
    from msrl.workflows.sft import run as train_sft  # noqa: F401  imported once for all lives

    settings = yaml.safe_load(Path(path).read_text())
    results: dict[str, Any] = {}
    seconds = 0.0
    for name, in_background, kills in (
        ("whole", False, 0),
        ("killed", False, num_kills),
        ("killed in background", True, num_kills),
    ):
        saves = {
            "save": str(Path(path).with_name(name)),
            "async": in_background,
            "resume": "auto",
            "every_steps": 1,
        }
        run, per_step = train(
            {**settings, "checkpoint": {**settings["checkpoint"], **saves}}, kills, seconds
        )
        seconds = seconds or per_step
        results[name] = vars(run)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
