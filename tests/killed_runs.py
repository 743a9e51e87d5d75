"""Trainings that are killed and resumed many times: `killed_runs.py CONFIG.yaml NUM_KILLS`.

The result is JSON on standard output. A process that has imported everything forks the ranks of
each start, which makes starts cheap. Apart from the fork, each start runs msrl's code:
`train_sft.prepare`, which selects the checkpoint to resume from, and `sft_rank.main`.
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
class RankProcesses:
    """Ranks of one start as child processes; `pipe` receives the messages of rank 0."""

    pids: list[int]
    pipe: connection.Connection

    @staticmethod
    def start(settings: dict[str, Any]) -> RankProcesses:
        world = settings["cluster"]["devices_per_node"]
        receiver, sender = Pipe()
        store = f"file://{tempfile.mkdtemp()}/store"
        pids = [
            pid for rank in range(world) if (pid := _fork(settings, rank, world, store, sender))
        ]
        sender.close()
        return RankProcesses(pids, receiver)

    def next_step(self) -> tuple[int, float] | None:
        """Return rank 0's next step and loss, or None if the ranks have exited."""
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
    """Record of a training over all of its starts."""

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
    """Train with `num_kills` kills, each one to four steps after a start."""
    training, checkpoints = Run(), Path(settings["checkpoint"]["save"])
    random_source = random.Random(num_kills)
    while training.kills < num_kills:
        ranks = RankProcesses.start(settings)
        for _ in range(random_source.randint(1, 3)):
            progress = ranks.next_step()
            assert progress is not None, f"the training ended after {training.kills} kills"
            training.note(*progress)
        time.sleep(random.random() * 1.2 * seconds_per_step)
        training.kills_in_a_save += any(checkpoints.glob(".iter_*.partial")) or any(
            checkpoints.glob("training/.iter_*.partial")
        )
        ranks.kill()
        while (progress := ranks.next_step()) is not None:  # reported before the kill
            training.note(*progress)
        codes = ranks.end()
        assert set(codes) == {-signal.SIGKILL}, codes
        training.kills += 1
    ranks, times = RankProcesses.start(settings), list[float]()
    while (progress := ranks.next_step()) is not None:
        training.note(*progress)
        times.append(time.monotonic())
    assert set(ranks.end()) == {0}
    return training, (times[-1] - times[0]) / max(1, len(times) - 1)


def main() -> None:
    path, num_kills = sys.argv[1], int(sys.argv[2])
    from msrl.platforms import get

    get("cpu").prepare()
    from msrl.trainer.launch import quiet_megatron

    quiet_megatron()
    from msrl.workflows.sft import run as train_sft  # noqa: F401  imported once for all starts

    settings = yaml.safe_load(Path(path).read_text())
    results: dict[str, Any] = {}
    seconds = 0.0
    for name, in_background, kills in (
        ("uninterrupted", False, 0),
        ("killed", False, num_kills),
        ("killed in background", True, num_kills),
    ):
        checkpoints = {
            "save": str(Path(path).with_name(name)),
            "async": in_background,
            "resume": "auto",
            "every_steps": 1,
        }
        training, per_step = train(
            {**settings, "checkpoint": {**settings["checkpoint"], **checkpoints}}, kills, seconds
        )
        seconds = seconds or per_step
        results[name] = vars(training)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
