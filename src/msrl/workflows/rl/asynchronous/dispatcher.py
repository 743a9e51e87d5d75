"""Dispatch of group requests to engines, and collection of finished groups.

One thread exchanges messages with all engines. It alone knows which engine has which request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from msrl.rollout.runtime.engine_loop import GroupRequest, LoopCounters, LoopMessage, LoopReport
from msrl.types import RolloutGroup
from msrl.workflows.rl.asynchronous.engines import NO_WEIGHTS, LoopingEngines

_POLL_S = 0.05  # longest time until an engine hears of new requests


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """Last report of an engine."""

    version: int
    counters: LoopCounters = field(default_factory=LoopCounters)


@dataclass(slots=True)
class _Mail:
    """Contents of the next message to an engine. It is kept until the engine has answered."""

    requests: list[GroupRequest] = field(default_factory=list[GroupRequest])
    aborted: list[str] = field(default_factory=list[str])
    received: list[str] = field(default_factory=list[str])

    def abort(self, key: str) -> None:
        """Abort a group, which may not have been sent yet."""
        self.requests = [request for request in self.requests if request.key != key]
        self.aborted.append(key)

    def message(self) -> LoopMessage:
        """Return the message."""
        return LoopMessage(tuple(self.requests), tuple(self.aborted), tuple(self.received))


class Dispatcher:
    """Requests that run on the engines. Only one thread may call `exchange`."""

    def __init__(self, engines: LoopingEngines, version: int) -> None:
        self._engines = engines
        self._engine_by_key: dict[str, int] = {}
        self._progress: dict[str, int] = {}
        self._finished: list[str] = []  # keys that the last exchange returned
        self._mail = [_Mail() for _ in range(engines.size)]
        self.statuses = [EngineStatus(version)] * engines.size
        self._lost_counters: list[LoopCounters] = []

    @property
    def version(self) -> int:
        """Oldest policy version of the engines that have weights; NO_WEIGHTS if none has."""
        versions = [status.version for status in self.statuses if status.version != NO_WEIGHTS]
        return min(versions, default=NO_WEIGHTS)

    @property
    def counters(self) -> list[LoopCounters]:
        """Last counters of all loops since the start, those of lost engines included."""
        return [*self._lost_counters, *(status.counters for status in self.statuses)]

    def exchange(
        self, requests: Sequence[GroupRequest], aborted: Sequence[str]
    ) -> dict[str, RolloutGroup]:
        """Start and abort groups; wait briefly and return groups that finished, by key.

        Groups start on engines that have weights.
        """
        for key in self._finished:
            self._progress.pop(key, None)
        for key in aborted:
            engine = self._engine_by_key.pop(key, None)
            self._progress.pop(key, None)
            if engine is not None:
                self._mail[engine].abort(key)
        for request in requests:
            engine = self._least_loaded()
            self._engine_by_key[request.key] = engine
            self._mail[engine].requests.append(request)
        reports = self._engines.exchange([mail.message() for mail in self._mail], _POLL_S)
        finished: dict[str, RolloutGroup] = {}
        for engine, report in enumerate(reports):
            finished |= self._receive(engine, report)
        self._finished = list(finished)
        return finished

    def lose(self, engine: int) -> dict[str, int]:
        """Forget all requests of an engine that was restarted without weights.

        Returns:
            The number of tokens of each lost group, by key.
        """
        keys = [key for key, holder in self._engine_by_key.items() if holder == engine]
        lost = {key: self._progress.pop(key, 0) for key in keys}
        for key in lost:
            del self._engine_by_key[key]
        self._mail[engine] = _Mail()
        self._lost_counters.append(self.statuses[engine].counters)
        self.statuses[engine] = EngineStatus(NO_WEIGHTS)
        return lost

    def num_tokens(self, key: str) -> int:
        """Return the number of tokens of a group in the last report of its engine.

        Those of a finished group are known until the next exchange, when the caller counts them.
        """
        return self._progress.get(key, 0)

    def describe(self, key: str) -> str:
        """Return where a running group is, for messages."""
        engine = self._engine_by_key.get(key)
        if engine is None:
            return "no engine has it yet"
        return f"rollout engine {engine} has it, with {self.num_tokens(key)} tokens so far"

    def _least_loaded(self) -> int:
        loads = {
            engine: 0 for engine, status in enumerate(self.statuses) if status.version != NO_WEIGHTS
        }
        for engine in self._engine_by_key.values():
            loads[engine] += 1
        return min(loads, key=lambda engine: loads[engine])

    def _receive(self, engine: int, report: LoopReport) -> dict[str, RolloutGroup]:
        """Record a report and return the finished groups that were not aborted."""
        self._mail[engine] = _Mail(received=list(report.finished))
        self.statuses[engine] = EngineStatus(report.version, report.counters)
        for key, count in report.progress.items():
            if key in self._engine_by_key:  # not aborted meanwhile
                self._progress[key] = count
        finished: dict[str, RolloutGroup] = {}
        for key, group in report.finished.items():
            if self._engine_by_key.pop(key, None) is not None:
                self._progress[key] = group.num_tokens
                finished[key] = group
        return finished
