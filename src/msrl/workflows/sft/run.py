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
from msrl.plan.run_plan import RunPlan
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
from msrl.workflows.training.data_checks import check_data, verify_data
from msrl.workflows.training.integrity import verify_models
from msrl.workflows.training.interrupts import (
    EndAtOnce,
    Interrupts,
    lasting_output,
    was_stopped_early,
)
from msrl.workflows.training.memory_check import check_memory
from msrl.workflows.training.run_log import RunLog, counted
from msrl.workflows.training.settings import (
    adapted_base,
    check_order,
    checkpoint_to_resume,
    loaded_models,
    order_state,
    rank_settings,
    schedule,
    worker_variables,
)

if TYPE_CHECKING:
    from msrl.workflows.sft.cluster import ClusterRanks

CURVES = ("train/loss", "eval/loss", "eval/perplexity", "train/grad_norm", "train/lr")


def run(plan: RunPlan) -> None:
    """Train as the configuration says. Raises MsrlError for what is wrong with it before any rank
    is started.
    """
    config = plan.config
    platform = resolve(config.cluster.platform)
    job = prepare(plan, platform.name)
    check_memory(plan, platform, longest=job.longest_row)
    saved = job.resume
    verify_models(loaded_models(plan, saved))
    with (
        lasting_output(),
        RunLog(config, num_steps=job.num_steps, start_step=job.start_step, curves=CURVES) as log,
        EndAtOnce(),
    ):
        log.note(
            f"starting {counted(plan.world_size, 'training rank')} on {platform.name}; the run is written to {log.path}"
        )
        with _ranks(config, job, platform) as ranks:
            messages = ranks.messages()
            next(messages, None)  # Started: until then there is nothing to save
            with Interrupts(ranks.ask_to_stop):
                last, ends = _followed(messages, log)
        is_stopped = was_stopped_early(ranks.was_asked_to_stop, last, job.num_steps)
        log.finish({**_results(plan, last or saved, log.path, is_done=not is_stopped), **ends})
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


def prepare(plan: RunPlan, platform: str) -> SftSetup:
    """Everything that the ranks need to know. Raises MsrlError."""
    config = plan.config
    if config.data.train is None and not config.data.blend:
        raise MsrlError("data.train: not set; name the output prefix of `msrl preprocess`")
    rows = _checked_rows(plan)
    num_steps = config.train.steps or math.ceil(
        (config.train.epochs or 1) * len(rows) / config.train.global_batch
    )
    resume = checkpoint_to_resume(config, plan.checkpoint_dir)
    start_step = resume.step if resume else 0
    if start_step >= num_steps:
        raise MsrlError(
            f"train.steps={num_steps}: {plan.checkpoint_dir} is at step {start_step} already; raise it to go on"
        )
    order, rates = row_order(config, rows), schedule(config, num_steps)
    state = {**order_state(order), **resume_checks.remembered(plan, rates)}
    if resume:
        check_order(resume, order, rows_per_step="train.global_batch")
        resume_checks.check(resume, state)
    check_room(plan.checkpoint_dir, resume)
    resume_checks.report_schedule(resume, rates, start_step)
    return SftSetup(
        config=config,
        settings=rank_settings(plan, platform, resume=resume),
        schedule=rates,
        order=order,
        state=state,
        num_steps=num_steps,
        start_step=start_step,
        resume=resume,
        checkpoint_dir=plan.checkpoint_dir,
        hf_dir=plan.model.hf_dir,
        longest_row=rows.longest,
    )


def _checked_rows(plan: RunPlan) -> Rows | TextRows:
    """The rows to train on; they and those held out fit the model and the configuration. Says how
    they came about. Raises MsrlError.
    """
    config = plan.config
    is_text = config.data.handler == "pretrain"
    for prefix in dict.fromkeys((*blend_of(config), config.data.eval)):
        if prefix is not None:
            dataset = (TextDataset if is_text else SftDataset)(prefix)
            check_data(dataset.manifest, plan, prefix)
            verify_data(dataset, plan)
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
    plan: RunPlan, saved: SavedTraining | None, run_dir: Path, *, is_done: bool
) -> dict[str, str]:
    results, config = checkpoint_results(saved, is_done=is_done), plan.config
    if saved and is_done and config.checkpoint.export_hf:
        from msrl.workflows.training.export import export_hf, final_checkpoint

        chosen, said = final_checkpoint(saved, keep_best=config.checkpoint.keep_best)
        folder = export_hf(
            chosen, run_dir / "hf", base=adapted_base(plan), hf_dir=plan.model.hf_dir
        )
        results["Hugging Face model"] = f"{folder}{said}"
    return results
