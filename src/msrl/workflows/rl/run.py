"""The GRPO training loop over Ray actors that generate and train.

A step generates and scores groups of completions (`rollouts.py`), computes advantages and updates
the policy on packed micro-batches (`update.py`), and sends the new weights to the engines.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from msrl.cluster.session import PlacedWorkers, Session, ray_session
from msrl.cluster.state import tls_files
from msrl.plan.run_plan import RunPlan
from msrl.rewards.score import Scorer, Source
from msrl.rollout.engine import EngineSettings
from msrl.tracking.progress import duration_text
from msrl.trainer.objective.batches import num_loss_tokens
from msrl.types import Ints, StepReport
from msrl.workflows.rl.engine_group import EngineGroup, engine_environments
from msrl.workflows.rl.evaluation import RolloutEvaluator
from msrl.workflows.rl.rollout_actor import RolloutActor
from msrl.workflows.rl.rollout_log import RolloutLog
from msrl.workflows.rl.rollouts import Rollouts, StepRollouts
from msrl.workflows.rl.setup import RLSetup, prepare
from msrl.workflows.rl.step import Clock, step_metrics
from msrl.workflows.rl.update import PreparedStep, Updater
from msrl.workflows.serve.engine import engine_settings
from msrl.workflows.training.completed import finish_completed
from msrl.workflows.training.mfu import mfu
from msrl.workflows.training.preflight import check_start
from msrl.workflows.training.run_log import counted
from msrl.workflows.training.session import TrainingSession, open_session
from msrl.workflows.training.settings import (
    rank_settings,
)
from msrl.workflows.training.trainer_group import TrainerGroup
from msrl.workflows.training.trainers import ray_trainers, save_plan
from msrl.workflows.training.transport.ray_actors import RayWorkers

CURVES = (
    "reward/mean",
    "rollout/response_length",
    "train/kl",
    "train/entropy",
    "train/grad_norm",
    "train/value_explained_variance",
    "eval/pass@1",
    "eval/reward",
)


def run(plan: RunPlan) -> None:
    """Train a model as configured.

    Raises:
        MsrlError: The configuration is invalid. It is checked before Ray starts.
    """
    config, job = plan.config, prepare(plan)
    if job.resume is not None and job.resume.step == job.num_steps:
        finish_completed(plan, job.resume, CURVES)
        return
    check_start(plan, job.platform, job.resume)
    with open_session(
        plan,
        start_step=job.start_step,
        num_steps=job.num_steps,
        resume=job.resume,
        curves=CURVES,
    ) as session:
        start_time = time.perf_counter()
        ranks = counted(plan.world_size, "training rank")
        engines = counted(config.rollout.engine.dp, "engine")
        session.note(
            f"Starting {ranks} and {engines} on {job.platform.name}. The run is written to "
            f"{session.run_dir}"
        )
        with _workers(job) as workers:
            session.note(
                f"All workers started in {duration_text(time.perf_counter() - start_time)}"
            )
            _train(job, workers, session)
        session.finish()


@dataclass(frozen=True, slots=True)
class _Workers:
    """Workers of a run."""

    trainers: TrainerGroup
    engines: EngineGroup
    scorer: Scorer


def _train(job: RLSetup, workers: _Workers, session: TrainingSession) -> None:
    """Run the remaining steps."""
    config, trainers, engines = job.config, workers.trainers, workers.engines
    state = job.resume.state()["extra"] if job.resume else {}
    updater = Updater(config, trainers, job.num_steps, state)
    rollouts = Rollouts(job, engines, workers.scorer, state)
    rollout_log = RolloutLog(session.run_dir, job.tokenizer, is_on=config.log.save_rollouts)
    evaluator = RolloutEvaluator(job, engines, workers.scorer, rollout_log)
    with session.training(trainers, evaluator):
        session.evaluate_at_start()
        for step in session.steps():
            clock = Clock()
            batch = rollouts.generate(step, clock)
            with clock("weights"):
                engines.offload()
                trainers.onload()
            prepared = updater.prepare(batch.train_groups, clock, batch.dropped_groups)
            trained = updater.update(prepared, step, clock)
            with clock("weights"):
                weights = trainers.weights()
                trainers.offload()
                engines.onload()
                engines.load_weights(weights)
            report = _step_report(job, step + 1, batch, prepared, trained, clock)
            rollout_log.write(step + 1, batch.train_groups, prepared.samples, batch.dropped_groups)
            if session.after_step(report):
                engines.offload()
                session.save({**job.state, **rollouts.state(), **updater.state()})
                trainers.offload()
                engines.onload()


def _step_report(
    job: RLSetup,
    step: int,
    batch: StepRollouts,
    prepared: PreparedStep,
    trained: Mapping[str, float],
    clock: Clock,
) -> StepReport:
    """Return the report of a step."""
    metrics = {
        **step_metrics(batch.scores, trained, clock.seconds),
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
def _workers(job: RLSetup) -> Iterator[_Workers]:
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
        placed = session.create_placement(job.placement)
        # Ray returns the devices of the engines only before any actor is started.
        engine_env = engine_environments(placed, platform, job.config.rollout.engine, cluster.env)
        trainers = _trainer_group(job, scorer, session, placed)
        engines = EngineGroup(
            RayWorkers(
                session,
                placed,
                "rollout",
                RolloutActor,
                [(_engine_settings(job.plan), platform.name)] * len(engine_env),
                engine_env,
                timeout_s=cluster.rpc_timeout_s,
            )
        )
        _start(trainers, engines, job)
        for name, model in scorer.rank_models.items():
            model.connect(partial(_rank_scores, trainers, engines, name))
        yield _Workers(trainers, engines, scorer)
        engines.release()


def _trainer_group(
    job: RLSetup, scorer: Scorer, session: Session, placed: PlacedWorkers
) -> TrainerGroup:
    """Create the actors of the training ranks, which also hold the reward models of `scorer`."""
    config, platform = job.config, job.platform
    reward_models = {
        name: Path(model.path).absolute() for name, model in scorer.rank_models.items()
    }
    settings = rank_settings(
        job.plan,
        platform.name,
        resume=job.resume,
        reference=job.plan.model.weights if job.plan.needs_reference else None,
        reward_models=reward_models,
    )
    timeout_s = config.cluster.rpc_timeout_s
    return ray_trainers(session, placed, config, settings, platform, timeout_s=timeout_s)


def _start(trainers: TrainerGroup, engines: EngineGroup, job: RLSetup) -> None:
    """Load the models of ranks and engines.

    They load at the same time only in main memory: on a device, engines measure the free memory, so
    they start after the ranks.
    """
    pending = engines.begin_start() if job.platform.shares_main_memory else None
    trainers.start(job.resume, save_plan(job.plan))
    engines.finish_start(engines.begin_start() if pending is None else pending)
    weights = trainers.weights()
    trainers.offload()
    engines.load_weights(weights)


def _rank_scores(
    trainers: TrainerGroup,
    engines: EngineGroup,
    name: str,
    token_ids: Sequence[Ints],
    batch: int,
) -> list[float]:
    """Return the scores of a reward model on the ranks, which needs the devices' memory."""
    engines.offload()
    return trainers.scores(name, token_ids, batch)


def _scorer(job: RLSetup) -> Scorer:
    """Return the scorer of the configured sources.

    Servers and models get prompts as the policy sees them, special tokens included.
    """

    def prompt_text(token_ids: Ints) -> str:
        return job.tokenizer.backend.decode(token_ids.tolist(), skip_special_tokens=False)

    sources = [Source.of(section) for section in job.config.reward.sources]
    return Scorer(
        sources,
        num_workers=max(1, min(8, job.platform.device_count())),
        prompt_text=prompt_text,
        read_config=job.plan.hf_config,
    )


def _engine_settings(plan: RunPlan) -> EngineSettings:
    """Return the settings of an engine.

    It starts with random weights, which the ranks replace before the first prompt.
    """
    settings = engine_settings(
        plan.config,
        plan.model.hf_dir,
        dtype=plan.dtype,
        max_model_len=plan.max_model_len,
        random_weights=True,
    )
    return replace(settings, tokenizer_dir=plan.tokenizer_dir)
