"""Start the ranks of a run as processes of this machine, hear what they report, and end all of them
when one fails.

A rank runs `function(rank: RankContext, payload)` of some module after `platform.prepare()`. It
reports through its pipe and is asked to stop through the same pipe. The payload travels as a pickle
between processes of our own.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from msrl import temporary
from msrl.errors import MsrlError, ProcessFailedError
from msrl.platforms import get
from msrl.platforms.base import Platform

_AFTERMATH_S = 1.0  # how long after its peers' failures a rank's death may become known


class RankError(ProcessFailedError):
    """A rank failed; the message is its own traceback."""


class Line(Protocol):
    """A rank's line to the process that started it: a pipe on one machine;
    `workflows/sft_cluster.py` has another.
    """

    def send(self, message: tuple[str, object], /) -> None: ...

    def poll(self) -> bool:
        """Whether the run is to end."""
        ...


@dataclass(frozen=True, slots=True)
class RankContext:
    """Who a rank is, and its line to the process that started it."""

    rank: int
    world_size: int
    init_method: str
    pipe: Line

    def report(self, message: object) -> None:
        self.pipe.send(("report", message))

    def asked_to_stop(self) -> bool:
        return self.pipe.poll()


class LocalRanks:
    """A context manager around the processes of all ranks. Raises MsrlError where they are more
    than the devices of this machine.
    """

    def __init__(
        self,
        target: str,
        payload: object,
        *,
        num_ranks: int,
        platform: Platform,
        env: Mapping[str, str] | None = None,
    ) -> None:
        _check_devices(num_ranks, platform)
        self._target, self._payload, self._num_ranks, self._platform = (
            target,
            payload,
            num_ranks,
            platform,
        )
        self._env = {**platform.worker_environment(num_ranks), **(env or {}), "PYTHONSAFEPATH": "1"}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[connection.Connection] = []
        self.was_asked_to_stop = False

    def __enter__(self) -> LocalRanks:
        self._stack = contextlib.ExitStack()
        folder = self._stack.enter_context(temporary.owned_folder("msrl-ranks-"))
        try:
            self._start(folder)
        except BaseException:
            self._end()
            raise
        return self

    def _start(self, folder: Path) -> None:
        """Start all ranks; their temporary files go to `folder` too."""
        job = folder / "job.pickle"
        job.write_bytes(pickle.dumps((self._target, self._payload)))
        env = {**os.environ, **temporary.environment(folder), **self._env}
        for rank in range(self._num_ranks):
            ours, theirs = connection.Pipe()
            arguments = [
                str(rank),
                str(self._num_ranks),
                self._platform.name,
                str(theirs.fileno()),
                str(job),
                str(os.getpid()),
            ]
            command = [sys.executable, "-m", "msrl.trainer.launch", *arguments]
            process = subprocess.Popen(
                command,
                env=env,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # a signal to the group of this process reaches this process alone, which decides what it means
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
        for process in self._processes:
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._stack.close()

    def ask_to_stop(self) -> None:
        """Let rank 0 know that the run is to end after the step in hand."""
        self.was_asked_to_stop = True
        with contextlib.suppress(OSError):  # the rank has ended already
            self._pipes[0].send("stop")

    def messages(self) -> Iterator[Any]:
        """What the ranks report, until all have ended. Raises the first failure: MsrlError for the
        user's, RankError for ours.
        """
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while open_pipes:
            for pipe in connection.wait(list(open_pipes)):
                assert isinstance(pipe, connection.Connection)
                try:
                    kind, message = pipe.recv()
                except (EOFError, ConnectionResetError):
                    self._check_exit(open_pipes.pop(pipe))
                    continue
                if kind == "report":
                    yield message
                elif kind == "mistake":
                    raise MsrlError(message)
                else:
                    self._check_deaths()
                    raise RankError(f"rank {open_pipes[pipe]} failed:\n{message}")

    def _check_deaths(self) -> None:
        """Name the rank that was killed, if there is one: the others fail in consequence, and may
        be heard first.
        """
        deadline = time.monotonic() + _AFTERMATH_S
        while time.monotonic() < deadline:
            for rank, process in enumerate(self._processes):
                if (process.poll() or 0) < 0:
                    self._check_exit(rank)
            time.sleep(0.05)

    def _check_exit(self, rank: int) -> None:
        code = self._processes[rank].wait()
        if code:
            how = (
                f"was ended by {signal.Signals(-code).name}"
                if code < 0
                else f"left with code {code}"
            )
            raise RankError(f"rank {rank} {how}; its last words, if any, are above")


def _check_devices(num_ranks: int, platform: Platform) -> None:
    """A device for every rank: no back end lets two share one."""
    there = num_ranks if platform.shares_main_memory else platform.device_count()
    if num_ranks > there:
        raise MsrlError(
            f"cluster.devices_per_node: {num_ranks} ranks want a device of {platform.name} each, and this machine has {there}; set it and"
            " train.parallel to fit"
        )


def run_ranks(
    target: str,
    payload: object,
    *,
    num_ranks: int,
    platform: Platform,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Everything that the ranks of `module:function` report, once they have all ended."""
    with LocalRanks(target, payload, num_ranks=num_ranks, platform=platform, env=env) as ranks:
        return list(ranks.messages())


def quiet_megatron() -> None:
    """Keep Megatron's hints about absent CUDA libraries off the terminal; what goes wrong still
    raises.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", module=r"torch\.")


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (prctl(2), PR_SET_PDEATHSIG)."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def main() -> None:
    """A rank's own beginning."""
    rank, world_size, platform, descriptor, job, parent = sys.argv[1:]
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # service managers signal every process of a unit, whatever its session
        signal.signal(number, signal.SIG_IGN)
    _end_with(int(parent))
    quiet_megatron()
    with connection.Connection(int(descriptor)) as pipe:
        try:
            get(platform).prepare()
            target, payload = pickle.loads(Path(job).read_bytes())
            module, _, function = target.partition(":")
            store = f"file://{Path(job).with_name('rendezvous')}"
            getattr(importlib.import_module(module), function)(
                RankContext(int(rank), int(world_size), store, pipe), payload
            )
        except MsrlError as error:
            pipe.send(("mistake", str(error)))
        except BaseException:
            # The driver prints it; its pipe is closed if another rank failed before.
            with contextlib.suppress(OSError):
                pipe.send(("failure", traceback.format_exc()))
            sys.exit(1)


if __name__ == "__main__":
    main()
