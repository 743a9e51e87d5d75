"""All rollout engines while each of them runs its own loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msrl.cluster.waiting import WorkerError
from msrl.config.sections.rollout import AsyncConfig
from msrl.rollout.runtime.engine_loop import LoopMessage, LoopReport
from msrl.workflows.training.transport.base import Workers

NO_WEIGHTS = -1  # version of an engine that was restarted


class LoopingEngines:
    """Engines that run in threads of their actors. Methods may be called from several threads."""

    def __init__(
        self, workers: Workers, restart: Callable[[WorkerError], list[int]] | None = None
    ) -> None:
        """Create the group of engines that have started.

        `restart` restarts the engines of an error without weights, and returns their numbers.
        """
        self._workers, self._restart = workers, restart
        self._arguments: tuple[bool, bool] = (False, True)

    @property
    def size(self) -> int:
        """Number of engines."""
        return self._workers.size

    def start(self, version: int, options: AsyncConfig) -> None:
        """Start the loops of engines whose weights have this version."""
        self._arguments = (options.weight_update == "drain", options.recompute_kv)
        self._workers.call("start_loop", version, *self._arguments)

    def restart(self, error: WorkerError) -> list[int]:
        """Restart the engines that were lost; return their numbers.

        They have the version `NO_WEIGHTS` until weights are published.

        Raises:
            WorkerError: `error`, if they cannot be restarted.
        """
        if self._restart is None:
            raise error
        lost = set[int]()
        while True:
            try:
                restarted = self._restart(error)  # also those whose start failed before
                lost.update(restarted)
                arguments = (NO_WEIGHTS, *self._arguments)
                self._workers.call_each("start_loop", dict.fromkeys(restarted, arguments))
                return sorted(lost)
            except WorkerError as other:  # an engine was lost during the restart
                if other is error:
                    raise
                error = other

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
