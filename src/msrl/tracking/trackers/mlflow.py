"""MLflow tracker: one MLflow run per attempt, with the tag `group` for the name of the run.

The options, or else MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME, select the destination. Without
one, the database is `<run>/mlflow/mlflow.db`, or that name in the folder of the option `dir`, which
`mlflow ui --backend-store-uri sqlite:///FILE` shows.

MLflow cannot remove logged steps. An attempt that resumes from a checkpoint therefore creates a new
MLflow run with the step in its name. Steps that a server does not accept are reported at the end.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msrl.errors import MsrlError
from msrl.tracking.tracker import attempt_title, resolved_settings, scalars
from msrl.types import StepReport

_LOG = logging.getLogger(__name__)
_MAX_PARAMS = 100  # of one request
_MAX_METRICS = 1000
_OTHER = re.compile(r"[^\w\-. /:]")  # characters that names of metrics and parameters cannot have


def check(options: Mapping[str, Any]) -> None:
    """Raise MsrlError if mlflow is not installed, or has two destinations."""
    try:
        importlib.import_module("mlflow")
    except ImportError as error:
        raise MsrlError(
            "log.trackers=mlflow: the package mlflow is not installed. "
            "Install it with `pip install 'msrl[mlflow]'`."
        ) from error
    if options.get("uri") and options.get("dir"):
        raise MsrlError("log.options.mlflow: has both uri and dir. Remove one.")


def open_tracker(
    run_dir: Path,
    *,
    resumed_step: int | None,
    uri: str | None = None,
    experiment: str | None = None,
    group: str | None = None,
    name: str | None = None,
    tags: dict[str, str] | None = None,
    notes: str | None = None,
    dir: str | None = None,
) -> MlflowTracker:
    """Return a tracker that writes to the server or database `uri`, or to a database in `dir`.

    Raises:
        MsrlError: mlflow is not installed, or cannot start.
    """
    check({"uri": uri, "dir": dir})
    mlflow = importlib.import_module("mlflow")
    all_tags = {"group": group or run_dir.name, **(tags or {})}
    if notes is not None:
        all_tags["mlflow.note.content"] = notes
    try:
        client = mlflow.MlflowClient(tracking_uri=_destination(run_dir, uri, dir))
        title = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME", "msrl")
        found = client.get_experiment_by_name(title)
        experiment_id = found.experiment_id if found else client.create_experiment(title)
        run_name = attempt_title(name or run_dir.name, resumed_step)
        run = client.create_run(experiment_id, run_name=run_name, tags=all_tags)
        params = [mlflow.entities.Param(*leaf) for leaf in _leaves("", resolved_settings(run_dir))]
        for start in range(0, len(params), _MAX_PARAMS):
            client.log_batch(run.info.run_id, params=params[start : start + _MAX_PARAMS])
    except Exception as error:  # of mlflow, of its database or of the connection
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MsrlError(
            f"log.trackers=mlflow: cannot start: {reason}. Set log.options.mlflow.dir to keep all "
            "data on this machine."
        ) from error
    return MlflowTracker(client, run.info.run_id, mlflow.entities.Metric)


class MlflowTracker:
    """Tracker that logs to an open MLflow run. A thread of the package sends the steps."""

    def __init__(self, client: Any, run_id: str, metric: Any) -> None:
        self._client, self._run_id, self._metric = client, run_id, metric
        self._batches: list[Any] = []

    def log(self, report: StepReport) -> None:
        now_ms = int(1000 * time.time())
        values = scalars(report).items()
        metrics = [self._metric(_key(name), float(v), now_ms, report.step) for name, v in values]
        for start in range(0, len(metrics), _MAX_METRICS):
            batch = metrics[start : start + _MAX_METRICS]
            self._batches.append(
                self._client.log_batch(self._run_id, metrics=batch, synchronous=False)
            )

    def close(self) -> None:
        failures: list[Exception] = []
        for batch in self._batches:
            try:
                batch.wait()
            except Exception as error:
                failures.append(error)
        if failures:
            message = "%d of %d batches of metrics were not accepted: %s"
            _LOG.warning("mlflow: " + message, len(failures), len(self._batches), failures[0])
        else:
            self._client.set_terminated(self._run_id)


def _destination(run_dir: Path, uri: str | None, dir: str | None) -> str:
    """Return the address of the server or database."""
    address = uri or os.environ.get("MLFLOW_TRACKING_URI")
    if address and dir is None:
        return address
    folder = Path(dir or run_dir / "mlflow").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder}/mlflow.db"


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield the values of a configuration as text by dotted key."""
    if isinstance(value, Mapping) and value:
        for name, child in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), child)
    elif prefix:
        yield _key(prefix), str(value)


def _key(name: str) -> str:
    """Return a name with the characters that MLflow accepts."""
    return _OTHER.sub("_", name)
