"""`msrl report RUN`: report, curves and exported models of an existing run."""

from __future__ import annotations

from pathlib import Path

from msrl.config.loader import Flag, load
from msrl.config.options import TRAININGS
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.limits import print_note
from msrl.packages import missing_package
from msrl.plan.run_plan import RunPlan, checkpoint_folder, resolve
from msrl.tracking.metrics import read_metrics
from msrl.tracking.plots import CURVES
from msrl.tracking.run import CONFIG, read_attempts, require_regular_files
from msrl.trainer.checkpointing.resume import SavedTraining, saved_steps
from msrl.workflows.training.best import checkpoint_results
from msrl.workflows.training.completed import final_results
from msrl.workflows.training.run_log import next_command, recorded_run, write_results


def run(folder: Path) -> None:
    """Write the report of the run in `folder` and print its results.

    Raises:
        MsrlError: The folder belongs to no run, or the run has no step.
    """
    file = folder / CONFIG
    if not file.is_file():
        raise MsrlError(
            f"{folder}: contains no {CONFIG}. Name the folder of a run, as in runs/sft."
        )
    require_regular_files(folder)
    reports = read_metrics(folder)
    if not reports:
        raise MsrlError(f"{folder}: the run has no step to report yet.")
    config = _config(folder)
    training = _training(config, folder)
    saved = _last_checkpoint(config)
    is_completed = saved is not None and _is_completed(folder, saved)
    if saved is not None and is_completed:
        results = _final_results(resolve(config, training), saved, folder)
    else:
        results = checkpoint_results(saved, is_done=True)
    command = next_command(
        config, folder, results, is_completed, is_reward_model=training == "train-rm"
    )
    write_results(
        folder,
        results,
        curves=CURVES[training],
        command=command,
        differences=config.run.differences,
        recorded=recorded_run(config),
    )


def _final_results(plan: RunPlan, saved: SavedTraining, folder: Path) -> dict[str, str]:
    """Export the models of a completed run; without torch, say that this is left out."""
    try:
        return final_results(plan, saved, folder)
    except ModuleNotFoundError as error:
        note = missing_package(error)
        if note is None:
            raise
        print_note(f"{folder}: its models are not exported. {note}")
        return checkpoint_results(saved, is_done=True)


def _training(config: Config, folder: Path) -> str:
    """Return the command of a run, from its last start or else from its configuration."""
    attempts = read_attempts(folder)
    words: list[str] = attempts[-1].get("command", []) if attempts else []
    started = next((word for word in words if word in TRAININGS), None)
    return started or ("train-grpo" if config.reward.sources else "train-sft")


def _config(folder: Path) -> Config:
    """Return the configuration of a run, whose folder may have been moved."""
    flags = [
        Flag("run.dir", str(folder.absolute().parent), "RUN"),
        Flag("run.name", folder.absolute().name, "RUN"),
    ]
    return load([str(folder / CONFIG)], flags=flags).config


def _last_checkpoint(config: Config) -> SavedTraining | None:
    """Return the newest complete checkpoint of the run, or None."""
    root = checkpoint_folder(config)
    for step in reversed(saved_steps(root)):
        saved = SavedTraining(root, step)
        if saved.damage() is None:
            return saved
    return None


def _is_completed(folder: Path, saved: SavedTraining) -> bool:
    """Return True if the checkpoint was saved by the run's last step."""
    attempts = read_attempts(folder)
    return bool(attempts) and attempts[-1].get("num_steps") == saved.step
