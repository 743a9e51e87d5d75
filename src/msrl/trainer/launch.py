"""Ranks of a run as processes of this machine: start, messages, and end of all ranks if one fails.

A rank calls `platform.prepare()` and then `function(rank: RankContext, payload)` of a module. It
sends reports and receives messages through a pipe. The payload is pickled, which is safe because
only processes of this run read it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import logging
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from types import TracebackType
from typing import Any

from msrl import temporary
from msrl.errors import MsrlError, ProcessFailedError
from msrl.platforms import get
from msrl.platforms.base import Platform
from msrl.processes import fork_template
from msrl.processes.child import python_command
from msrl.processes.fork_template import (
    ForkedRank,
    RankProcess,
    RankTemplate,
    StartedProcess,
    fork_ranks,
)
from msrl.processes.interpreter import no_collections, quick_end
from msrl.processes.parent import end_with_parent, leave_signals_to_parent
from msrl.trainer.heartbeats import RankHeartbeats, begin_heartbeats

_KILL_DETECTION_S = (
    1.0  # time to wait, after a rank fails, for the death of the rank that caused it
)


class RankError(ProcessFailedError):
    """Failure of a rank. The message holds the traceback of the rank."""


@dataclass(frozen=True, slots=True)
class RankContext:
    """Number of a rank and its connection to the process that started it."""

    rank: int
    world_size: int
    init_method: str
    pipe: connection.Connection

    def report(self, message: object) -> None:
        self.pipe.send(("report", message))

    def receive(self) -> Any:
        """Wait for a message of the parent; None if it has closed the connection."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            return None


class LocalRanks:
    """Context manager of the processes of all ranks.

    Raises:
        MsrlError: This machine has fewer devices than ranks.
    """

    def __init__(
        self,
        target: str,
        payload: object,
        *,
        num_ranks: int,
        platform: Platform,
        env: Mapping[str, str] | None = None,
        silence_s: float | None = None,
    ) -> None:
        """Prepare the processes.

        A rank that sends no heartbeat for `silence_s` seconds counts as dead. Default: no limit.
        """
        _check_devices(num_ranks, platform)
        self._target, self._payload, self._platform = target, payload, platform
        self.num_ranks, self._silence_s = num_ranks, silence_s
        self.init_method = ""  # known once the ranks are started
        # PYTHONSAFEPATH: no file in the working folder replaces a module of a rank.
        self._env = {**platform.worker_environment(num_ranks), **(env or {}), "PYTHONSAFEPATH": "1"}
        self._processes: list[RankProcess] = []
        self._started: list[StartedProcess] = []
        self._template: RankTemplate | None = None
        self._pipes: list[connection.Connection] = []

    def __enter__(self) -> LocalRanks:
        self._stack = contextlib.ExitStack()
        self._folder = self._stack.enter_context(temporary.owned_folder("msrl-ranks-"))
        try:
            self._start(self._folder)
        except BaseException:
            self.end()
            raise
        return self

    def _start(self, folder: Path) -> None:
        """Start all ranks, with `folder` for their temporary files."""
        job, self.init_method = folder / "job.pickle", _init_method(folder)
        job.write_bytes(pickle.dumps((self._target, self._payload)))
        env = {**os.environ, **temporary.environment(folder), **self._env}
        pipes = [connection.Pipe() for _ in range(self.num_ranks)]
        self._pipes += [parent_end for parent_end, _ in pipes]
        descriptors = [rank_end.fileno() for _, rank_end in pipes]
        common = [self.num_ranks, self._platform.name, job, os.getpid()]
        if self._platform.forks_ranks and self.num_ranks > 1:
            command = _command("fork", *common, ",".join(map(str, descriptors)))
            self._template = RankTemplate(command, env=env, descriptors=descriptors)
            self._processes += [ForkedRank(self._template, n) for n in range(self.num_ranks)]
        else:
            for rank, descriptor in enumerate(descriptors):
                command = _command("rank", *common, descriptor, rank)
                process = fork_template.start_process(command, env=env, descriptors=[descriptor])
                self._started.append(process)
            self._processes += self._started
        # With a copy of its end here, the pipe of a dead rank would never report its end.
        for _, rank_end in pipes:
            rank_end.close()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.end()

    def restart(self) -> None:
        """End all ranks and start new ones. `messages` must be called again."""
        self.end()
        self.__enter__()

    def end(self) -> None:
        """Kill all ranks and remove their temporary files."""
        if self._template is not None:
            self._template.end()
            self._template = None
        for process in self._started:
            process.kill()
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._started.clear()
        self._pipes.clear()
        self._stack.close()

    def send(self, rank: int, message: object) -> None:
        """Send a message to a rank. `messages` raises an error for a rank that has ended."""
        with contextlib.suppress(OSError):
            self._pipes[rank].send(message)

    def messages(self) -> Iterator[Any]:
        """Yield the ranks' reports until all ranks have ended.

        Raises:
            MsrlError: A rank reported an error that the user can fix.
            RankError: A rank failed otherwise.
        """
        open_pipes = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        heartbeats = RankHeartbeats(self._folder, self._silence_s)
        while open_pipes:
            ready = connection.wait(list(open_pipes), heartbeats.interval_s)
            self._check_heartbeats(heartbeats, open_pipes.values())
            for pipe in ready:
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
                    self._raise_if_killed()
                    raise RankError(f"rank {open_pipes[pipe]} failed:\n{message}")

    def _raise_if_killed(self) -> None:
        """Raise RankError for a rank that was killed.

        Its peers fail as a result and may report before its death is seen.
        """
        deadline = time.monotonic() + _KILL_DETECTION_S
        while time.monotonic() < deadline:
            for rank, process in enumerate(self._processes):
                if (process.poll() or 0) < 0:
                    self._check_exit(rank)
            time.sleep(0.05)

    def _check_heartbeats(self, heartbeats: RankHeartbeats, ranks: Iterable[int]) -> None:
        """Raise RankError for a rank without heartbeats."""
        for rank in heartbeats.silent_ranks(ranks):
            raise RankError(
                f"rank {rank} sent no heartbeat for {self._silence_s:g} s "
                "(cluster.rpc_timeout_s): its process hangs or is stopped"
            )

    def _check_exit(self, rank: int) -> None:
        code = self._processes[rank].wait()
        if code:
            reason = (
                f"was ended by {signal.Signals(-code).name}"
                if code < 0
                else f"exited with code {code}"
            )
            raise RankError(f"rank {rank} {reason}; its output, if any, is above")


