"""Reinforcement learning with verifiable rewards: one visible loop over Ray actors that generate
and train.

Take prompts, generate groups and score them (`grpo_rollouts.py`), turn groups into samples with
advantages and update on packed micro-batches (`grpo_update.py`), hand the new weights to the
engines. The weights are the only arrow that goes back.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from msrl.cluster.session import ray_session
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
from msrl.workflows.rl.update import Prepared, Updater
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
    """Train as the configuration says. Raises MsrlError for what is wrong with it before Ray is
    asked for.
    """
    job = prepare(config)
    check_memory(config, "train-grpo", job.platform)
    verify_models(loaded_models(config, "train-grpo", job.resume))
    with (
        lasting_output(),
        RunLog(config, num_steps=job.num_steps, start_step=job.start_step, curves=CURVES) as log,
        EndAtOnce(),
    ):
        started = time.perf_counter()
        workers = (
            counted(world_size(config), "training rank"),
            counted(config.rollout.engine.dp, "engine"),
        )
        log.note(
            f"starting {' and '.join(workers)} on {job.platform.name}; the run is written to {log.path}"
        )
        with _team(job) as (trainers, engines, scorer):
            log.note(f"all started in {duration_text(time.perf_counter() - started)}")
            with Interrupts() as interrupts, _finishes_saves(trainers):
                saved = _loop(job, trainers, engines, scorer, log, interrupts)
        is_stopped = was_stopped_early(interrupts.asked, saved, job.num_steps)
        log.finish(_results(config, saved, log.path, is_done=not is_stopped))
    if is_stopped:
        raise KeyboardInterrupt


def _loop(
    job: RLSetup, trainers: TrainerGroup, engines: EngineGroup, scorer: Scorer, log: RunLog, interrupts: Interrupts
) -> SavedTraining | None:  # fmt: skip
    config, saved = job.config, job.resume
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
                _said(trainers.save(step + 1, extra, retention(config, evaluator.best))) or saved
            )
        if is_last:
            break
    return _said(trainers.finish_saves()) or saved


@contextmanager
def _finishes_saves(trainers: TrainerGroup) -> Iterator[None]:
    """Complete checkpoints that are being written when a reward source ends the run; ranks and
    engines are in order then.
    """
    try:
        yield
    except RewardSourceError:
        _said(trainers.finish_saves())
        raise


def _mfu(job: RLSetup, prepared: Prepared, clock: Clock) -> dict[str, float]:
    """Of the policy's updates alone: generation is bound by memory, not by arithmetic. Nothing of a
    step without one.
    """
    shape, seconds = model_shape(job.config), clock.seconds.get("update", 0.0)
    assert shape is not None, "the ranks have loaded it"
    if not seconds:
        return {}
    sequences, epochs = prepared.sequences, job.config.train.updates.epochs
    return mfu(
        shape,
        job.config,
        job.platform,
        [sequences],
        num_loss_tokens(sequences),
        seconds,
        passes=epochs,
    )


def _said(finished: Sequence[SavedTraining]) -> SavedTraining | None:
    """Name every checkpoint that has become whole; the last of them."""
    for saved in finished:
        print(f"saved step {saved.step} in {saved.root}", file=sys.stderr)
    return finished[-1] if finished else None


def _is_due(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


@contextmanager
def _team(job: RLSetup) -> Iterator[tuple[TrainerGroup, EngineGroup, Scorer]]:
    """Start Ray (or use the given cluster), the ranks, the engines and the verifiers; end them all."""
    config, platform = job.config, job.platform
    timeout_s, num_ranks = config.cluster.rpc_timeout_s, world_size(config)
    reference = weights_path(config) if needs_reference(config) else None
    with ExitStack() as stack:
        scorer = stack.enter_context(_scorer(job))
        reward_models = {
            name: Path(model.path).absolute() for name, model in scorer.rank_models.items()
        }
        settings = rank_settings(
            config,
            platform.name,
            resume=job.resume,
            reference=reference,
            reward_models=reward_models,
        )
        session = stack.enter_context(
            ray_session(
                config.cluster.address,
                num_devices=job.placement.num_devices,
                resource_name=platform.ray_resource,
                env=config.cluster.env,
            )
        )
        placed = session.create_placement(job.placement)
        engine_env = engine_environments(
            placed, platform, config.rollout.engine, config.cluster.env
        )
        trainers = TrainerGroup(
            session,
            placed,
            settings,
            num_ranks,
            {**_rank_environment(config, platform), **worker_variables(config, platform)},
            timeout_s,
        )
        engines = EngineGroup(
            session, placed, _engine_settings(config, job.hf_dir), platform, engine_env, timeout_s
        )
        _start(trainers, engines, job)
        for name, model in scorer.rank_models.items():
            model.connect(partial(trainers.scores, name))
        yield trainers, engines, scorer
        engines.release()


def _rank_environment(config: Config, platform: Platform) -> Mapping[str, str]:
    nodes = config.cluster.nodes
    return platform.worker_environment(world_size(config) // nodes, spans_machines=nodes > 1)


def _start(trainers: TrainerGroup, engines: EngineGroup, job: RLSetup) -> None:
    """Load ranks and engines, at the same time where neither measures how much of a device's memory
    the other has left.
    """
    begun = engines.begin_start() if job.platform.shares_main_memory else None
    config = job.config
    trainers.start(
        job.resume, SavePlan(checkpoint_root(config), job.hf_dir, config.checkpoint.in_background)
    )
    engines.finish_start(engines.begin_start() if begun is None else begun)
    engines.load_weights(trainers.weights())


def _scorer(job: RLSetup) -> Scorer:
    """The sources of the configuration; servers and models get prompts as the policy sees them,
    special tokens included.
    """

    def prompt_text(token_ids: Ints) -> str:
        return job.tokenizer.backend.decode(token_ids.tolist(), skip_special_tokens=False)

    sources = [Source.of(section) for section in job.config.reward.sources]
    return Scorer(
        sources, num_workers=max(1, min(8, job.platform.device_count())), prompt_text=prompt_text
    )


def _engine_settings(config: Config, hf_dir: Path) -> EngineSettings:
    """The engine starts from the config alone: its weights are pushed in before the first prompt."""
    settings = engine_settings(
        config,
        hf_dir,
        dtype=config.model.dtype,
        max_model_len=max_model_len(config),
        random_weights=True,
    )
    return replace(settings, tokenizer_dir=tokenizer_path(config))


def _results(
    config: Config, saved: SavedTraining | None, run_dir: Path, *, is_done: bool
) -> dict[str, str]:
    results = checkpoint_results(saved, is_done=is_done)
    if saved and is_done and config.checkpoint.export_hf:
        chosen, said = final_checkpoint(saved, keep_best=config.checkpoint.keep_best)
        folder = export_hf(
            chosen, run_dir / "hf", base=adapted_base(config), hf_dir=hf_files(config)
        )
        results["Hugging Face model"] = f"{folder}{said}"
        shape = critic_shape(config) if needs_critic(config) else None
        if shape is not None and has_classifier(shape.architecture):
            load = config.cluster.roles.critic.load
            folder = hf_files(config) if load is None else config_dir(load)
            results["Hugging Face critic"] = (
                f"{export_critic(chosen, run_dir / 'hf_critic', shape, folder)}{said}"
            )
    return results
