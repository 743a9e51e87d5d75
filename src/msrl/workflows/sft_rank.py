"""One rank of supervised fine-tuning: read the step's rows, train on this rank's share of them, report, save."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from msrl.algorithms.packing import Sequences, balanced
from msrl.config.schema import Config
from msrl.data.dataset import SftDataset
from msrl.trainer import checkpoints
from msrl.trainer.batches import BatchLimits, micro_batches, num_loss_tokens
from msrl.trainer.launch import RankContext
from msrl.trainer.losses import SftLoss
from msrl.trainer.resume import SavedTraining
from msrl.trainer.worker import TrainWorker
from msrl.types import MicroBatch, StepReport
from msrl.workflows.common import order_state
from msrl.workflows.sft_job import Rows, SftJob, open_rows

LOSS = SftLoss()


def main(context: RankContext, job: SftJob) -> None:
    """The life of a rank."""
    worker = TrainWorker(job.settings, context.rank, context.world_size, context.init_method)
    if job.resume is not None:
        checkpoints.load_training_state(worker, job.resume)
    train = open_rows(job.config, SftDataset(str(job.config.data.train)))
    held_out = open_rows(job.config, SftDataset(job.config.data.eval)) if job.config.data.eval else None
    for step in range(job.start_step, job.num_steps):
        report = _step(worker, job, train, held_out, step)
        if context.rank == 0:
            context.report(report)
        is_stopped = worker.any_rank(context.rank == 0 and context.asked_to_stop())
        if is_stopped or _is_due(job.config.checkpoint.every_steps, step + 1, job.num_steps, at_end=True):
            saved = _save(worker, job, step + 1)
            if context.rank == 0:
                context.report(saved)
        if is_stopped:
            break
    worker.close()


def _save(worker: TrainWorker, job: SftJob, step: int) -> SavedTraining:
    return checkpoints.save(worker, job.checkpoint_dir, step, order_state(job.order), hf_dir=job.hf_dir, keep=job.config.checkpoint.keep)


def _is_due(every: int | None, step: int, num_steps: int, *, at_end: bool) -> bool:
    return (every is not None and step % every == 0) or (at_end and step == num_steps)


def _step(worker: TrainWorker, job: SftJob, train: Rows, held_out: Rows | None, step: int) -> StepReport:
    config, started = job.config, time.perf_counter()
    mine, num_tokens, num_all = _share(worker, config, train.sequences(job.order.of_step(step).tolist()))
    metrics = worker.train_step(mine, LOSS, num_tokens=num_tokens, lr=job.schedule.at(step))
    seconds = time.perf_counter() - started
    report = {f"train/{name}": value for name, value in metrics.items()}
    report |= {"perf/tokens_per_s": num_all / seconds, "train/loss_tokens": float(num_tokens)}
    if held_out is not None and _is_due(config.eval.every_steps, step + 1, job.num_steps, at_end=True):
        report["eval/loss"] = _evaluate(worker, config, held_out)
    return StepReport(step + 1, report, {"step": seconds})


def _share(worker: TrainWorker, config: Config, rows: Sequence[Sequences]) -> tuple[list[MicroBatch], int, int]:
    """This data-parallel rank's micro-batches, and the loss tokens and tokens of all ranks' rows."""
    lengths = [sum(map(len, row.token_ids)) for row in rows]
    mine = [rows[i] for i in balanced(lengths, worker.dp_size)[worker.dp_rank]]
    limits = BatchLimits(config.train.micro_batch, config.train.max_tokens_per_micro_batch, worker.sequence_multiple)
    merged = _merge(mine)
    starts = [0, *itertools.accumulate(len(row.token_ids) for row in mine)]
    groups = limits.group([sum(map(len, row.token_ids)) for row in mine])
    members = [[i for row in group for i in range(starts[row], starts[row + 1])] for group in groups]
    return micro_batches(merged, members, limits), sum(map(num_loss_tokens, rows)), sum(lengths)


def _merge(rows: Sequence[Sequences]) -> Sequences:
    return Sequences(tuple(ids for row in rows for ids in row.token_ids), tuple(mask for row in rows for mask in row.loss_masks), {})


def _evaluate(worker: TrainWorker, config: Config, held_out: Rows) -> float:
    """Mean loss per token over the held-out rows, each counted once: what does not divide over the ranks is padded without weight."""
    count = min(len(held_out), config.eval.prompts or len(held_out))
    rows = held_out.sequences(range(count))
    short = -count % worker.dp_size
    padding = [Sequences(rows[0].token_ids, tuple(mask & False for mask in rows[0].loss_masks), {})] * short
    mine, num_tokens, _ = _share(worker, config, [*rows, *padding])
    return worker.evaluate(mine, LOSS, num_tokens=num_tokens)["loss"]
