"""One rank of supervised fine-tuning: read the step's rows, train on this rank's share of them,
report, save.
"""

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
from msrl.workflows.sft.rows import Rows
from msrl.workflows.sft.setup import SftSetup, Started, training_rows
from msrl.workflows.sft.text_rows import TextRows
from msrl.workflows.training.best import Best, best_state
from msrl.workflows.training.mfu import mfu
from msrl.workflows.training.settings import retention

LOSS = SftLoss()


def main(context: RankContext, job: SftSetup) -> None:
    """The life of a rank."""
    for number in (
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # what ends a job may send it to all processes; the one that started us asks to stop
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
        has_improved = is_over = False
        if held_out is not None and _is_due(
            config.eval.every_steps, step + 1, job.num_steps, at_end=True
        ):
            report, best = _evaluated(training_rank, config, held_out, report, best)
            has_improved = best.step == step + 1
            is_over = config.eval.patience is not None and best.since >= config.eval.patience
        if context.rank == 0:
            context.report(report)
        is_stopped = training_rank.any_rank(context.rank == 0 and context.asked_to_stop())
        must_save = is_stopped or is_over or (config.checkpoint.keep_best and has_improved)
        if must_save or _is_due(
            config.checkpoint.every_steps, step + 1, job.num_steps, at_end=True
        ):
            _save(saver, job, step + 1, best)
        _report_saved(context, saver.finished())
        if is_over and context.rank == 0 and best is not None:
            context.report(
                f"ended early: {best.since} evaluations without a lower loss than {best.value:.4f} of step {best.step}"
            )
        if is_stopped or is_over:
            break
    _report_saved(context, saver.finished(must_wait=True))
    training_rank.close()


def _report_saved(context: RankContext, finished: Sequence[SavedTraining]) -> None:
    for saved in finished if context.rank == 0 else ():
        context.report(saved)


def _save(saver: Saver, job: SftSetup, step: int, best: Best | None) -> None:
    saver.save(step, {**job.state, **best_state(best)}, retention(job.config, best))


def _is_due(every: int | None, step: int, num_steps: int, *, at_end: bool) -> bool:
    return (every is not None and step % every == 0) or (at_end and step == num_steps)


def _step(
    training_rank: TrainingRank, job: SftSetup, train: Rows | TextRows, step: int
) -> StepReport:
    config, started = job.config, time.perf_counter()
    rows = train.sequences(job.order.of_step(step).tolist())
    mine, num_tokens, num_all = _share(training_rank, config, rows)
    if not num_tokens:  # of all ranks' rows
        nothing = ("no token of this step is learnt, so there is no update",)
        return StepReport(
            step + 1, {"train/loss_tokens": 0.0}, {"step": time.perf_counter() - started}, nothing
        )
    metrics = training_rank.train_step(mine, LOSS, num_tokens=num_tokens, lr=job.schedule.at(step))
    seconds = time.perf_counter() - started
    report = {f"train/{name}": value for name, value in metrics.items()}
    report |= {"perf/tokens_per_s": num_all / seconds, "train/loss_tokens": float(num_tokens)}
    report |= mfu(
        training_rank.policy.shape,
        config,
        training_rank.position.platform,
        rows,
        num_tokens,
        seconds,
    )
    notes = (
        ("the gradient was not finite, so this update was left out",) if metrics["skipped"] else ()
    )
    return StepReport(step + 1, report, {"step": seconds}, notes)


def _evaluated(
    training_rank: TrainingRank,
    config: Config,
    held_out: Rows | TextRows,
    report: StepReport,
    best: Best | None,
) -> tuple[StepReport, Best]:
    """The report with what the held-out rows say, and the best evaluation so far; the same on every
    rank.
    """
    started = time.perf_counter()
    loss = _evaluate(training_rank, config, held_out)
    metrics = {**report.metrics, "eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}
    seconds = {**report.seconds, "eval": time.perf_counter() - started}
    return replace(report, metrics=metrics, seconds=seconds), Best.after(
        best, report.step, loss, is_loss=True
    )


def _share(
    training_rank: TrainingRank, config: Config, rows: Sequence[Sequences]
) -> tuple[list[MicroBatch], int, int]:
    """This data-parallel rank's micro-batches, and the loss tokens and tokens of all ranks' rows."""
    lengths = [sum(map(len, row.token_ids)) for row in rows]
    mine = [
        rows[i]
        for i in balanced(lengths, training_rank.position.dp_size)[training_rank.position.dp_rank]
    ]
    limits = BatchLimits(
        config.train.micro_batch,
        config.train.max_tokens_per_micro_batch,
        training_rank.sequence_multiple,
    )
    merged = _merge(mine)
    starts = [0, *itertools.accumulate(len(row.token_ids) for row in mine)]
    groups = limits.group([sum(map(len, row.token_ids)) for row in mine])
    members = [
        [i for row in group for i in range(starts[row], starts[row + 1])] for group in groups
    ]
    return micro_batches(merged, members, limits), sum(map(num_loss_tokens, rows)), sum(lengths)


def _merge(rows: Sequence[Sequences]) -> Sequences:
    return Sequences(
        tuple(ids for row in rows for ids in row.token_ids),
        tuple(mask for row in rows for mask in row.loss_masks),
        {},
    )


def _evaluate(training_rank: TrainingRank, config: Config, held_out: Rows | TextRows) -> float:
    """Mean loss per token over the held-out rows, each counted once: what does not divide over the
    ranks is padded without weight.
    """
    count = min(len(held_out), config.eval.prompts or len(held_out))
    rows = held_out.sequences(range(count))
    short = -count % training_rank.position.dp_size
    padding = [
        Sequences(rows[0].token_ids, tuple(mask & False for mask in rows[0].loss_masks), {})
    ] * short
    mine, num_tokens, _ = _share(training_rank, config, [*rows, *padding])
    return training_rank.evaluate(mine, LOSS, num_tokens=num_tokens)["loss"]
