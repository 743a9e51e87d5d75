"""Weights & Biases tracker: one W&B run per attempt, in a group with the name of the run.

The options, or else the environment variables of wandb (docs.wandb.ai, "Environment variables"),
select the destination: `project` (WANDB_PROJECT, default msrl), `entity` (WANDB_ENTITY) and `mode`
(WANDB_MODE). With mode offline, no data leaves the machine, and `wandb sync` uploads the folder
`<run>/wandb/offline-run-*` later. `dir` is the parent of the folder `wandb`, by default the folder
of the run.

`id` is the id of the W&B run.

W&B cannot remove logged steps. An attempt that resumes from a checkpoint therefore creates a new
W&B run with the step in its name and its id.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msrl.errors import MsrlError
from msrl.tracking.tracker import RunTracker, attempt_title, resolved_settings


def check(options: Mapping[str, Any]) -> None:
    """Raise MsrlError if wandb is not installed or not logged in."""
    try:
        import wandb
    except ImportError as error:
        raise MsrlError(
            "log.trackers=wandb: the package wandb is not installed. "
            "Install it with `pip install 'msrl[wandb]'`."
        ) from error
    mode = options.get("mode") or os.environ.get("WANDB_MODE", "online")
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        raise MsrlError(
            "log.trackers=wandb: not logged in. "
            "Run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline."
        )


def open_tracker(
    run_dir: Path,
    *,
    resumed_step: int | None,
    project: str | None = None,
    entity: str | None = None,
    group: str | None = None,
    name: str | None = None,
    tags: list[str] | None = None,
    notes: str | None = None,
    id: str | None = None,
    dir: str | None = None,
    mode: Literal["online", "offline"] | None = None,
) -> WandbTracker:
    """Return a tracker that writes to `dir/wandb` and, unless offline, to the service.

    Raises:
        MsrlError: wandb is not installed, not logged in or cannot start.
    """
    check({"mode": mode})
    import wandb

    try:
        run = wandb.init(
            project=project or os.environ.get("WANDB_PROJECT", "msrl"),
            entity=entity,
            name=attempt_title(name or run_dir.name, resumed_step),
            group=group or run_dir.name,
            tags=tags,
            notes=notes,
            id=id if id is None or not resumed_step else f"{id}-from-step-{resumed_step}",
            dir=dir or run_dir,
            mode=mode,
            config=resolved_settings(run_dir),
            settings=wandb.Settings(silent=True, console="off"),
        )
    except wandb.Error as error:
        raise MsrlError(
            f"log.trackers=wandb: cannot start: {error}. "
            "Set WANDB_MODE=offline to keep all data on this machine."
        ) from error
    return WandbTracker(run)


class WandbTracker(RunTracker):
    """Tracker that logs to an open W&B run."""

    def close(self) -> None:
        import wandb

        super().close()
        # The last records of an offline run are in the file only after the service process ended.
        wandb.teardown()
