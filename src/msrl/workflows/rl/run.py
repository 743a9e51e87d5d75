"""The GRPO training loop over Ray actors that generate and train.

A step generates and scores groups of completions (`rollouts.py`), computes advantages and updates
the policy on packed micro-batches (`update.py`), and sends the new weights to the engines.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from msrl.cluster.session import PlacedWorkers, Session, ray_session
from msrl.config.schema import Config
from msrl.models.paths import config_dir
from msrl.models.reward_head import has_classifier
from msrl.plan.derived import (
    critic_shape,
    max_model_len,
    model_shape,
    needs_critic,
    needs_reference,
    world_size,
)
from msrl.platforms.base import Platform
from msrl.rewards.failures import RewardSourceError
from msrl.rewards.score import Scorer, Source
from msrl.rollout.engine import EngineSettings
from msrl.tracking.progress import duration_text
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.trainer.objective.batches import num_loss_tokens
from msrl.types import Ints, StepReport
from msrl.workflows.rl.actors import SavePlan
from msrl.workflows.rl.evaluation import Evaluator
from msrl.workflows.rl.rollout_log import RolloutLog
from msrl.workflows.rl.rollouts import Rollouts
from msrl.workflows.rl.setup import RLSetup, prepare
from msrl.workflows.rl.step import Clock, step_metrics
from msrl.workflows.rl.update import PreparedStep, Updater
from msrl.workflows.rl.worker_groups import EngineGroup, TrainerGroup, engine_environments
from msrl.workflows.serve.engine import engine_settings
from msrl.workflows.training.best import checkpoint_results
from msrl.workflows.training.export import export_critic, export_hf, final_checkpoint
from msrl.workflows.training.integrity import verify_models
from msrl.workflows.training.interrupts import (
    EndAtOnce,
    Interrupts,
    lasting_output,
    was_stopped_early,
)
from msrl.workflows.training.memory_check import check_memory
from msrl.workflows.training.mfu import mfu
from msrl.workflows.training.run_log import RunLog, checkpoint_root, counted
from msrl.workflows.training.settings import (
    adapted_base,
    hf_files,
    loaded_models,
    rank_settings,
    retention,
    tokenizer_path,
    weights_path,
    worker_variables,
)

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


def run(config: Config) -> None:
    """Train a model as configured.

    Raises:
        MsrlError: The configuration is invalid. It is checked before Ray starts.
    """
    job = prepare(config)
    check_memory(config, "train-grpo", job.platform)
    verify_models(loaded_models(config, "train-grpo", job.resume))
    run_log = RunLog(config, num_steps=job.num_steps, start_step=job.start_step, curves=CURVES)
    with lasting_output(), run_log as log, EndAtOnce():
        start_time = time.perf_counter()
        ranks = counted(world_size(config), "training rank")
        engines = counted(config.rollout.engine.dp, "engine")
        log.note(
            f"starting {ranks} and {engines} on {job.platform.name}; the run is written to "
            f"{log.path}"
        )
        with _workers(job) as workers:
            log.note(f"all started in {duration_text(time.perf_counter() - start_time)}")
            with Interrupts() as interrupts, _finish_saves_on_reward_error(workers.trainers):
                saved = _train(job, workers, log, interrupts)
        is_stopped = was_stopped_early(interrupts.asked, saved, job.num_steps)
        log.finish(_results(config, saved, log.path, is_done=not is_stopped))
    if is_stopped:
        raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class _Workers:
    """Workers of a run."""

    trainers: TrainerGroup
    engines: EngineGroup
    scorer: Scorer


def _train(
    job: RLSetup, workers: _Workers, log: RunLog, interrupts: Interrupts
) -> SavedTraining | None:
    """Run the remaining steps and return the last complete checkpoint."""
    config, saved = job.config, job.resume
    trainers, engines, scorer = workers.trainers, workers.engines, workers.scorer
    state = saved.state()["extra"] if saved else {}
    updater = Updater(config, trainers, job.num_steps, state)
    rollouts = Rollouts(job, engines, scorer, state)
    rollout_log = RolloutLog(log.path, job.tokenizer, is_on=config.log.save_rollouts)
    evaluator = Evaluator(job, engines, scorer, rollout_log, state)
    if config.eval.at_start and job.start_step == 0 and not log.has_reports:
        log.log(evaluator.at_start())
    for step in range(job.start_step, job.num_steps):
        clock = Clock()
        found = rollouts.generate(step, clock)
        prepared = updater.prepare(found.train_groups, clock, found.dropped_groups)
        trained = updater.update(prepared, step, clock)
        with clock("weights"):
            engines.load_weights(trainers.weights())
        metrics = {
            **step_metrics(found.scores, trained, clock.seconds),
            **found.metrics,
            **_mfu(job, prepared, clock),
        }
        rollout_log.write(step + 1, found.train_groups, prepared.samples, found.dropped_groups)
        seconds = {**clock.seconds, "step": sum(clock.seconds.values())}
        log.log(evaluator.after(StepReport(step + 1, metrics, seconds, found.scores.notes)))
        is_last = interrupts.asked or evaluator.ends_with(step + 1) or step + 1 == job.num_steps
        if (
            is_last
            or evaluator.must_save(step + 1)
            or _is_due(config.checkpoint.every_steps, step + 1)
        ):
            extra = {**job.state, **rollouts.state(), **updater.state(), **evaluator.state()}
            saved = (
                _print_saved(trainers.save(step + 1, extra, retention(config, evaluator.best)))
                or saved
            )
        if is_last:
            break
    return _print_saved(trainers.finish_saves()) or saved


@contextmanager
def _finish_saves_on_reward_error(trainers: TrainerGroup) -> Iterator[None]:
    """Complete pending checkpoints if a reward source ends the run.

    Ranks and engines still work in this case.
    """
    try:
        yield
    except RewardSourceError:
        _print_saved(trainers.finish_saves())
        raise


def _mfu(job: RLSetup, prepared: PreparedStep, clock: Clock) -> dict[str, float]:
    """Return the model FLOPs utilization of the policy's updates; nothing for a step without one.

    Generation is excluded because memory bandwidth limits it, not arithmetic.
    """
    shape, seconds = model_shape(job.config), clock.seconds.get("update", 0.0)
    assert shape is not None, "the ranks have loaded the model"
    if not seconds:
        return {}
    sequences, epochs = prepared.sequences, job.config.train.updates.epochs
    num_tokens = num_loss_tokens(sequences)
    return mfu(shape, job.config, job.platform, [sequences], num_tokens, seconds, passes=epochs)


def _print_saved(checkpoints: Sequence[SavedTraining]) -> SavedTraining | None:
    """Print a line per checkpoint that is now complete, and return the last one."""
    for saved in checkpoints:
        print(f"saved step {saved.step} in {saved.root}", file=sys.stderr)
    return checkpoints[-1] if checkpoints else None


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


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
            )
        )
        placed = session.create_placement(job.placement)
        # Ray returns the devices of the engines only before any actor is started.
        engine_env = engine_environments(placed, platform, job.config.rollout.engine, cluster.env)
        trainers = _trainer_group(job, scorer, session, placed)
        settings = _engine_settings(job.config, job.hf_dir)
        engines = EngineGroup(
            session, placed, settings, platform, engine_env, cluster.rpc_timeout_s
        )
        _start(trainers, engines, job)
        for name, model in scorer.rank_models.items():
            model.connect(partial(trainers.scores, name))
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
        config,
        platform.name,
        resume=job.resume,
        reference=weights_path(config) if needs_reference(config) else None,
        reward_models=reward_models,
    )
    env = {**_rank_environment(config, platform), **worker_variables(config, platform)}
    return TrainerGroup(
        session, placed, settings, world_size(config), env, config.cluster.rpc_timeout_s
    )


def _rank_environment(config: Config, platform: Platform) -> Mapping[str, str]:
    nodes = config.cluster.nodes
    return platform.worker_environment(world_size(config) // nodes, spans_machines=nodes > 1)


def _start(trainers: TrainerGroup, engines: EngineGroup, job: RLSetup) -> None:
    """Load the models of ranks and engines.

    They load at the same time only in main memory: on a device, engines measure the free memory, so
    they start after the ranks.
    """
    config, pending = job.config, None
    if job.platform.shares_main_memory:
        pending = engines.begin_start()
    plan = SavePlan(checkpoint_root(config), job.hf_dir, config.checkpoint.in_background)
    trainers.start(job.resume, plan)
    engines.finish_start(engines.begin_start() if pending is None else pending)
    engines.load_weights(trainers.weights())


def _scorer(job: RLSetup) -> Scorer:
    """Return the scorer of the configured sources.

    Servers and models get prompts as the policy sees them, special tokens included.
    """

    def prompt_text(token_ids: Ints) -> str:
        return job.tokenizer.backend.decode(token_ids.tolist(), skip_special_tokens=False)

    sources = [Source.of(section) for section in job.config.reward.sources]
    return Scorer(
        sources, num_workers=max(1, min(8, job.platform.device_count())), prompt_text=prompt_text
    )


def _engine_settings(config: Config, hf_dir: Path) -> EngineSettings:
    """Return the settings of an engine.

    It starts with random weights, which the ranks replace before the first prompt.
    """
    max_length = max_model_len(config)
    settings = engine_settings(
        config, hf_dir, dtype=config.model.dtype, max_model_len=max_length, random_weights=True
    )
    return replace(settings, tokenizer_dir=tokenizer_path(config))


def _results(
    config: Config, saved: SavedTraining | None, run_dir: Path, *, is_done: bool
) -> dict[str, str]:
    """Export the final checkpoint of a completed run; return the paths to report."""
    results = checkpoint_results(saved, is_done=is_done)
    if not (saved and is_done and config.checkpoint.export_hf):
        return results
    checkpoint, note = final_checkpoint(saved, keep_best=config.checkpoint.keep_best)
    folder = export_hf(
        checkpoint, run_dir / "hf", base=adapted_base(config), hf_dir=hf_files(config)
    )
    results["Hugging Face model"] = f"{folder}{note}"
    shape = critic_shape(config) if needs_critic(config) else None
    if shape is not None and has_classifier(shape.architecture):
        load = config.cluster.roles.critic.load
        config_folder = hf_files(config) if load is None else config_dir(load)
        critic = export_critic(checkpoint, run_dir / "hf_critic", shape, config_folder)
        results["Hugging Face critic"] = f"{critic}{note}"
    return results
