"""ClearML tracker: one ClearML task per attempt, tagged with the name of the run.

The options, or else ClearML's settings (clearml.conf, CLEARML_API_HOST, CLEARML_OFFLINE_MODE),
select the destination. With mode offline, no data leaves the machine: a folder of
`<run>/clearml/offline` and a zip file beside it have it, which `Task.import_offline_session`
uploads. `dir` replaces `<run>/clearml`. Neither the code of the working folder nor the output of
the terminal is sent.

ClearML cannot remove logged steps. An attempt that resumes from a checkpoint therefore creates a
new task with the step in its name.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import signal
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Literal

from msrl.errors import MsrlError
from msrl.tracking.tracker import attempt_title, resolved_settings, scalars
from msrl.types import StepReport

# Packages that clearml connects unless they are named here, and the search for a repository.
_FRAMEWORKS = dict.fromkeys(
    (
        "catboost",
        "detect_repository",
        "fastai",
        "gradio",
        "hydra",
        "joblib",
        "jsonargparse",
        "lightgbm",
        "matplotlib",
        "megengine",
        "pytorch",
        "scikit",
        "tensorboard",
        "tensorflow",
        "tfdefines",
        "xgboost",
    ),
    False,
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGABRT)


def check(options: Mapping[str, Any]) -> None:
    """Raise MsrlError if clearml is not installed or has no server to log in to."""
    try:
        importlib.import_module("clearml")
    except ImportError as error:
        raise MsrlError(
            "log.trackers=clearml: the package clearml is not installed. "
            "Install it with `pip install 'msrl[clearml]'`."
        ) from error
    if not _is_offline(options.get("mode")) and not _has_login():
        raise MsrlError(
            "log.trackers=clearml: not logged in. Run `clearml-init`, or set CLEARML_API_HOST, "
            "CLEARML_API_ACCESS_KEY and CLEARML_API_SECRET_KEY, or "
            "log.options.clearml.mode=offline."
        )


def open_tracker(
    run_dir: Path,
    *,
    resumed_step: int | None,
    project: str | None = None,
    group: str | None = None,
    name: str | None = None,
    tags: list[str] | None = None,
    notes: str | None = None,
    dir: str | None = None,
    mode: Literal["online", "offline"] | None = None,
) -> ClearmlTracker:
    """Return a tracker that writes to `dir` or, with mode online, to the service.

    Raises:
        MsrlError: clearml is not installed, not logged in or cannot start.
    """
    check({"mode": mode})
    if _is_offline(mode):
        os.environ["CLEARML_CACHE_DIR"] = str(Path(dir or run_dir / "clearml").absolute())
    task_class = importlib.import_module("clearml").Task
    task_class.set_offline(_is_offline(mode))
    try:
        with _same_signal_handlers():
            task = task_class.init(
                project_name=project or "msrl",
                task_name=attempt_title(name or run_dir.name, resumed_step),
                tags=[group or run_dir.name, *(tags or ())],
                reuse_last_task_id=False,
                auto_connect_arg_parser=False,
                auto_connect_frameworks=_FRAMEWORKS,
                auto_resource_monitoring=False,
                auto_connect_streams=False,
            )
        if notes is not None:
            task.set_comment(notes)
        task.connect_configuration(resolved_settings(run_dir), name="config")
    except Exception as error:  # clearml has no common class of errors
        raise MsrlError(
            f"log.trackers=clearml: cannot start: {str(error).splitlines()[0]}. "
            "Set log.options.clearml.mode=offline to keep all data on this machine."
        ) from error
    return ClearmlTracker(task)


class ClearmlTracker:
    """Tracker that logs scalars to an open task.

    The part of a metric's name before the first slash is the title of a plot. Values that are not
    finite are left out, because clearml logs them as 0.
    """

    def __init__(self, task: Any) -> None:
        self._task = task
        self._logger = task.get_logger()

    def log(self, report: StepReport) -> None:
        for name, value in scalars(report).items():
            title, _, series = name.partition("/")
            if math.isfinite(value):
                self._logger.report_scalar(title, series or title, float(value), report.step)

    def close(self) -> None:
        with _same_signal_handlers():
            self._task.close()


@contextlib.contextmanager
def _same_signal_handlers() -> Generator[None]:
    """Keep the signal handlers of this process, which clearml replaces."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _is_offline(mode: str | None) -> bool:
    if mode is not None:
        return mode == "offline"
    return os.environ.get("CLEARML_OFFLINE_MODE", "0").lower() not in ("", "0", "false", "no")


def _has_login() -> bool:
    """Return True if there are credentials in the environment or in a file of `clearml-init`."""
    file = Path(os.environ.get("CLEARML_CONFIG_FILE") or Path.home() / "clearml.conf")
    names = ("CLEARML_API_ACCESS_KEY", "CLEARML_AUTH_TOKEN")
    return file.is_file() or any(os.environ.get(name) for name in names)