def _check_devices(num_ranks: int, platform: Platform) -> None:
    """Raise MsrlError if there are more ranks than devices.

    No communication backend lets ranks share a device.
    """
    num_devices = num_ranks if platform.shares_main_memory else platform.device_count()
    if num_ranks > num_devices:
        raise MsrlError(
            f"cluster.devices_per_node: {num_ranks} ranks need one {platform.name} device each, "
            f"but this machine has {num_devices}."
            " Change it and train.parallel to match."
        )


def run_ranks(
    target: str,
    payload: object,
    *,
    num_ranks: int,
    platform: Platform,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `module:function` on all ranks and return all their reports."""
    with LocalRanks(target, payload, num_ranks=num_ranks, platform=platform, env=env) as ranks:
        return list(ranks.messages())


def _init_method(folder: Path) -> str:
    """Return torch's `init_method` for ranks that share a folder."""
    return f"file://{folder / 'rendezvous'}"


def quiet_megatron() -> None:
    """Silence warnings of Megatron and torch that a user cannot act on. Errors still raise.

    They are about missing CUDA libraries, and about classes of megatron-core 0.19 that msrl uses.
    """
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", module=r"torch\.")
    for module in ("models.gpt.gpt_model", "distributed.distributed_data_parallel"):
        logging.getLogger(f"megatron.core.{module}").setLevel(logging.ERROR)


def _set_process_name(name: str) -> None:
    """Set the name of this process that `ps` and `top` show (prctl(2), PR_SET_NAME)."""
    set_name = 15
    ctypes.CDLL(None).prctl(set_name, name.encode(), 0, 0, 0)


def skip_wandb() -> None:
    """Let Megatron find no wandb, whose import takes a tenth of a rank's start.

    megatron-core 0.16.1 imports it in core/inference/contexts/dynamic_context.py if it is
    installed. Trackers run in the driver, so no rank uses it.
    """
    sys.modules.setdefault("wandb", None)  # pyright: ignore[reportArgumentType]


def _command(kind: str, *arguments: object) -> list[str]:
    return [*python_command("-m", "msrl.trainer.launch"), kind, *map(str, arguments)]


def main() -> None:
    """Run one rank, or fork all ranks of this machine; the entry point of these processes."""
    with quick_end():
        _main()


def _main() -> None:
    kind, num_ranks, platform, job, parent, *descriptors = sys.argv[1:]
    leave_signals_to_parent()
    end_with_parent(int(parent))
    quiet_megatron()
    skip_wandb()
    if kind == "rank":
        descriptor, rank = map(int, descriptors)
        return _run(rank, int(num_ranks), Path(job), descriptor, get(platform).prepare)
    return _fork(int(num_ranks), Path(job), descriptors, get(platform))


def _fork(num_ranks: int, job: Path, arguments: Sequence[str], platform: Platform) -> None:
    """Import what the ranks need and fork them."""
    pipes, control = [int(number) for number in arguments[0].split(",")], int(arguments[1])
    template, prepare = os.getpid(), platform.prepare
    # Each rank fails in the same way and reports it.
    with contextlib.suppress(Exception), no_collections():
        prepare()
        prepare = _do_nothing
        importlib.import_module("msrl.trainer.rank")
        pickle.loads(job.read_bytes())
    gc.freeze()  # no collection of a rank visits, and so copies, what it shares with the others

    def run(rank: int) -> None:
        end_with_parent(template)
        for descriptor in pipes:
            # A copy in another rank would keep the pipe of a dead rank open.
            if descriptor != pipes[rank]:
                os.close(descriptor)
        _run(rank, num_ranks, job, pipes[rank], prepare)

    with connection.Connection(control) as pipe:
        fork_ranks(num_ranks, pipe, run, descriptors=pipes)


def _do_nothing() -> None:
    """Stand for the preparation of a process that is prepared."""


def _run(
    rank: int, num_ranks: int, job: Path, descriptor: int, prepare: Callable[[], None]
) -> None:
    """Run the job as one rank, in this process."""
    _set_process_name(f"msrl-rank-{rank}")
    begin_heartbeats(job.parent, rank)
    with connection.Connection(descriptor) as pipe:
        try:
            with no_collections():
                prepare()
                target, payload = pickle.loads(job.read_bytes())
                module, _, name = target.partition(":")
                function = getattr(importlib.import_module(module), name)
            context = RankContext(rank, num_ranks, _init_method(job.parent), pipe)
            function(context, payload)
        except MsrlError as error:
            pipe.send(("mistake", str(error)))
        except BaseException:
            # The driver prints it; its pipe is closed if another rank failed before.
            with contextlib.suppress(OSError):
                pipe.send(("failure", traceback.format_exc()))
            sys.exit(1)


if __name__ == "__main__":
    main()
