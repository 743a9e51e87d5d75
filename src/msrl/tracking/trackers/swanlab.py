"""SwanLab tracker: one SwanLab run per attempt, in a group with the name of the run.

The options, or else SwanLab's environment variables (SWANLAB_PROJ_NAME, SWANLAB_WORKSPACE,
SWANLAB_MODE), select the destination. With mode offline, no data leaves the machine, and
`swanlab sync` uploads the folders in `<run>/swanlab` later. `dir` replaces that folder.

SwanLab cannot remove logged steps. An attempt that resumes from a checkpoint therefore creates a
new SwanLab run with the step in its name.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from msrl.errors import MsrlError
from msrl.tracking.tracker import RunTracker, attempt_title, resolved_settings


def check(options: Mapping[str, Any]) -> None:
    """Raise MsrlError if swanlab is not installed or there is no login for its service."""
    try:
        importlib.import_module("swanlab")
    except ImportError as error:
        raise MsrlError(
            "log.trackers=swanlab: the package swanlab is not installed. "
            "Install it with `pip install 'msrl[swanlab]'`."
        ) from error
    mode = options.get("mode") or os.environ.get("SWANLAB_MODE", "online")
    if mode == "online" and not _has_login():
        raise MsrlError(
            "log.trackers=swanlab: not logged in. "
            "Run `swanlab login`, or set SWANLAB_API_KEY or log.options.swanlab.mode=offline."
        )


def open_tracker(
    run_dir: Path,
    *,
    resumed_step: int | None,
    project: str | None = None,
    workspace: str | None = None,
    group: str | None = None,
    name: str | None = None,
    tags: list[str] | None = None,
    notes: str | None = None,
    dir: str | None = None,
    mode: Literal["online", "local", "offline"] | None = None,
) -> RunTracker:
    """Return a tracker that writes to `dir` and, with mode online, to the service.

    Raises:
        MsrlError: swanlab is not installed, not logged in or cannot start.
    """
    check({"mode": mode})
    swanlab = importlib.import_module("swanlab")
    folder = Path(dir) if dir is not None else run_dir / "swanlab"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        run = swanlab.init(
            project=project or os.environ.get("SWANLAB_PROJ_NAME", "msrl"),
            workspace=workspace,
            name=attempt_title(name or run_dir.name, resumed_step),
            group=group or run_dir.name,
            tags=tags,
            description=notes,
            log_dir=str(folder),
            mode=mode,
            config=resolved_settings(run_dir),
            settings=swanlab.Settings(terminal={"proxy_type": "none"}),  # log.txt has all lines
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise MsrlError(
            f"log.trackers=swanlab: cannot start: {error}. "
            "Set log.options.swanlab.mode=offline to keep all data on this machine."
        ) from error
    return RunTracker(run)


def _has_login() -> bool:
    """Return True if an API key is in the environment or in a file of `swanlab login`."""
    home = str(Path.home() / ".swanlab")
    user = os.environ.get("SWANLAB_ROOT") or os.environ.get("SWANLAB_SAVE_DIR", home)
    files = (Path(user) / ".netrc", Path.cwd() / ".swanlab" / ".netrc")
    return bool(os.environ.get("SWANLAB_API_KEY")) or any(file.is_file() for file in files)
