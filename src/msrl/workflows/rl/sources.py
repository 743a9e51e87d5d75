"""Sources of the rollouts of a run.

Engines and ranks take turns on the devices (`SynchronousSource`), or the engines generate for later
steps while the ranks train (`AsynchronousSource`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from msrl.errors import MsrlError, ProcessFailedError
from msrl.trainer.objective.batches import num_loss_tokens
from msrl.workflows.rl.asynchronous.engines import LoopingEngines
from msrl.workflows.rl.asynchronous.rollouts import AsyncRollouts
from msrl.workflows.rl.evaluation import RolloutEvaluator
from msrl.workflows.rl.rollouts import Rollouts, StepRollouts
from msrl.workflows.rl.setup import GenerationSetup
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.update.batches import PreparedStep
from msrl.workflows.rl.workers import EngineWorkers
from msrl.workflows.rollout_log import RolloutLog
from msrl.workflows.training.session import Evaluator

_MAX_EMPTY_STEPS = 10  # in succession


class RolloutSource(Protocol):
    """Source of the rollouts of each step. The training loop calls its methods in their order."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Generate alongside the body, if the run is asynchronous."""
        yield

    @abstractmethod
    def evaluator(self, log: RolloutLog) -> Evaluator | None:
        """Return the evaluator of held-out prompts, which writes to `log`; None without engines."""

    @abstractmethod
    def take(self, step: int, clock: Clock) -> StepRollouts:
        """Return the rollouts of a step, counted from 0."""

    @abstractmethod
    def begin_update(self, clock: Clock) -> None:
        """Give the devices to the ranks, if they share them with the engines."""

    def check(self, prepared: PreparedStep) -> None:
        """Raise MsrlError if too many successive steps have nothing to train on."""

    @abstractmethod
    def publish(self, version: int, clock: Clock) -> None:
        """Give the new weights to the engines, and the devices if they are shared."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Keep the devices free for the ranks while they save a checkpoint."""
        yield

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """Return the state to save in a checkpoint."""

    def finish(self) -> None:
        """Check what is still open after the last step."""


class SynchronousSource(RolloutSource):
    """Engines that generate the rollouts of a step before its update."""

    def __init__(
        self, job: GenerationSetup, workers: EngineWorkers, state: Mapping[str, Any]
    ) -> None:
        self._job, self._workers = job, workers
        self._rollouts = Rollouts(job, workers.engines, workers.scorer, state)

    def evaluator(self, log: RolloutLog) -> Evaluator:
        return RolloutEvaluator(self._job, self._workers.engines, self._workers.scorer, log)

    def take(self, step: int, clock: Clock) -> StepRollouts:
        return self._rollouts.generate(step, clock)

    def begin_update(self, clock: Clock) -> None:
        with clock("weights"):
            self._workers.engines.offload(discard_weights=True)
            self._workers.trainers.onload()

    def publish(self, version: int, clock: Clock) -> None:
        with clock("weights"):
            self._workers.weights.update(version)

    @contextmanager
    def saving(self) -> Iterator[None]:
        self._workers.engines.offload()
        yield
        self._workers.trainers.offload()
        self._workers.engines.onload()

    def state(self) -> Mapping[str, Any]:
        return self._rollouts.state()


class AsynchronousSource(RolloutSource):
    """Engines that generate for later steps while the ranks train."""

    def __init__(
        self, job: GenerationSetup, workers: EngineWorkers, state: Mapping[str, Any]
    ) -> None:
        self._job, self._workers = job, workers
        self._is_paused = job.config.rollout.asynchronous.partial  # during updates
        engines = LoopingEngines(workers.engines.workers, workers.engines.restart_lost)
        publish = workers.weights.publish
        self._rollouts = AsyncRollouts(job, engines, workers.scorer, publish, state)
        self._num_empty = 0

    def evaluator(self, log: RolloutLog) -> Evaluator:
        return RolloutEvaluator(self._job, self._rollouts, self._workers.scorer, log)

    @contextmanager
    def running(self) -> Iterator[None]:
        self._workers.trainers.onload()
        with self._rollouts:
            yield

    def take(self, step: int, clock: Clock) -> StepRollouts:
        return self._rollouts.take(step, clock)

    def begin_update(self, clock: Clock) -> None:
        if self._is_paused:
            self._rollouts.pause()

    def check(self, prepared: PreparedStep) -> None:
        self._num_empty = 0 if num_loss_tokens(prepared.sequences) else self._num_empty + 1
        if self._num_empty == _MAX_EMPTY_STEPS:
            raise MsrlError(
                f"rollout.filter: {_MAX_EMPTY_STEPS} successive steps have no group to train on. "
                "Check the rewards, or relax rollout.filter and algo.mask."
            )

    def publish(self, version: int, clock: Clock) -> None:
        with clock("weights"):
            self._rollouts.publish(version)
        if self._is_paused:
            self._rollouts.resume()

    def state(self) -> Mapping[str, Any]:
        return self._rollouts.state()

    def finish(self) -> None:
        """Verify the last weights that engines have loaded."""
        with suppress(ProcessFailedError):  # an engine that is lost now is no longer needed
            self._workers.weights.verify_published()
