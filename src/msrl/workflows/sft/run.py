"""Driver of supervised fine-tuning: checks, start of the ranks, logs, export of the result.

The loop over steps is in `sft/rank.py`, which runs on every rank.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msrl.config.schema import Config
from msrl.data.dataset import SftDataset, TextDataset
from msrl.errors import MsrlError
from msrl.plan.derived import world_size
from msrl.platforms import resolve
from msrl.platforms.base import Platform
from msrl.trainer.checkpointing.resume import SavedTraining, check_room
from msrl.trainer.launch import LocalRanks
from msrl.types import StepReport
from msrl.workflows.sft.rows import MixedRows, Rows
from msrl.workflows.sft.setup import SftSetup, check_lengths, row_order, training_rows
from msrl.workflows.sft.text_rows import TextRows, weights_by_prefix
from msrl.workflows.training import resume_checks
from msrl.workflows.training.best import checkpoint_results
from msrl.workflows.training.data_checks import check_data, verify_data
from msrl.workflows.training.integrity import verify_models
from msrl.workflows.training.interrupts import (
    EndAtOnce,
    Interrupts,
    lasting_output,
    was_stopped_early,
)
from msrl.workflows.training.memory_check import check_memory
from msrl.workflows.training.run_log import RunLog, checkpoint_root, counted
from msrl.workflows.training.settings import (
    adapted_base,
    check_order,
    checkpoint_to_resume,
    hf_files,
    loaded_models,
    order_state,
    rank_settings,
    schedule,
    worker_variables,
)

if TYPE_CHECKING:
    from msrl.workflows.sft.cluster import ClusterRanks

CURVES = ("train/loss", "eval/loss", "eval/perplexity", "train/grad_norm", "train/lr")


def run(config: Config) -> None:
    """Train a model as configured.

    Raises:
        MsrlError: The configuration is invalid. It is checked before any rank starts.
    """
    platform = resolve(config.cluster.platform)
    job = prepare(config, platform.name)
    check_memory(config, "train-sft", platform, longest=job.longest_row)
    saved = job.resume
    verify_models(loaded_models(config, "train-sft", saved))
    run_log = RunLog(config, num_steps=job.num_steps, start_step=job.start_step, curves=CURVES)
    with lasting_output(), run_log as log, EndAtOnce():
        count = counted(world_size(config), "training rank")
        log.note(f"starting {count} on {platform.name}; the run is written to {log.path}")
        with _ranks(config, job, platform) as ranks:
            messages = ranks.messages()
            next(messages, None)  # `Started`; before it there is nothing to save
            with Interrupts(ranks.ask_to_stop):
                last, end = _log_messages(messages, log)
        is_stopped = was_stopped_early(ranks.was_asked_to_stop, last, job.num_steps)
        results = _results(config, last or saved, log.path, is_done=not is_stopped)
        log.finish({**results, **({} if end is None else {"end": end})})
    if is_stopped:
        raise KeyboardInterrupt


def _ranks(config: Config, job: SftSetup, platform: Platform) -> LocalRanks | ClusterRanks:
    """Return the ranks: Ray actors if `cluster.address` is set, otherwise local processes."""
    if config.cluster.address is not None:
        from msrl.workflows.sft.cluster import ClusterRanks

        return ClusterRanks(config, job, platform)
    env = worker_variables(config, platform)
    return LocalRanks(
        "msrl.workflows.sft.rank:main",
        job,
        num_ranks=world_size(config),
        platform=platform,
        env=env,
    )


def _log_messages(messages: Iterator[Any], log: RunLog) -> tuple[SavedTraining | None, str | None]:
    """Log the messages of the ranks.

    Returns:
        The last checkpoint, and the reason if early stopping ended the training.
    """
    saved, end = None, None
    for message in messages:
        if isinstance(message, StepReport):
            log.log(message)
        elif isinstance(message, str):
            log.note(message)
            end = message
        else:
            saved = message
            print(f"saved step {saved.step} in {saved.root}", file=sys.stderr)
    return saved, end


def prepare(config: Config, platform: str) -> SftSetup:
    """Check everything that can be checked before ranks start and return the setup of the run.

    Raises:
        MsrlError: The configuration, the data or the checkpoint is invalid.
    """
    if config.data.train is None and not config.data.blend:
        raise MsrlError("data.train: not set. Set it to the output prefix of `msrl preprocess`.")
    rows = _checked_rows(config, hf_files(config))
    num_rows = (config.train.epochs or 1) * len(rows)
    num_steps = config.train.steps or math.ceil(num_rows / config.train.global_batch)
    resume = checkpoint_to_resume(config, checkpoint_root(config))
    start_step = resume.step if resume else 0
    if start_step >= num_steps:
        raise MsrlError(
            f"train.steps={num_steps}: the checkpoint in {checkpoint_root(config)} is at step "
            f"{start_step} already. Raise train.steps to"
            " resume."
        )
    order, rates = row_order(config, rows), schedule(config, num_steps)
    state = {**order_state(order), **resume_checks.remembered(config, rates, command="train-sft")}
    if resume:
        check_order(resume, order, rows_per_step="train.global_batch")
        resume_checks.check(resume, state)
    check_room(checkpoint_root(config), resume)
    resume_checks.report_schedule(resume, rates, start_step)
    return SftSetup(
        config=config,
        settings=rank_settings(config, platform, resume=resume),
        schedule=rates,
        order=order,
        state=state,
        num_steps=num_steps,
        start_step=start_step,
        resume=resume,
        checkpoint_dir=checkpoint_root(config),
        hf_dir=hf_files(config),
        longest_row=rows.longest,
    )


def _checked_rows(config: Config, hf_dir: Path) -> Rows | MixedRows | TextRows:
    """Return the rows to train on and print notes on them.

    Raises:
        MsrlError: They or the held-out rows do not fit the model or the configuration.
    """
    dataset_type = TextDataset if config.data.handler == "pretrain" else SftDataset
    for prefix in dict.fromkeys((*weights_by_prefix(config), config.data.eval)):
        if prefix is not None:
            dataset = dataset_type(prefix)
            check_data(dataset.manifest, config, hf_dir, prefix)
            verify_data(dataset, hf_dir)
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
    return train


def _print_notes(name: str, rows: Rows | MixedRows | TextRows, config: Config) -> None:
    for note in rows.notes(config.data.seq_length):
        print(f"{name}: {note}", file=sys.stderr)


def _results(
    config: Config, saved: SavedTraining | None, run_dir: Path, *, is_done: bool
) -> dict[str, str]:
    """Export the final checkpoint of a completed run; return the paths to report."""
    results = checkpoint_results(saved, is_done=is_done)
    if saved and is_done and config.checkpoint.export_hf:
        from msrl.workflows.training.export import export_hf, final_checkpoint

        checkpoint, note = final_checkpoint(saved, keep_best=config.checkpoint.keep_best)
        folder = export_hf(
            checkpoint, run_dir / "hf", base=adapted_base(config), hf_dir=hf_files(config)
        )
        results["Hugging Face model"] = f"{folder}{note}"
    return results
