"""Supervised fine-tuning: the rows, losses and evaluations of its steps."""

from __future__ import annotations

import time
from functools import partial

from msrl.config.schema import Config
from msrl.data.dataset import SftDataset, TextDataset
from msrl.limits import print_note
from msrl.plan.run_plan import RunPlan
from msrl.tracking.plots import CURVES
from msrl.trainer.objective.requests import UpdateRequest
from msrl.types import StepReport
from msrl.workflows.sft.batches import LOSS, held_out_metrics, make_batch, with_aggregation
from msrl.workflows.sft.setup import SftRows, SftSetup, check_lengths, training_rows
from msrl.workflows.sft.text_rows import weights_by_name
from msrl.workflows.training import supervised
from msrl.workflows.training.data_checks import check_data, check_image_keys, verify_data
from msrl.workflows.training.supervised import HeldOutEvaluator, SupervisedTask, step_report
from msrl.workflows.training.trainer_group import TrainerGroup


def run(plan: RunPlan) -> None:
    """Train a model as configured.

    Raises:
        MsrlError: The configuration is invalid. It is checked before any rank starts.
    """
    supervised.run(plan, SftTask())


class SftTask(SupervisedTask[SftRows]):
    """Training on examples or text."""

    curves = CURVES["train-sft"]

    def open_rows(self, plan: RunPlan) -> tuple[SftRows, SftRows | None]:
        return _checked_rows(plan)

    def steps(self, job: SftSetup, trainers: TrainerGroup) -> SftSteps:
        return SftSteps(job, trainers)


class SftSteps:
    """Steps of fine-tuning on started ranks."""

    def __init__(self, job: SftSetup, trainers: TrainerGroup) -> None:
        self._job, self._trainers = job, trainers
        self.evaluator: HeldOutEvaluator | None = None
        if job.held_out is not None:
            measure = partial(held_out_metrics, job, job.held_out, trainers)
            self.evaluator = HeldOutEvaluator(job, measure)

    def run(self, step: int) -> StepReport:
        """Update the model once on the rows of a step."""
        job, start_time = self._job, time.perf_counter()
        batch = make_batch(job.train.sequences(job.order.of_step(step).tolist()))
        metrics = dict[str, float]()
        if batch.num_loss_tokens:
            request = UpdateRequest(LOSS, job.schedule.at(step))
            sequences = with_aggregation(batch, job.config.algo.aggregate)
            metrics = self._trainers.update(request, sequences, job.limits, rows=batch.rows)
        return step_report(
            job, step + 1, batch.sequences, batch.num_loss_tokens, metrics, start_time
        )


def _checked_rows(plan: RunPlan) -> tuple[SftRows, SftRows | None]:
    """Return the rows to train on and the held-out rows, if any; print notes on them.

    Raises:
        MsrlError: They or the held-out rows do not fit the model or the configuration.
    """
    dataset_type = TextDataset if plan.config.data.handler == "pretrain" else SftDataset
    datasets = [dataset_type(prefix) for prefix in data_prefixes(plan)]
    for dataset in datasets:
        check_dataset(dataset, plan)
    check_image_keys([dataset.manifest for dataset in datasets], plan)
    train, held_out = training_rows(plan)
    check_and_note(plan.config, train, held_out)
    return train, held_out


def data_prefixes(plan: RunPlan) -> tuple[str, ...]:
    """Return the prefixes of the data to train on and of the held-out data, each once."""
    names = dict.fromkeys((*weights_by_name(plan.config), plan.data.eval))
    return tuple(plan.prefix(name) for name in names if name is not None)


def check_dataset(dataset: SftDataset | TextDataset, plan: RunPlan) -> None:
    """Check that a dataset is intact and fits the model. Raises MsrlError if not."""
    check_data(dataset.manifest, plan, dataset.prefix)
    verify_data(dataset, plan)


def check_and_note(
    config: Config, train: SftRows, held_out: SftRows | None, num_added: int = 0
) -> None:
    """Check that the rows fit into micro-batches and print notes on them.

    The training adds at most `num_added` tokens to a row.

    Raises:
        MsrlError: A row does not fit.
    """
    prefixes = ", ".join(weights_by_name(config))
    check_lengths(config, prefixes, train, num_added)
    if held_out is not None:
        name = config.data.eval or f"the held-out part of {prefixes}"
        check_lengths(config, name, held_out, num_added)
        if config.data.eval is None:
            print_note(f"held out: {len(held_out)} of {len(train) + len(held_out)} rows")
    _print_notes("data.train", train, config)
    if held_out is not None:
        _print_notes("held out", held_out, config)


def _print_notes(name: str, rows: SftRows, config: Config) -> None:
    for note in rows.notes(config.data.seq_length):
        print_note(f"{name}: {note}")
