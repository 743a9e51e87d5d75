"""Training loop of one rank of supervised fine-tuning."""

from __future__ import annotations

import itertools
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from msrl.algorithms.packing import Sequences, balanced
from msrl.config.schema import Config
from msrl.trainer.checkpointing import state as checkpoints
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.trainer.checkpointing.saver import Saver
from msrl.trainer.guard import GradientError
from msrl.trainer.launch import RankContext
from msrl.trainer.objective.batches import BatchLimits, micro_batches, num_loss_tokens
from msrl.trainer.objective.losses import SftLoss
from msrl.trainer.rank import TrainingRank
from msrl.types import MicroBatch, StepReport
from msrl.workflows.sft.rows import MixedRows, Rows
from msrl.workflows.sft.setup import SftSetup, Started, training_rows
from msrl.workflows.sft.text_rows import TextRows
from msrl.workflows.training.best import Best, best_state
from msrl.workflows.training.mfu import mfu
from msrl.workflows.training.settings import retention

LOSS = SftLoss()


def main(context: RankContext, job: SftSetup) -> None:
    """Train as one rank until the run ends."""
    # A job manager may signal all processes of a job. Only the parent decides when ranks stop.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    training_rank = TrainingRank(
        job.settings, context.rank, context.world_size, context.init_method
    )
    extra = (
        checkpoints.load_training_state(training_rank, job.resume) if job.resume is not None else {}
    )
    saver = Saver(
        training_rank,
        job.checkpoint_dir,
        job.hf_dir,
        in_background=job.config.checkpoint.in_background,
    )
    train, held_out = training_rows(job.config)
    if context.rank == 0:
        context.report(Started())
    best, config = Best.of(extra), job.config
    for step in range(job.start_step, job.num_steps):
        try:
            report = _step(training_rank, job, train, step)
        except GradientError:
            saver.end()
            _report_saved(context, saver.finished())
            raise
        has_improved = stops_early = False
        if held_out is not None and _is_due(config.eval.every_steps, step + 1, job.num_steps):
            report, best = _evaluate_step(training_rank, config, held_out, report, best)
            has_improved = best.step == step + 1
            stops_early = config.eval.patience is not None and best.since >= config.eval.patience
        if context.rank == 0:
            context.report(report)
        is_stopped = training_rank.any_rank(context.rank == 0 and context.asked_to_stop())
        must_save = is_stopped or stops_early or (config.checkpoint.keep_best and has_improved)
        if must_save or _is_due(config.checkpoint.every_steps, step + 1, job.num_steps):
            saver.save(step + 1, {**job.state, **best_state(best)}, retention(config, best))
        _report_saved(context, saver.finished())
        if stops_early and context.rank == 0 and best is not None:
            context.report(
                f"ended early: {best.since} evaluations without a lower loss than {best.value:.4f} "
                f"of step {best.step}"
            )
        if is_stopped or stops_early:
            break
    _report_saved(context, saver.finished(must_wait=True))
    training_rank.close()


def _report_saved(context: RankContext, checkpoints: Sequence[SavedTraining]) -> None:
    if context.rank == 0:
        for saved in checkpoints:
            context.report(saved)


def _is_due(every: int | None, step: int, num_steps: int) -> bool:
    """Return True every `every` steps and after the last step."""
    return (every is not None and step % every == 0) or step == num_steps


def _step(
    training_rank: TrainingRank, job: SftSetup, train: Rows | MixedRows | TextRows, step: int
) -> StepReport:
    """Train on the rows of a step and return its report."""
    config, start_time = job.config, time.perf_counter()
    rows = train.sequences(job.order.of_step(step).tolist())
    num_tokens = sum(map(num_loss_tokens, rows))
    if not num_tokens:
        notes = ("skipped the update: the loss mask covers no token of this step",)
        seconds = time.perf_counter() - start_time
        return StepReport(step + 1, {"train/loss_tokens": 0.0}, {"step": seconds}, notes)
    batches = _own_batches(training_rank, config, rows)
    lr = job.schedule.at(step)
    train_metrics = training_rank.train_step(batches, LOSS, num_tokens=num_tokens, lr=lr)
    seconds = time.perf_counter() - start_time
    metrics = {f"train/{name}": value for name, value in train_metrics.items()}
    metrics |= {
        "perf/tokens_per_s": sum(map(_num_tokens, rows)) / seconds,
        "train/loss_tokens": float(num_tokens),
    }
    platform = training_rank.position.platform
    metrics |= mfu(training_rank.policy.shape, config, platform, rows, num_tokens, seconds)
    notes = ("skipped the update: the gradient was not finite",) if train_metrics["skipped"] else ()
    return StepReport(step + 1, metrics, {"step": seconds}, notes)


def _evaluate_step(
    training_rank: TrainingRank,
    config: Config,
    held_out: Rows | TextRows,
    report: StepReport,
    best: Best | None,
) -> tuple[StepReport, Best]:
    """Evaluate after a step.

    Returns:
        The report with the metrics of the evaluation, and the best evaluation so far; both are
        equal on all ranks.
    """
    start_time = time.perf_counter()
    loss = _evaluate(training_rank, config, held_out)
    metrics = {**report.metrics, "eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
    seconds = {**report.seconds, "eval": time.perf_counter() - start_time}
    best = Best.after(best, report.step, loss, is_loss=True)
    return replace(report, metrics=metrics, seconds=seconds), best


def _num_tokens(row: Sequences) -> int:
    return sum(map(len, row.token_ids))


def _own_batches(
    training_rank: TrainingRank, config: Config, rows: Sequence[Sequences]
) -> list[MicroBatch]:
    """Return the micro-batches of this data-parallel rank's share of the rows.

    A row is never split.
    """
    position, train = training_rank.position, config.train
    shares = balanced([_num_tokens(row) for row in rows], position.dp_size)
    own_rows = [rows[i] for i in shares[position.dp_rank]]
    limits = BatchLimits(
        train.micro_batch, train.max_tokens_per_micro_batch, training_rank.sequence_multiple
    )
    first = [
        0,
        *itertools.accumulate(len(row.token_ids) for row in own_rows),
    ]  # sequence of each row
    batches: list[list[int]] = []
    for group in limits.group([_num_tokens(row) for row in own_rows]):
        batches.append([i for row in group for i in range(first[row], first[row + 1])])
    return micro_batches(_merge(own_rows), batches, limits)


def _merge(rows: Sequence[Sequences]) -> Sequences:
    token_ids = tuple(ids for row in rows for ids in row.token_ids)
    loss_masks = tuple(mask for row in rows for mask in row.loss_masks)
    return Sequences(token_ids, loss_masks, {})


def _evaluate(training_rank: TrainingRank, config: Config, held_out: Rows | TextRows) -> float:
    """Return the mean loss per token over the held-out rows.

    Every rank needs the same number of rows, so copies of the first one with an empty loss mask are
    added.
    """
    count = min(len(held_out), config.eval.prompts or len(held_out))
    rows = held_out.sequences(range(count))
    num_padding = -count % training_rank.position.dp_size
    empty_masks = tuple(mask & False for mask in rows[0].loss_masks)
    padding = [Sequences(rows[0].token_ids, empty_masks, {})] * num_padding
    batches = _own_batches(training_rank, config, [*rows, *padding])
    num_tokens = sum(map(num_loss_tokens, rows))
    return training_rank.evaluate(batches, LOSS, num_tokens=num_tokens)["loss"]
