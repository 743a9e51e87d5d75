"""All rollout engines while each of them runs its own loop."""

from __future__ import annotations

from collections.abc import Sequence

from msrl.config.sections.rollout import AsyncConfig
from msrl.rollout.runtime.engine_loop import LoopMessage, LoopReport
from msrl.workflows.training.transport.base import Workers


class LoopingEngines:
    """Engines that run in threads of their actors. Methods may be called from several threads."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    @property
    def size(self) -> int:
        """Number of engines."""
        return self._workers.size

    def start(self, version: int, options: AsyncConfig) -> None:
        """Start the loops of engines whose weights have this version."""
        drains = options.weight_update == "drain"
        self._workers.call("start_loop", version, drains, options.recompute_kv)

    def exchange(self, messages: Sequence[LoopMessage], timeout_s: float) -> list[LoopReport]:
        """Send a message to each engine; return their reports."""
        arguments = {engine: (message, timeout_s) for engine, message in enumerate(messages)}
        return self._workers.call_each("exchange", arguments)

    def pause(self) -> None:
        """Stop all engines after their current step. They keep their requests."""
        self._workers.call("pause_loop")

    def resume(self) -> None:
        """Continue after `pause`."""
        self._workers.call("resume_loop")

    def stop(self) -> None:
        """End all loops."""
        self._workers.call("stop_loop")
