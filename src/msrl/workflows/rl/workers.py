"""Workers of a run: ranks, engines and scorers in a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msrl.cluster.ports import Ports
from msrl.cluster.session import PlacedWorkers, Session, ray_session
from msrl.cluster.state import tls_files
from msrl.plan.run_plan import RunPlan, run_folder
from msrl.rewards.models.on_ranks import RankModel
from msrl.rewards.score import Scorer
from msrl.rollout.engine import is_eager
from msrl.tracking.run import RAY_LOGS
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.types import Ints
from msrl.workflows.rl.engine_group import EngineGroup, engine_environments
from msrl.workflows.rl.model_groups import ModelGroups, separate_groups
from msrl.workflows.rl.rollout_actor import RolloutActor
from msrl.workflows.rl.setup import GenerationSetup, RLSetup, numbered_engine_settings
from msrl.workflows.rl.teacher_servers import TeacherServers
from msrl.workflows.rl.weight_transfer import WeightTransfer, connect
from msrl.workflows.scoring import make_scorer
from msrl.workflows.training.restarts import Restarts
from msrl.workflows.training.settings import rank_settings
from msrl.workflows.training.trainers import ray_ranks, save_plan
from msrl.workflows.training.transport.ray_actors import RayWorkers

_SILENCE = 0.8  # of cluster.rpc_timeout_s: an engine that hangs is found before its callers give up


@dataclass(frozen=True, slots=True)
class Workers:
    """Workers of a run."""

    trainers: ModelGroups
    teachers: TeacherServers

    def restart(self, plan: RunPlan, resume: SavedTraining | None) -> None:
        """Restart the ranks from a checkpoint, None for the initial weights."""
        self.trainers.end()
        self.trainers.restart(resume, save_plan(plan))


@dataclass(frozen=True, slots=True)
class EngineWorkers(Workers):
    """Workers of a run whose engines generate the rollouts."""

    engines: EngineGroup
    weights: WeightTransfer
    scorer: Scorer

    def restart(self, plan: RunPlan, resume: SavedTraining | None) -> None:
        """Restart the ranks. The engines stay, and load the weights of the checkpoint."""
        self.trainers.end()
        self.engines.offload(discard_weights=True)
        self.trainers.restart(resume, save_plan(plan))
        self.weights.reconnect()
        self.weights.update(resume.step if resume is not None else 0)


@contextmanager
def open_placement(job: RLSetup) -> Iterator[tuple[Session, PlacedWorkers]]:
    """Connect to Ray, the configured cluster or a new one, and reserve the devices of a run."""
    cluster, platform = job.config.cluster, job.platform
    with ray_session(
        cluster.address,
        num_devices=job.placement.num_devices,
        resource_name=platform.ray_resource,
        env=cluster.env,
        tls=tls_files(cluster.tls),
        logs=run_folder(job.config) / RAY_LOGS,
    ) as session:
        yield (
            session,
            session.create_placement(job.placement, timeout_s=cluster.wait_for_nodes_s),
        )


@contextmanager
def start_workers(
    job: GenerationSetup, teachers: TeacherServers, restarts: Restarts
) -> Iterator[EngineWorkers]:
    """Start all workers in a Ray cluster, the configured or a new one; stop them at the end."""
    cluster, platform = job.config.cluster, job.platform
    with ExitStack() as stack:
        scorer = stack.enter_context(make_scorer(job.plan, job.tokenizer, platform))
        session, placed = stack.enter_context(open_placement(job))
        # Ray returns the devices of the engines only before any actor is started.
        collectives = platform.collective_environment(
            "engine", timeout_s=cluster.rpc_timeout_s, variables=cluster.env
        )
        env = {**collectives, **cluster.env}
        ports = None if cluster.ports is None else Ports.parse(cluster.ports)
        engine_settings = numbered_engine_settings(job.plan)
        eager = is_eager(engine_settings[0].engine, platform)
        engine_env = engine_environments(placed, platform, env, ports, is_eager=eager)
        trainers = model_groups(job, scorer.rank_models, session, placed)
        engines = EngineGroup(
            RayWorkers(
                session,
                placed,
                "rollout",
                RolloutActor,
                [(settings, platform.name, job.episodes) for settings in engine_settings],
                engine_env,
                timeout_s=cluster.rpc_timeout_s,
                silence_s=_SILENCE * cluster.rpc_timeout_s,
                wait_for_nodes_s=cluster.wait_for_nodes_s,
                watched=("actor", "rollout"),
            ),
            restarts,
            shares_devices=not job.plan.has_separate_engines,
        )
        weights = _start(trainers, engines, job)
        engines.restore_with(weights.reload)
        for name, model in scorer.rank_models.items():
            model.connect(partial(_rank_scores, trainers, engines, name))
        yield EngineWorkers(trainers, teachers, engines, weights, scorer)
        engines.release()


def model_groups(
    job: RLSetup, models: Mapping[str, RankModel], session: Session, placed: PlacedWorkers
) -> ModelGroups:
    """Create the actors of all ranks. They also hold the reward models."""
    config, plan, platform = job.config, job.plan, job.platform
    reward_models = rank_model_folders(models)
    settings = rank_settings(plan, platform.name, reward_models=reward_models)
    timeout_s = config.cluster.rpc_timeout_s
    trainers = ray_ranks(session, placed, config, settings, platform, timeout_s=timeout_s)
    separate = separate_groups(plan, session, placed, platform, reward_models)
    return ModelGroups(trainers, separate, shares_devices=not plan.has_separate_engines)


def rank_model_folders(models: Mapping[str, RankModel]) -> dict[str, Path]:
    """Return the folders of reward models on the ranks, by the label of their source."""
    return {name: Path(model.path).absolute() for name, model in models.items()}


def _start(trainers: ModelGroups, engines: EngineGroup, job: GenerationSetup) -> WeightTransfer:
    """Load the models of ranks and engines; return the transfer between them.

    They load at the same time only in main memory or on separate devices: on a shared device,
    engines measure the free memory, so they start after the ranks.
    """
    at_once = job.platform.shares_main_memory or job.plan.has_separate_engines
    pending = engines.begin_start() if at_once else None
    trainers.start(job.resume, save_plan(job.plan))
    trainers.start_separate(job.resume)
    engines.finish_start(engines.begin_start() if pending is None else pending)
    weights = connect(
        trainers,
        engines,
        job.config.rollout.weights,
        job.config.cluster.rpc_timeout_s,
        is_staged=not at_once,
        processes_per_engine=job.config.rollout.engine.tp,
        shares_main_memory=job.platform.shares_main_memory,
        shares_devices=not job.plan.has_separate_engines,
        adapter_scale=_adapter_scale(job),
    )
    weights.update(job.start_step)
    return weights


def _adapter_scale(job: RLSetup) -> float | None:
    """Return the factor of adapters that engines add to the base weights; None if ranks do."""
    lora = job.config.train.lora
    if lora.rank is None or not job.config.rollout.weights.adapters_only:
        return None
    return lora.alpha / lora.rank


def _rank_scores(
    trainers: ModelGroups,
    engines: EngineGroup,
    name: str,
    token_ids: Sequence[Ints],
    batch: int,
) -> list[float]:
    """Return the scores of a reward model on ranks, which may need the engines' memory."""
    if not trainers.has_separate("reward"):
        engines.offload()
    return trainers.scores(name, token_ids, batch)
