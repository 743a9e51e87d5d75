"""Trackio tracker: one Trackio run per attempt, in a group with the name of the run.

Without a destination, all data stays on the machine: a SQLite file per project in
`<run>/trackio`, in the folder of the option `dir`, or in TRACKIO_DIR. `trackio show` with the same
TRACKIO_DIR shows it. `space` (TRACKIO_SPACE_ID) is a Space on the Hugging Face Hub, and `server`
(TRACKIO_SERVER_URL) the address of a Trackio server.

Trackio cannot remove logged steps. An attempt that resumes from a checkpoint therefore creates a
new run with the step in its name.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msrl.errors import MsrlError
from msrl.tracking.tracker import RunTracker, attempt_title, resolved_settings

_FOLDER = "TRACKIO_DIR"  # which the package reads when it is imported


def check(options: Mapping[str, Any]) -> None:
    """Raise MsrlError if trackio is not installed."""
    if importlib.util.find_spec("trackio") is None:
        raise MsrlError(
            "log.trackers=trackio: the package trackio is not installed. "
            "Install it with `pip install 'msrl[trackio]'`."
        )


def open_tracker(
    run_dir: Path,
    *,
    resumed_step: int | None,
    project: str | None = None,
    group: str | None = None,
    name: str | None = None,
    space: str | None = None,
    server: str | None = None,
    dir: str | None = None,
) -> TrackioTracker:
    """Return a tracker that writes to `dir` and, if one is set, to a Space or a server.

    Raises:
        MsrlError: trackio is not installed, or cannot start.
    """
    check({})
    folder = Path(dir or os.environ.get(_FOLDER) or run_dir / "trackio").absolute()
    package = _package(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # lines on its pages
            package.init(
                project=project or "msrl",
                name=attempt_title(name or run_dir.name, resumed_step),
                group=group or run_dir.name,
                space_id=space,
                server_url=server,
                config=resolved_settings(run_dir),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
    except Exception as error:  # trackio and its packages have no common class of errors
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MsrlError(
            f"log.trackers=trackio: cannot start: {reason}. Remove log.options.trackio.space and "
            "server to keep all data on this machine."
        ) from error
    return TrackioTracker(package)


class TrackioTracker(RunTracker):
    """Tracker that logs to the open run of the package."""

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            super().close()


def _package(folder: Path) -> Any:
    """Return the package, which writes to a folder.

    Other packages may have imported it before, with another folder.
    """
    os.environ[_FOLDER] = str(folder)
    package = importlib.import_module("trackio")
    if Path(package.TRACKIO_DIR).absolute() == folder:
        return package
    for name in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        del sys.modules[name]
    return importlib.import_module("trackio")
