"""Weights & Biases: one run of theirs for every attempt of ours, in a group that has the run's name.

Their own environment variables say where it goes: WANDB_PROJECT (msrl), WANDB_ENTITY, WANDB_MODE; with `WANDB_MODE=offline` nothing leaves
the machine, and `wandb sync <run>/wandb/offline-run-*` sends it later (docs.wandb.ai, "Environment variables"). Steps cannot be taken back
there: an attempt that goes on from a checkpoint therefore begins a run of its own, which says so.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from msrl.errors import MsrlError
from msrl.types import StepReport


def open_tracker(run_dir: Path, *, resumed_step: int | None = None) -> WandbTracker:
    """A tracker that writes to `run_dir/wandb`, and to the service unless it is told to stay offline. Raises MsrlError where it cannot."""
    try:
        import wandb
    except ImportError as error:
        raise MsrlError("log.trackers=wandb: the package wandb is not installed; pip install 'msrl[wandb]'") from error
    if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(prompt=False, verify=False):
        raise MsrlError("log.trackers=wandb: nobody is logged in; `wandb login`, or set WANDB_API_KEY, or WANDB_MODE=offline")
    config = run_dir / "config.yaml"
    settings = yaml.safe_load(config.read_text(encoding="utf-8")) if config.exists() else {}
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "msrl"),
            name=run_dir.name if not resumed_step else f"{run_dir.name} from step {resumed_step}",
            group=run_dir.name,
            dir=run_dir,
            config=settings,
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise MsrlError(f"log.trackers=wandb: it does not start: {error}; WANDB_MODE=offline keeps everything on this machine") from error
    return WandbTracker(run)


class WandbTracker:
    """Scalars by metric name; seconds per stage as `seconds/<stage>`."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, report: StepReport) -> None:
        scalars = dict(report.metrics) | {f"seconds/{stage}": seconds for stage, seconds in report.seconds.items()}
        self._run.log(scalars, step=report.step)

    def close(self) -> None:
        import wandb

        self._run.finish()
        wandb.teardown()  # until its process has ended the last records of a run that is offline may be on their way to the file
