"""The GRPO training loop over Ray actors that generate and train.

A step generates and scores groups of completions (`rollouts.py`), computes advantages and updates
the policy on packed micro-batches (`update.py`), and sends the new weights to the engines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from msrl.algorithms.samples import decided_matrix, length_matrix, reward_matrix
from msrl.checks.asynchronous import is_corrected
from msrl.cluster.ports import Ports
from msrl.cluster.session import PlacedWorkers, Session, ray_session
from msrl.cluster.state import tls_files
from msrl.errors import MsrlError, ProcessFailedError
from msrl.plan.derived import updates_per_step
from msrl.plan.run_plan import RunPlan
from msrl.rewards.score import Scorer, Source
from msrl.rollout.engine import is_eager
from msrl.tracking.plots import CURVES, plot_distributions
from msrl.tracking.progress import duration_text
from msrl.tracking.rollouts import LoggedValues
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.trainer.objective.batches import num_loss_tokens
from msrl.types import Ints, StepReport
from msrl.workflows.rl.asynchronous.engines import LoopingEngines
from msrl.workflows.rl.asynchronous.rollouts import AsyncRollouts
from msrl.workflows.rl.engine_group import EngineGroup, engine_environments
from msrl.workflows.rl.evaluation import RolloutEvaluator, judge
from msrl.workflows.rl.logprob_gap import GapMonitor
from msrl.workflows.rl.model_groups import ModelGroups, separate_groups
from msrl.workflows.rl.rollout_actor import RolloutActor
from msrl.workflows.rl.rollout_log.log import RolloutLog
from msrl.workflows.rl.rollouts import Rollouts, StepRollouts
from msrl.workflows.rl.setup import RLSetup, numbered_engine_settings, prepare
from msrl.workflows.rl.step import Clock, step_metrics
from msrl.workflows.rl.teacher_servers import TeacherServers
from msrl.workflows.rl.teacher_servers import connect as connect_teachers
from msrl.workflows.rl.token_values import TokenValues, size_note
from msrl.workflows.rl.update import PreparedStep, Updater
from msrl.workflows.rl.weight_transfer import WeightTransfer, connect
from msrl.workflows.training.completed import finish_completed
from msrl.workflows.training.mfu import mfu
from msrl.workflows.training.preflight import check_start
from msrl.workflows.training.restarts import Restarts
from msrl.workflows.training.run_log import counted
from msrl.workflows.training.session import TrainingSession, open_session
from msrl.workflows.training.settings import (
    rank_settings,
)
from msrl.workflows.training.trainers import ray_trainers, save_plan
from msrl.workflows.training.transport.ray_actors import RayWorkers

_MAX_EMPTY_STEPS = 10  # in succession
_SILENCE = 0.8  # of cluster.rpc_timeout_s: an engine that hangs is found before its callers give up


def run(plan: RunPlan) -> None:
    """Train a model as configured.

    Raises:
        MsrlError: The configuration is invalid. It is checked before Ray starts.
    """
    job = prepare(plan)
    if job.resume is not None and job.resume.step == job.num_steps:
        finish_completed(plan, job.resume, CURVES["train-grpo"])
        return
    check_start(plan, job.platform, job.resume)
    teachers = connect_teachers(job.config.algo.distill.teachers, job.tokenizer, plan.max_model_len)
    with open_session(
        plan,
        start_step=job.start_step,
        num_steps=job.num_steps,
        resume=job.resume,
        curves=CURVES["train-grpo"],
    ) as session:
        start_time = time.perf_counter()
        if size := size_note(job.config, job.num_steps):
            session.note(size)
        ranks = counted(plan.world_size, "training rank")
        engines = counted(plan.num_engines, "engine")
        session.note(
            f"Starting {ranks} and {engines} on {job.platform.name}. The run is written to "
            f"{session.run_dir}"
        )
        for line in teachers.notes:
            session.note(line)
        with _workers(job, teachers, session.restarts) as workers:
            session.note(
                f"All workers started in {duration_text(time.perf_counter() - start_time)}"
            )
            is_async = job.config.rollout.asynchronous.is_on
            train = _train_asynchronously if is_async else _train
            session.run(
                lambda resume: train(replace(job, resume=resume), workers, session),
                lambda resume: _restart(job, workers, resume),
            )
        session.finish()


@dataclass(frozen=True, slots=True)
class _Workers:
    """Workers of a run."""

    trainers: ModelGroups
    engines: EngineGroup
    weights: WeightTransfer
    scorer: Scorer
    teachers: TeacherServers


def _train(job: RLSetup, workers: _Workers, session: TrainingSession) -> None:
    """Run the remaining steps."""
    trainers, engines = workers.trainers, workers.engines
    state = job.resume.state()["extra"] if job.resume else {}
    updater = _updater(job, workers, state)
    rollouts = Rollouts(job, engines, workers.scorer, state)
    rollout_log = _rollout_log(job, session)
    token_values = _token_values(job, trainers, rollout_log, session)
    gaps = _gap_monitor(job, session)
    evaluator = RolloutEvaluator(job, engines, workers.scorer, rollout_log)
    with session.training(trainers, evaluator), rollout_log:
        session.evaluate_at_start()
        for step in session.steps():
            clock = Clock()
            batch = rollouts.generate(step, clock)
            with clock("weights"):
                engines.offload(discard_weights=True)
                trainers.onload()
            prepared = updater.prepare(batch.train_groups, clock, batch.dropped_groups)
            values = token_values.of_step(prepared, clock)
            trained = updater.update(prepared, step, clock)
            with clock("weights"):
                workers.weights.update(step + 1)
            gap = gaps.metrics(step, prepared, batch.train_groups, values, trained)
            report = _step_report(job, step + 1, batch, prepared, trained, gap, clock)
            _log_rollouts(rollout_log, step + 1, batch, prepared, values, clock)
            _plot_distributions(job, session, step + 1, batch)
            if session.after_step(report):
                rollout_log.wait()  # a resume does not repeat the steps of a checkpoint
                engines.offload()
                session.save({**job.state, **rollouts.state(), **updater.state()})
                trainers.offload()
                engines.onload()


def _train_asynchronously(job: RLSetup, workers: _Workers, session: TrainingSession) -> None:
    """Run the remaining steps while the engines generate for later ones."""
    config, trainers = job.config, workers.trainers
    options = config.rollout.asynchronous
    if options.allow_uncorrected and not is_corrected(config.algo):
        session.note(
            f"rollout.async.max_staleness={options.max_staleness}: the run trains on samples of "
            "older policies without a correction"
        )
    state = job.resume.state()["extra"] if job.resume else {}
    updater = _updater(job, workers, state)
    engines = LoopingEngines(workers.engines.workers, workers.engines.restart_lost)
    publish = workers.weights.publish
    rollouts = AsyncRollouts(job, engines, workers.scorer, publish, state)
    rollout_log = _rollout_log(job, session)
    token_values = _token_values(job, trainers, rollout_log, session)
    gaps = _gap_monitor(job, session)
    evaluator = RolloutEvaluator(job, rollouts, workers.scorer, rollout_log)
    empty_steps = 0
    trainers.onload()
    with session.training(trainers, evaluator), rollouts, rollout_log:
        session.evaluate_at_start()
        for step in session.steps():
            clock = Clock()
            batch = rollouts.take(step, clock)
            if options.partial:
                rollouts.pause()
            prepared = updater.prepare(batch.train_groups, clock, batch.dropped_groups)
            empty_steps = _count_empty(prepared, empty_steps)
            values = token_values.of_step(prepared, clock)
            trained = updater.update(prepared, step, clock)
            with clock("weights"):
                rollouts.publish(step + 1)
            if options.partial:
                rollouts.resume()
            gap = gaps.metrics(step, prepared, batch.train_groups, values, trained)
            report = _step_report(job, step + 1, batch, prepared, trained, gap, clock)
            _log_rollouts(rollout_log, step + 1, batch, prepared, values, clock)
            _plot_distributions(job, session, step + 1, batch)
            if session.after_step(report):
                rollout_log.wait()  # a resume does not repeat the steps of a checkpoint
                session.save({**job.state, **rollouts.state(), **updater.state()})
    with suppress(ProcessFailedError):  # an engine that is lost now is no longer needed
        workers.weights.verify_published()


def _updater(job: RLSetup, workers: _Workers, state: Mapping[str, Any]) -> Updater:
    return Updater(
        job.config,
        workers.trainers,
        job.num_steps,
        state,
        workers.teachers,
        has_rewards=not job.plan.is_distillation,
    )


def _rollout_log(job: RLSetup, session: TrainingSession) -> RolloutLog:
    log = job.config.log
    return RolloutLog(
        session.run_dir,
        job.tokenizer,
        is_on=log.save_rollouts,
        format=log.rollouts,
        judge=judge(job.config),
    )


def _token_values(
    job: RLSetup, trainers: ModelGroups, log: RolloutLog, session: TrainingSession
) -> TokenValues:
    return TokenValues(job.config, trainers, log, session.note)


def _gap_monitor(job: RLSetup, session: TrainingSession) -> GapMonitor:
    config = job.config
    is_async = config.rollout.asynchronous.is_on
    has_one_update = updates_per_step(config) == 1 and not is_async
    return GapMonitor(config.model.dtype, session.run_dir, session.note, is_async, has_one_update)


def _log_rollouts(
    log: RolloutLog,
    step: int,
    batch: StepRollouts,
    prepared: PreparedStep,
    values: LoggedValues,
    clock: Clock,
) -> None:
    """Begin to write the rollouts of a step."""
    log.write(
        step,
        batch.train_groups,
        prepared.samples,
        batch.dropped_groups,
        sequences=prepared.sequences,
        values=values,
        times=clock.ended_at,
    )


def _plot_distributions(
    job: RLSetup, session: TrainingSession, step: int, batch: StepRollouts
) -> None:
    """Plot lengths and rewards of all responses of a step, if `log.length_plot_every` is set."""
    every = job.config.log.length_plot_every
    if every is None or step % every:
        return
    groups = batch.scores.groups
    values: dict[str, Sequence[float]] = {
        "response length in tokens": length_matrix(groups).ravel().tolist(),
        "reward": reward_matrix(groups)[decided_matrix(groups)].tolist(),
    }
    path = session.run_dir / "distributions" / f"step_{step:06d}.png"
    plot_distributions(values, path, title=f"{session.run_dir.name}, step {step}")


def _count_empty(prepared: PreparedStep, num_before: int) -> int:
    """Return the number of successive steps that have no token to train on.

    Raises:
        MsrlError: There are too many.
    """
    if num_loss_tokens(prepared.sequences):
        return 0
    if num_before + 1 == _MAX_EMPTY_STEPS:
        raise MsrlError(
            f"rollout.filter: {_MAX_EMPTY_STEPS} successive steps have no group to train on. Check "
            "the rewards, or relax rollout.filter and algo.mask."
        )
    return num_before + 1


def _restart(job: RLSetup, workers: _Workers, resume: SavedTraining | None) -> None:
    """Restart the ranks. The engines stay, and load the weights of the checkpoint."""
    workers.trainers.end()
    workers.engines.offload(discard_weights=True)
    workers.trainers.restart(resume, save_plan(job.plan))
    workers.weights.reconnect()
    workers.weights.update(resume.step if resume is not None else 0)


def _step_report(
    job: RLSetup,
    step: int,
    batch: StepRollouts,
    prepared: PreparedStep,
    trained: Mapping[str, float],
    gap: Mapping[str, float],
    clock: Clock,
) -> StepReport:
    """Return the report of a step."""
    metrics = {
        **step_metrics(batch.scores, trained, clock.seconds),
        **gap,
        **batch.metrics,
        **_mfu(job, prepared, clock),
    }
    seconds = {**clock.seconds, "step": sum(clock.seconds.values())}
    return StepReport(step, metrics, seconds, batch.scores.notes)


def _mfu(job: RLSetup, prepared: PreparedStep, clock: Clock) -> dict[str, float]:
    """Return the model FLOPs utilization of the policy's updates; nothing for a step without one.

    Generation is excluded because memory bandwidth limits it, not arithmetic.
    """
    shape, seconds = job.plan.shape, clock.seconds.get("update", 0.0)
    if not seconds:
        return {}
    sequences, epochs = prepared.sequences, job.config.train.updates.epochs
    num_tokens = num_loss_tokens(sequences)
    return mfu(shape, job.config, job.platform, [sequences], num_tokens, seconds, passes=epochs)


@contextmanager
def _workers(job: RLSetup, teachers: TeacherServers, restarts: Restarts) -> Iterator[_Workers]:
    """Start all workers in a Ray cluster, the configured or a new one; stop them at the end."""
    cluster, platform = job.config.cluster, job.platform
    with ExitStack() as stack:
        scorer = stack.enter_context(_scorer(job))
        session = stack.enter_context(
            ray_session(
                cluster.address,
                num_devices=job.placement.num_devices,
                resource_name=platform.ray_resource,
                env=cluster.env,
                tls=tls_files(cluster.tls),
            )
        )
        placed = session.create_placement(job.placement, timeout_s=cluster.wait_for_nodes_s)
        # Ray returns the devices of the engines only before any actor is started.
        collectives = platform.collective_environment(
            "engine", timeout_s=cluster.rpc_timeout_s, variables=cluster.env
        )
        env = {**collectives, **cluster.env}
        ports = None if cluster.ports is None else Ports.parse(cluster.ports)
        engine_settings = numbered_engine_settings(job.plan)
        eager = is_eager(engine_settings[0].engine, platform)
        engine_env = engine_environments(placed, platform, env, ports, is_eager=eager)
        trainers = _model_groups(job, scorer, session, placed)
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
        yield _Workers(trainers, engines, weights, scorer, teachers)
        engines.release()


def _model_groups(
    job: RLSetup, scorer: Scorer, session: Session, placed: PlacedWorkers
) -> ModelGroups:
    """Create the actors of all ranks. They also hold the reward models of `scorer`."""
    config, plan, platform = job.config, job.plan, job.platform
    reward_models = {
        name: Path(model.path).absolute() for name, model in scorer.rank_models.items()
    }
    settings = rank_settings(plan, platform.name, reward_models=reward_models)
    timeout_s = config.cluster.rpc_timeout_s
    trainers = ray_trainers(session, placed, config, settings, platform, timeout_s=timeout_s)
    separate = separate_groups(plan, session, placed, platform, reward_models)
    return ModelGroups(trainers, separate, shares_devices=not plan.has_separate_engines)


def _start(trainers: ModelGroups, engines: EngineGroup, job: RLSetup) -> WeightTransfer:
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


def _scorer(job: RLSetup) -> Scorer:
    """Return the scorer of the configured sources.

    Servers and models get prompts as the policy sees them, special tokens included.
    """

    def prompt_text(token_ids: Ints) -> str:
        return job.tokenizer.backend.decode(token_ids.tolist(), skip_special_tokens=False)

    sources = [Source.of(section) for section in job.config.reward.sources]
    environment = job.config.environment
    return Scorer(
        sources,
        num_workers=max(1, min(8, job.platform.device_count())),
        prompt_text=prompt_text,
        read_config=job.plan.hf_config,
        environment_weight=environment.reward_weight if environment.is_on else None,
        is_optional=job.plan.is_distillation,
    )
