"""Trainings that are killed repeatedly.

One process imports everything and forks the ranks of each attempt, so that attempts are cheap. Run
as a program: `killed_runs.py CONFIG.yaml NUM_KILLS`; the result is JSON on standard output. Except
for the start of ranks, an attempt runs the code of the product: `prepare` of
`msrl.workflows.sft.run`, which finds the checkpoint to resume from, and `main` of
`msrl.workflows.sft.rank`.
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
class Attempt:
    """Ranks of one start of a training, as children of this process, and the pipe of rank 0."""

    pids: list[int]
    pipe: connection.Connection

    @staticmethod
    def begin(settings: dict[str, Any]) -> Attempt:
        world = settings["cluster"]["devices_per_node"]
        parent_end, rank_end = Pipe()
        store = f"file://{tempfile.mkdtemp()}/store"
        pids = [_fork(settings, rank, world, store, rank_end) for rank in range(world)]
        rank_end.close()
        return Attempt(pids, parent_end)

    def next_step(self) -> tuple[int, float] | None:
        """Return the next step that rank 0 reports and its loss; None at the end of the attempt."""
        from msrl.types import StepReport

        while True:
            assert self.pipe.poll(LIMIT_S), "rank 0 sent no report"
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
        """Wait for all ranks and return their exit codes."""
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
        from msrl.trainer.launch import RankContext
        from msrl.workflows.sft import rank as sft_rank
        from msrl.workflows.sft import run as train_sft

        os.dup2(2, 1)
        sft_rank.main(
            RankContext(rank, world, store, pipe),
            train_sft.prepare(Config.model_validate(settings, strict=False), "cpu"),
        )
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


@dataclass
class Run:
    """Result of a training over all of its attempts."""

    losses: dict[int, float] = field(default_factory=dict)
    kills: int = 0
    kills_in_a_save: int = 0
    repeated: int = 0

    def record(self, step: int, loss: float) -> None:
        self.repeated += step in self.losses
        assert self.losses.setdefault(step, loss) == loss, (
            f"step {step} had loss {self.losses[step]!r} before, now {loss!r}"
        )


def train(
    settings: dict[str, Any], num_kills: int, seconds_per_step: float = 0.0
) -> tuple[Run, float]:
    """Train to the end with `num_kills` kills; return the run and the seconds per step.

    Each kill is at a random moment after one to three steps.
    """
    run, saves, generator = Run(), Path(settings["checkpoint"]["save"]), random.Random(num_kills)
    while run.kills < num_kills:
        attempt = Attempt.begin(settings)
        for _ in range(generator.randint(1, 3)):
            step = attempt.next_step()
            assert step is not None, f"the training ended after {run.kills} kills"
            run.record(*step)
        time.sleep(random.random() * 1.2 * seconds_per_step)
        run.kills_in_a_save += any(saves.glob(".iter_*.partial")) or any(
            saves.glob("training/.iter_*.partial")
        )
        attempt.kill()
        while (step := attempt.next_step()) is not None:  # reports from before the kill
            run.record(*step)
        codes = attempt.end()
        assert set(codes) == {-signal.SIGKILL}, codes
        run.kills += 1
    attempt, times = Attempt.begin(settings), list[float]()
    while (step := attempt.next_step()) is not None:
        run.record(*step)
        times.append(time.monotonic())
    assert set(attempt.end()) == {0}
    return run, (times[-1] - times[0]) / max(1, len(times) - 1)


def main() -> None:
    path, num_kills = sys.argv[1], int(sys.argv[2])
    from msrl.platforms import get

    get("cpu").prepare()
    from msrl.trainer.launch import quiet_megatron

    quiet_megatron()
    from msrl.workflows.sft import run as train_sft  # noqa: F401  imported once for all attempts

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
        run, per_step = train(
            {**settings, "checkpoint": {**settings["checkpoint"], **saves}}, kills, seconds
        )
        seconds = seconds or per_step
        results[name] = vars(run)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
