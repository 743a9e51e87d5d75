"""Trainings in one process, one after the other: their ranks and engines are real, but start no
processes. Transfers between processes, Ray and restarts have their own tests.
"""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_workers import FakeWorkers
from msrl.platforms import get
from msrl.platforms.base import Platform
from msrl.rollout.engine import EngineSettings
from msrl.rollout.vllm import VllmEngine
from msrl.workflows.training.transport.base import Calls
from msrl.workflows.training.transport.local import LocalWorkers, local_workers
from support import python_path

_engines: dict[str, VllmEngine] = {}  # by their settings


@contextmanager
def one_process(folder: Path) -> Iterator[LocalWorkers]:
    """Start a process that runs trainings: `call("run", *ARGUMENTS)` returns [problem]."""
    env = {"MPLCONFIGDIR": str(folder), "PYTHONPATH": python_path()}
    with local_workers(Runner, num_workers=1, platform=get("cpu"), env=env) as workers:
        yield workers


class Runner:
    """Runner of `msrl ARGUMENTS` in its own process."""

    def __init__(self, rank: int, world_size: int) -> None:
        from msrl.rollout import vllm
        from msrl.workflows.rl import workers
        from msrl.workflows.training import trainers

        vllm.VllmEngine = _engine
        workers.start_workers = _rl_workers
        trainers.local_workers = _ranks

    def run(self, *arguments: str) -> str:
        """Run a command; return its traceback, "" after a success."""
        from msrl.cli.app import app

        try:
            app(list(arguments), standalone_mode=False)
        except BaseException:
            return traceback.format_exc()
        return ""


def _engine(settings: EngineSettings, platform: Platform) -> VllmEngine:
    """Return the engine of equal settings, whichever their seed: every request has its own."""
    settings = replace(settings, seed=0)
    key = repr(settings)
    if key not in _engines:
        _engines[key] = VllmEngine(settings, platform)
    return _engines[key]


class OneWorker(FakeWorkers):
    """Worker in this process: a call runs as it begins."""

    def __init__(self, worker: Any) -> None:
        super().__init__(1)
        self._worker = worker

    def rendezvous(self) -> str:
        """Return the path of a new store."""
        return f"file://{tempfile.mkdtemp(dir=os.environ['MPLCONFIGDIR'])}/store"

    def begin_each(self, method: str, arguments: Mapping[int, Sequence[Any]]) -> Calls:
        return Calls({n: getattr(self._worker, method)(*own) for n, own in arguments.items()})


@contextmanager
def _ranks(make_worker: Any, *, num_workers: int, **_: Any) -> Iterator[OneWorker]:
    assert num_workers == 1
    with closed_after_errors(make_worker(0, 1)) as worker:
        yield OneWorker(worker)


@contextmanager
def closed_after_errors(worker: Any) -> Iterator[Any]:
    """Close a rank if the training does not come to that."""
    try:
        yield worker
    except BaseException:
        worker.close()
        raise


@contextmanager
def _rl_workers(job: Any, teachers: Any, restarts: Any) -> Iterator[Any]:
    """Yield the workers of a run with one rank and one engine."""
    import torch

    from msrl.workflows.rl import workers
    from msrl.workflows.rl.engine_group import EngineGroup
    from msrl.workflows.rl.model_groups import ModelGroups
    from msrl.workflows.rl.rollout_actor import RolloutActor
    from msrl.workflows.rl.setup import numbered_engine_settings
    from msrl.workflows.rl.weight_transfer import WeightTransfer
    from msrl.workflows.scoring import make_scorer
    from msrl.workflows.training.settings import rank_settings
    from msrl.workflows.training.train_worker import TrainWorker
    from msrl.workflows.training.trainer_group import TrainerGroup
    from msrl.workflows.training.trainers import save_plan

    class Transfer(WeightTransfer):
        """Weights of the rank, which the engine reads."""

        def _transfer(self) -> None:
            with torch.no_grad():
                weights = list(rank._collect(everywhere=False))
            engine._engine.load_weights(weights)

        reconnect = publish = verify_published = None

    with ExitStack() as stack:
        scorer = stack.enter_context(make_scorer(job.plan, job.tokenizer, job.platform))
        models = {n: Path(model.path).absolute() for n, model in scorer.rank_models.items()}
        rank = TrainWorker(rank_settings(job.plan, "cpu", reward_models=models), 0, 1)
        trainers = ModelGroups(TrainerGroup(OneWorker(rank)), {}, shares_devices=True)
        trainers.start(job.resume, save_plan(job.plan))
        stack.enter_context(closed_after_errors(rank))
        (settings,) = numbered_engine_settings(job.plan)
        engine = RolloutActor(settings, "cpu", job.episodes)
        engines = EngineGroup(OneWorker(engine), restarts)
        engines.finish_start(engines.begin_start())
        Transfer.__abstractmethods__ = frozenset()
        weights = Transfer(trainers, engines, job.config.rollout.weights)
        weights.update(job.start_step)
        yield workers.EngineWorkers(trainers, teachers, engines, weights, scorer)
        trainers.close()
