"""Weights & Biases tracker: one W&B run per attempt, in a group with the name of the run.

The environment variables of wandb select the destination (docs.wandb.ai, "Environment variables"):
WANDB_PROJECT (default msrl), WANDB_ENTITY and WANDB_MODE. With `WANDB_MODE=offline` no data leaves
the machine, and `wandb sync <run>/wandb/offline-run-*` uploads it later.

W&B cannot remove logged steps. An attempt that resumes from a checkpoint therefore creates a new
W&B run with the step in its name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from msrl.errors import MsrlError
from msrl.types import StepReport


def check() -> None:
    """Raise MsrlError if wandb is not installed or not logged in."""
    try:
        import wandb
    except ImportError as error:
        raise MsrlError(
            "log.trackers=wandb: the package wandb is not installed. "
            "Install it with `pip install 'msrl[wandb]'`."
        ) from error
    if os.environ.get("WANDB_MODE", "online") == "online" and not wandb.login(
        prompt=False, verify=False
    ):
        raise MsrlError(
            "log.trackers=wandb: not logged in. "
            "Run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline."
        )


def open_tracker(run_dir: Path, *, resumed_step: int | None = None) -> WandbTracker:
    """Return a tracker that writes to `run_dir/wandb` and, unless offline, to the service.

    Raises:
        MsrlError: wandb is not installed, not logged in or cannot start.
    """
    check()
    import wandb

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
        raise MsrlError(
            f"log.trackers=wandb: cannot start: {error}. "
            "Set WANDB_MODE=offline to keep all data on this machine."
        ) from error
    return WandbTracker(run)


class WandbTracker:
    """Tracker that logs scalars by metric name, and seconds per stage as `seconds/<stage>`."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, report: StepReport) -> None:
        scalars = dict(report.metrics) | {
            f"seconds/{stage}": seconds for stage, seconds in report.seconds.items()
        }
        self._run.log(scalars, step=report.step)

    def close(self) -> None:
        import wandb

        self._run.finish()
        # The last records of an offline run are in the file only after the service process ended.
        wandb.teardown()
