"""Start of a run: its setup, workers and source of rollouts, with engines or from a record."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from msrl.plan.run_plan import RunPlan
from msrl.platforms.base import Platform
from msrl.workflows.rl import setup, workers
from msrl.workflows.rl.replay.setup import ReplaySetup, prepare_replay
from msrl.workflows.rl.replay.source import ReplaySource, ReplayWorkers, start_replay_workers
from msrl.workflows.rl.setup import GenerationSetup, RLSetup
from msrl.workflows.rl.sources import AsynchronousSource, RolloutSource, SynchronousSource
from msrl.workflows.rl.teacher_servers import TeacherServers
from msrl.workflows.rl.workers import EngineWorkers, Workers
from msrl.workflows.training.restarts import Restarts


def prepare(plan: RunPlan, platform: Platform | None = None) -> RLSetup:
    """Check everything that can be checked before the start and return the setup of the run.

    `platform` is that of the configuration by default, which this machine must support then.

    Raises:
        MsrlError: The configuration, the data, the record or the checkpoint is invalid.
    """
    return (prepare_replay if plan.is_replay else setup.prepare)(plan, platform)


def start_workers(
    job: RLSetup, teachers: TeacherServers, restarts: Restarts
) -> AbstractContextManager[Workers]:
    """Start all workers of a run; stop them at the end of the context."""
    if isinstance(job, ReplaySetup):
        return start_replay_workers(job, teachers)
    assert isinstance(job, GenerationSetup)
    return workers.start_workers(job, teachers, restarts)


def rollout_source(job: RLSetup, workers: Workers, state: Mapping[str, Any]) -> RolloutSource:
    """Return the source of a run that starts from the state of a checkpoint, or an empty one."""
    if isinstance(job, ReplaySetup):
        assert isinstance(workers, ReplayWorkers)
        return ReplaySource(job, workers)
    assert isinstance(job, GenerationSetup)
    assert isinstance(workers, EngineWorkers)
    is_async = job.config.rollout.asynchronous.is_on
    return (AsynchronousSource if is_async else SynchronousSource)(job, workers, state)
