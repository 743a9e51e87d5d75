"""Processes that run environments, one per episode, with a hard time limit per call.

A fork server (`fork_server.py`) loads the environments once and forks a process per episode, which
is cheap enough for thousands of episodes and lets a kill end one episode only. A thread of this
process (`pool_loop.py`) sends calls and receives results, so that callers wait on futures.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from msrl.environments.base import EnvironmentSource, EpisodeFault, Opening, StepResult
from msrl.environments.episode_process import EpisodeSetup
from msrl.environments.pool_loop import CallRequest, EpisodeState, PoolLoop
from msrl.errors import MsrlError
from msrl.processes.messages import packed

ENVIRONMENT_COLUMN = "environment"  # column of a row that selects one of several environments
DEFAULT_MEMORY_BYTES = 4 << 30


class EnvironmentPool:
    """Context manager of the processes of all open episodes.

    `sources` are environments by name. The column `environment` of a row selects one; for a row
    without it, the seed of the row draws one by weight, so that a group has the same. Calls return
    at once with a future. At most `max_running` calls run at the same time; the time limit of a
    call begins when it runs. A fault ends its episode: later calls of the episode return the same
    fault. `memory_bytes` limits the address space of each episode's process beyond the size of the
    fork server, which has loaded the environments; 0 disables it. `max_message_bytes` limits the
    reply of one call.
    """

    def __init__(
        self,
        sources: Mapping[str, EnvironmentSource],
        *,
        tool_format: str = "hermes",
        opens_thought: bool = False,
        max_running: int = 64,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        max_message_bytes: int = 1 << 20,
    ) -> None:
        self._sources = dict(sources)
        path = tuple(sys.path)
        formats = (tool_format, opens_thought)
        settings = (self._sources, path, *formats, memory_bytes, max_message_bytes)
        self._loop = PoolLoop(lambda fd: EpisodeSetup(*settings, fd), max_running)
        self._finalizer = weakref.finalize(self, _stop, self._loop, os.getpid())
        self._numbers = iter(range(1, sys.maxsize))
        self._episodes: dict[str, EpisodeState] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def fault_counts(self) -> Mapping[str, int]:
        """Number of faults so far, by reason."""
        return dict(self._loop.fault_counts)

    def start(self) -> None:
        """Load all environments. `open` does not require this call.

        Raises:
            MsrlError: A user's file cannot be loaded.
        """
        self._loop.submit(CallRequest("start", future := Future[None]()))
        future.result()

    def open(self, episode_id: str, row: dict[str, Any]) -> Future[Opening | EpisodeFault]:
        """Create the environment of an episode and reset it.

        Raises:
            MsrlError: The row names an unknown environment.
            ValueError: An episode of this id is open.
        """
        name = select_environment(self._sources, row)
        with self._lock:
            if episode_id in self._episodes:
                raise ValueError(f"episode {episode_id} is already open")
            episode = EpisodeState(next(self._numbers), self._sources[name].timeout_s)
            self._episodes[episode_id] = episode
        return self._call(episode, "open", (name, row))

    def step(
        self, episode_id: str, answer: str, *, is_truncated: bool = False
    ) -> Future[StepResult | EpisodeFault]:
        """Pass an answer of the model to the environment of an open episode.

        `is_truncated` tells that the answer ended at a limit of tokens.

        Raises:
            KeyError: No episode of this id is open.
        """
        return self._call(self._episodes[episode_id], "step", (answer, is_truncated))

    def close(self, episode_id: str) -> None:
        """End an episode, also during a call, whose future is then cancelled."""
        with self._lock:
            episode = self._episodes.pop(episode_id, None)
        if episode is not None:
            self._loop.submit(CallRequest("close", None, episode))

    def stop(self) -> None:
        """End all episodes and processes. Repeated calls have no effect."""
        self._finalizer()

    def _call(self, episode: EpisodeState, kind: str, value: object) -> Future[Any]:
        self._loop.submit(CallRequest(kind, future := Future[Any](), episode, packed(value)))
        return future


def select_environment(sources: Mapping[str, EnvironmentSource], row: Mapping[str, Any]) -> str:
    """Return the name of the environment of a row.

    Raises:
        MsrlError: The row names an unknown environment.
    """
    name = row.get(ENVIRONMENT_COLUMN)
    if name in sources:
        return str(name)
    if name:
        raise MsrlError(
            f"{ENVIRONMENT_COLUMN}={name}: row {row.get('index')} of the data names an unknown "
            f"environment; there are {', '.join(sources)}"
        )
    weights = [source.weight for source in sources.values()]
    draw = random.Random(f"environment {row.get('seed', 0)}")
    return draw.choices(list(sources), weights)[0]


def _stop(loop: PoolLoop, owner: int) -> None:
    if os.getpid() == owner:  # a fork inherits the pool, but the processes are not its children
        loop.stop()
