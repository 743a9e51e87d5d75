"""Supervised fine-tuning: check what can be known, start the ranks, log what they report, end with
a report and a checkpoint.

The loop over steps is in `sft_rank.py`; it runs in every rank. Here is the process that the user
started.
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
from msrl.workflows.sft.rows import Rows
from msrl.workflows.sft.setup import SftSetup, check_lengths, row_order, training_rows
from msrl.workflows.sft.text_rows import TextRows, blend_of
from msrl.workflows.training import resume_checks as resume_checks
from msrl.workflows.training.best import checkpoint_results
from msrl.workflows.training.completed import finish_completed
from msrl.workflows.training.data_checks import check_data, verify_data
from msrl.workflows.training.interrupts import (
    EndAtOnce,
    Interrupts,
    lasting_output,
    was_stopped_early,
)
from msrl.workflows.training.preflight import check_run_folder, check_start
from msrl.workflows.training.run_log import RunLog, checkpoint_root, counted
from msrl.workflows.training.settings import (
    adapted_base,
    check_order,
    checkpoint_to_resume,
    hf_files,
    order_state,
    rank_settings,
    schedule,
    worker_variables,
)

if TYPE_CHECKING:
    from msrl.workflows.sft.cluster import ClusterRanks

CURVES = ("train/loss", "eval/loss", "eval/perplexity", "train/grad_norm", "train/lr")


def run(config: Config) -> None:
    """Train as the configuration says. Raises MsrlError for what is wrong with it before any rank
    is started.
    """
    platform = resolve(config.cluster.platform)
    job = prepare(config, platform.name)
    saved = job.resume
    if saved is not None and saved.step == job.num_steps:
        finish_completed(config, saved, CURVES)
        return
    check_start(config, "train-sft", platform, saved, longest=job.longest_row)
    with (
        lasting_output(),
        RunLog(config, num_steps=job.num_steps, start_step=job.start_step, curves=CURVES) as log,
        EndAtOnce(),
    ):
        log.note(
            f"starting {counted(world_size(config), 'training rank')} on {platform.name}; the run is written to {log.path}"
        )
        with _ranks(config, job, platform) as ranks:
            messages = ranks.messages()
            next(messages, None)  # Started: until then there is nothing to save
            with Interrupts(ranks.ask_to_stop):
                last, ends = _followed(messages, log)
        is_stopped = was_stopped_early(ranks.was_asked_to_stop, last, job.num_steps)
        log.finish({**_results(config, last or saved, log.path, is_done=not is_stopped), **ends})
    if is_stopped:
        raise KeyboardInterrupt


def _ranks(config: Config, job: SftSetup, platform: Platform) -> LocalRanks | ClusterRanks:
    """Processes of this machine; with `cluster.address`, of the machines of that cluster."""
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


def _followed(messages: Iterator[Any], log: RunLog) -> tuple[SavedTraining | None, dict[str, str]]:
    """Log all that the ranks report; the last of their checkpoints, and why the training ended
    early if it did.
    """
    saved, ends = None, dict[str, str]()
    for message in messages:
        if isinstance(message, StepReport):
            log.log(message)
        elif isinstance(message, str):
            log.note(message)
            ends["end"] = message
        else:
            saved = message
            print(f"saved step {saved.step} in {saved.root}", file=sys.stderr)
    return saved, ends


def prepare(config: Config, platform: str) -> SftSetup:
    """Everything that the ranks need to know. Raises MsrlError."""
    if config.data.train is None and not config.data.blend:
        raise MsrlError("data.train: not set; name the output prefix of `msrl preprocess`")
    check_run_folder(config)
    rows = _checked_rows(config, hf_files(config))
    num_steps = config.train.steps or math.ceil(
        (config.train.epochs or 1) * len(rows) / config.train.global_batch
    )
    resume = checkpoint_to_resume(config, checkpoint_root(config))
    start_step = resume.step if resume else 0
    if start_step > num_steps:
        raise MsrlError(
            f"train.steps={num_steps}: {checkpoint_root(config)} is at step {start_step} already; raise it to go on"
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


def _checked_rows(config: Config, hf_dir: Path) -> Rows | TextRows:
    """The rows to train on; they and those held out fit the model and the configuration. Says how
    they came about. Raises MsrlError.
    """
    is_text = config.data.handler == "pretrain"
    for prefix in dict.fromkeys((*blend_of(config), config.data.eval)):
        if prefix is not None:
            dataset = (TextDataset if is_text else SftDataset)(prefix)
            check_data(dataset.manifest, config, hf_dir, prefix)
            verify_data(dataset, hf_dir)
    train, held_out = training_rows(config)
    trained_on = ", ".join(blend_of(config))
    check_lengths(config, trained_on, train)
    if held_out is not None:
        check_lengths(config, config.data.eval or f"what is held out of {trained_on}", held_out)
    named = {"data.train": train, "held out": held_out}
    if held_out is not None and config.data.eval is None:
        print(f"held out: {len(held_out)} of {len(train) + len(held_out)} rows", file=sys.stderr)
    for name, rows in named.items():
        for note in rows.notes(config.data.seq_length) if rows is not None else ():
            print(f"{name}: {note}", file=sys.stderr)
    return train


def _results(
    config: Config, saved: SavedTraining | None, run_dir: Path, *, is_done: bool
) -> dict[str, str]:
    results = checkpoint_results(saved, is_done=is_done)
    if saved and is_done and config.checkpoint.export_hf:
        from msrl.workflows.training.export import export_hf, final_checkpoint

        chosen, said = final_checkpoint(saved, keep_best=config.checkpoint.keep_best)
        folder = export_hf(
            chosen, run_dir / "hf", base=adapted_base(config), hf_dir=hf_files(config)
        )
        results["Hugging Face model"] = f"{folder}{said}"
    return results
