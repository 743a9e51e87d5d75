"""Supervised fine-tuning: the training loop over the ranks, and the checks before it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping

from msrl.config.schema import Config
from msrl.data.dataset import SftDataset, TextDataset
from msrl.errors import MsrlError
from msrl.models.shape import Shape
from msrl.plan.run_plan import RunPlan
from msrl.platforms import resolve
from msrl.platforms.base import Platform
from msrl.trainer.checkpointing.resume import check_room
from msrl.types import StepReport
from msrl.workflows.sft.batches import LOSS, Batch, HeldOutEvaluator, batch_limits, make_batch
from msrl.workflows.sft.setup import SftRows, SftSetup, check_lengths, row_order, training_rows
from msrl.workflows.sft.text_rows import weights_by_prefix
from msrl.workflows.training import resume_checks
from msrl.workflows.training.completed import finish_completed
from msrl.workflows.training.data_checks import check_data, verify_data
from msrl.workflows.training.mfu import mfu
from msrl.workflows.training.preflight import check_run_folder, check_start
from msrl.workflows.training.run_log import counted
from msrl.workflows.training.session import TrainingSession, open_session
from msrl.workflows.training.settings import (
    check_order,
    checkpoint_to_resume,
    order_state,
    rank_settings,
    schedule,
)
from msrl.workflows.training.trainer_group import TrainerGroup
from msrl.workflows.training.trainers import open_trainers, save_plan

CURVES = ("train/loss", "eval/loss", "eval/perplexity", "train/grad_norm", "train/lr")


def run(plan: RunPlan) -> None:
    """Train a model as configured.

    Raises:
        MsrlError: The configuration is invalid. It is checked before any rank starts.
    """
    job = prepare(plan, resolve(plan.config.cluster.platform))
    if job.resume is not None and job.resume.step == job.num_steps:
        finish_completed(plan, job.resume, CURVES)
        return
    check_start(plan, job.platform, job.resume, longest=job.train.longest)
    with open_session(
        plan,
        start_step=job.start_step,
        num_steps=job.num_steps,
        resume=job.resume,
        curves=CURVES,
    ) as session:
        count, platform = counted(plan.world_size, "training rank"), job.platform
        session.note(
            f"Starting {count} on {platform.name}. The run is written to {session.run_dir}"
        )
        with open_trainers(plan.config, job.settings, platform) as trainers:
            saves = save_plan(plan)
            trainers.start(job.resume, saves)
            session.run(
                lambda _: _train(job, trainers, session),
                lambda resume: trainers.restart(resume, saves),
            )
        session.finish()


def _train(job: SftSetup, trainers: TrainerGroup, session: TrainingSession) -> None:
    """Run the remaining steps. The ranks hold the devices' memory all the time."""
    config, shape = job.config, job.shape
    evaluator = None
    if job.held_out is not None:
        evaluator = HeldOutEvaluator(config, job.held_out, trainers, job.num_steps)
    with session.training(trainers, evaluator):
        for step in session.steps():
            start_time = time.perf_counter()
            batch = make_batch(job.train.sequences(job.order.of_step(step).tolist()))
            metrics = dict[str, float]()
            if batch.num_loss_tokens:
                limits, lr = batch_limits(config), job.schedule.at(step)
                metrics = trainers.update(batch.sequences, limits, LOSS, lr, rows=batch.rows)
            seconds = time.perf_counter() - start_time
            if session.after_step(_step_report(job, shape, step + 1, batch, metrics, seconds)):
                session.save(job.state)


def _step_report(
    job: SftSetup,
    shape: Shape,
    step: int,
    batch: Batch,
    metrics: Mapping[str, float],  # of the update; empty if there was none
    seconds: float,
) -> StepReport:
    """Return the report of a step."""
    loss_tokens = {"train/loss_tokens": float(batch.num_loss_tokens)}
    if not metrics:
        notes = ("Skipped the update: the loss mask covers no token of this step",)
        return StepReport(step, loss_tokens, {"step": seconds}, notes)
    reported = {
        **{f"train/{name}": value for name, value in metrics.items()},
        "perf/tokens_per_s": batch.num_tokens / seconds,
        **loss_tokens,
        **mfu(shape, job.config, job.platform, [batch.sequences], batch.num_loss_tokens, seconds),
    }
    notes = ("Skipped the update: the gradient was not finite",) if metrics["skipped"] else ()
    return StepReport(step, reported, {"step": seconds}, notes)


def prepare(plan: RunPlan, platform: Platform) -> SftSetup:
    """Check everything that can be checked before ranks start and return the setup of the run.

    Raises:
        MsrlError: The configuration, the data or the checkpoint is invalid.
    """
    config = plan.config
    if config.data.train is None and not config.data.blend:
        raise MsrlError("data.train: not set. Set it to the output prefix of `msrl preprocess`.")
    check_run_folder(config)
    train, held_out = _checked_rows(plan)
    num_rows = (config.train.epochs or 1) * len(train)
    num_steps = config.train.steps or math.ceil(num_rows / config.train.global_batch)
    resume = checkpoint_to_resume(config, plan.checkpoint_dir)
    start_step = resume.step if resume else 0
    if start_step > num_steps:
        raise MsrlError(
            f"train.steps={num_steps}: the checkpoint in {plan.checkpoint_dir} is at step "
            f"{start_step} already. Raise train.steps to"
            " resume."
        )
    order, rates = row_order(config, train), schedule(config, num_steps)
    state = {**order_state(order), **resume_checks.remembered(plan, rates)}
    if resume:
        check_order(resume, order, rows_per_step="train.global_batch")
        resume_checks.check(resume, state)
    check_room(plan.checkpoint_dir, resume)
    resume_checks.report_schedule(resume, rates, start_step)
    return SftSetup(
        config=config,
        shape=plan.shape,
        platform=platform,
        settings=rank_settings(plan, platform.name),
        train=train,
        held_out=held_out,
        schedule=rates,
        order=order,
        state=state,
        num_steps=num_steps,
        start_step=start_step,
        resume=resume,
    )


def _checked_rows(plan: RunPlan) -> tuple[SftRows, SftRows | None]:
    """Return the rows to train on and the held-out rows, if any; print notes on them.

    Raises:
        MsrlError: They or the held-out rows do not fit the model or the configuration.
    """
    config = plan.config
    dataset_type = TextDataset if config.data.handler == "pretrain" else SftDataset
    for prefix in dict.fromkeys((*weights_by_prefix(config), config.data.eval)):
        if prefix is not None:
            dataset = dataset_type(prefix)
            check_data(dataset.manifest, plan, prefix)
            verify_data(dataset, plan)
    train, held_out = training_rows(config)
    prefixes = ", ".join(weights_by_prefix(config))
    check_lengths(config, prefixes, train)
    if held_out is not None:
        check_lengths(config, config.data.eval or f"the held-out part of {prefixes}", held_out)
        if config.data.eval is None:
            print(
                f"held out: {len(held_out)} of {len(train) + len(held_out)} rows", file=sys.stderr
            )
    _print_notes("data.train", train, config)
    if held_out is not None:
        _print_notes("held out", held_out, config)
    return train, held_out


def _print_notes(name: str, rows: SftRows, config: Config) -> None:
    for note in rows.notes(config.data.seq_length):
        print(f"{name}: {note}", file=sys.stderr)
