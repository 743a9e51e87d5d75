"""The GRPO training loop over Ray actors that generate and train.

A step takes scored groups of completions (`sources.py`), computes advantages, updates the policy on
packed micro-batches (`update.py`), sends the new weights to the engines, and writes what is kept of
the step (`recorder.py`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

from msrl.checks.asynchronous import is_corrected
from msrl.plan.run_plan import RunPlan
from msrl.tracking.plots import CURVES
from msrl.tracking.progress import duration_text
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.workflows.rl.recorder import Recorder
from msrl.workflows.rl.setup import RLSetup
from msrl.workflows.rl.start import prepare, rollout_source, start_workers
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.teacher_servers import connect as connect_teachers
from msrl.workflows.rl.token_values import size_note
from msrl.workflows.rl.update.updater import Updater
from msrl.workflows.rl.workers import Workers
from msrl.workflows.training.completed import finish_completed
from msrl.workflows.training.preflight import check_start
from msrl.workflows.training.run_log import count_text
from msrl.workflows.training.session import TrainingSession, open_session


def run(plan: RunPlan) -> None:
    """Train a model as configured.

    Raises:
        MsrlError: The configuration is invalid. It is checked before Ray starts.
    """
    job = prepare(plan)
    if job.resume is not None and job.resume.step == job.num_steps:
        finish_completed(plan, job.resume, CURVES["train-grpo"])
        return
    check_start(plan, job.platform, job.resume, has_images=plan.has_images)
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
        ranks = count_text(plan.world_size, "training rank")
        engines = f" and {count_text(plan.num_engines, 'engine')}" if plan.has_engines else ""
        session.note(
            f"Starting {ranks}{engines} on {job.platform.name}. The run is written to "
            f"{session.run_dir}"
        )
        for line in teachers.notes:
            session.note(line)
        with start_workers(job, teachers, session.restarts) as workers:
            session.note(
                f"All workers started in {duration_text(time.perf_counter() - start_time)}"
            )
            options = job.config.rollout.asynchronous
            if options.is_on and options.allow_uncorrected and not is_corrected(job.config.algo):
                session.note(
                    f"rollout.async.max_staleness={options.max_staleness}: the run trains on "
                    "samples of older policies without a correction"
                )
            session.run(partial(_train, job, workers, session), partial(workers.restart, plan))
        session.finish()


def _train(
    job: RLSetup, workers: Workers, session: TrainingSession, resume: SavedTraining | None
) -> None:
    """Run the steps after a checkpoint, None for the initial weights."""
    job, state = replace(job, resume=resume), resume.state()["extra"] if resume else {}
    updater = Updater(
        job.config,
        workers.trainers,
        job.num_steps,
        state,
        workers.teachers,
        has_rewards=not job.plan.is_distillation,
    )
    rollouts = rollout_source(job, workers, state)
    recorder = Recorder(job, workers.trainers, session)
    evaluator = rollouts.evaluator(recorder.rollouts)
    with session.training(workers.trainers, evaluator), rollouts.running():
        session.evaluate_at_start()
        for step in session.steps():
            clock = Clock(session.show_stage)
            batch = rollouts.take(step, clock)
            rollouts.begin_update(clock)
            prepared = updater.prepare(batch.train_groups, clock, batch.dropped_groups)
            rollouts.check(prepared)
            values = recorder.token_values(prepared, clock)
            trained = updater.update(prepared, step, clock)
            rollouts.publish(step + 1, clock)
            report = recorder.record(step, batch, prepared, values, trained, clock)
            if session.after_step(report):
                with rollouts.saving():
                    session.save({**job.state, **rollouts.state(), **updater.state()})
    rollouts.finish()
