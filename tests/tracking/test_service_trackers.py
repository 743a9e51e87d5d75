"""MLflow, Trackio and ClearML: names and settings of attempts, and refusals before the start."""

from __future__ import annotations

import json
import signal
import sqlite3
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from golden import TRACKERS
from msrl.errors import MsrlError
from msrl.tracking.tracker import check_trackers, open_trackers
from msrl.types import StepReport
from support import mentions

SERVICES = ("clearml", "mlflow", "trackio")


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt as a service stored it: its title, group, one setting and the last step."""

    title: str
    group: str
    steps: str
    last: int


def mlflow_attempts(folder: Path) -> list[Attempt]:
    with sqlite3.connect(folder / "mlflow.db") as database:
        names = database.execute("SELECT run_uuid, name FROM runs ORDER BY start_time").fetchall()

        def value(table: str, run: str, key: str) -> Any:
            column = "MAX(step)" if table == "metrics" else "value"
            query = f"SELECT {column} FROM {table} WHERE run_uuid = ? AND key = ?"
            return database.execute(query, (run, key)).fetchone()[0]

        return [
            Attempt(
                name,
                value("tags", run, "group"),
                value("params", run, "train.steps"),
                value("metrics", run, "train/loss"),
            )
            for run, name in names
        ]


def trackio_attempts(folder: Path) -> list[Attempt]:
    with sqlite3.connect(folder / "math.db") as database:
        configs = database.execute("SELECT run_name, config FROM configs ORDER BY id").fetchall()
        query = "SELECT MAX(step) FROM metrics WHERE run_name = ?"
        last = {name: database.execute(query, (name,)).fetchone()[0] for name, _ in configs}
    settings = {name: json.loads(config) for name, config in configs}
    return [
        Attempt(name, config["_Group"], str(config["train"]["steps"]), last[name])
        for name, config in settings.items()
    ]


def clearml_attempts(folder: Path) -> list[Attempt]:
    tasks = sorted(folder.glob("offline/*/task.json"), key=lambda file: file.stat().st_mtime_ns)
    attempts: list[Attempt] = []
    for file in tasks:
        task = json.loads(file.read_text())
        lines = (file.parent / "metrics.jsonl").read_text().splitlines()
        last = max(event["iter"] for line in lines for event in json.loads(line))
        config = task["configuration"]["config"]["value"]
        steps = "3" if "steps = 3" in config else config
        attempts.append(Attempt(task["name"], task["tags"][0], steps, last))
    return attempts


READERS: Mapping[str, Callable[[Path], list[Attempt]]] = {
    "clearml": clearml_attempts,
    "mlflow": mlflow_attempts,
    "trackio": trackio_attempts,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_the_names_and_settings_of_every_attempt(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name)
    for variable, value in TRACKERS[name].env:
        monkeypatch.setenv(variable, value)
    run_dir, folder = tmp_path / "run", tmp_path / "own"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"train": {"steps": 3, "empty": None}}))
    project = "experiment" if name == "mlflow" else "project"
    options = {name: {project: "math", "group": "lab", "name": "first", "dir": str(folder)}}
    handler = signal.getsignal(signal.SIGTERM)
    for resumed_step, steps in ((None, (1, 2)), (1, (2, 3))):
        (tracker,) = open_trackers((name,), run_dir, resumed_step=resumed_step, options=options)
        for step in steps:
            tracker.log(StepReport(step, {"train/loss": 2.0 * step, "reward/x@1": float("nan")}))
        tracker.close()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert READERS[name](folder) == [
        Attempt("first", "lab", "3", 2),
        Attempt("first from step 1", "lab", "3", 3),
    ]


@pytest.mark.parametrize("name", SERVICES)
def test_a_missing_package_is_refused_with_the_extra_that_has_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MsrlError, match=mentions(f"log.trackers={name}", f"msrl[{name}]")) as error:
        check_trackers((name,))
    assert "\n" not in str(error.value)


def test_clearml_without_a_login_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "clearml", sys)  # any module
    monkeypatch.setenv("CLEARML_CONFIG_FILE", str(tmp_path / "none"))
    for name in ("CLEARML_API_ACCESS_KEY", "CLEARML_AUTH_TOKEN", "CLEARML_OFFLINE_MODE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MsrlError, match=mentions("log.trackers=clearml", "clearml-init")):
        check_trackers(("clearml",))
    check_trackers(("clearml",), {"clearml": {"mode": "offline"}})


def test_two_destinations_of_mlflow_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", sys)
    options = {"mlflow": {"uri": "http://127.0.0.1:9", "dir": "here"}}
    with pytest.raises(MsrlError, match=mentions("log.options.mlflow", "uri", "dir")):
        check_trackers(("mlflow",), options)
