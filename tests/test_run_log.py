"""Run log on a full disk: one message with a remedy, whatever else fails during shutdown."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from msrl.cli.configuration import load_configuration as load
from msrl.errors import MsrlError
from msrl.tracking.metrics import MetricsWriter
from msrl.tracking.run import RunFolder
from msrl.types import StepReport
from msrl.workflows.training import run_log
from msrl.workflows.training.run_log import RunLog
from support import mentions


def _no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _open(folder: Path) -> RunLog:
    config = load(sets=[f"run.dir={folder}", "run.name=full", "log.trackers=[]"]).config
    return RunLog(config, num_steps=3, start_step=0, curves=("train/loss",))


def test_a_full_disk_for_metrics_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with (
        pytest.raises(
            MsrlError, match=mentions(tmp_path / "full", "step 2", "No space left on device")
        ),
        _open(tmp_path) as log,
    ):
        log.log(StepReport(1, {"train/loss": 2.0}, {}))
        monkeypatch.setattr(MetricsWriter, "log", _no_room)
        monkeypatch.setattr(MetricsWriter, "close", _no_room)  # close writes the buffered data
        log.log(StepReport(2, {"train/loss": 1.0}, {}))
    RunFolder.check(tmp_path, "full", resume=True)  # raises if the folder is still locked


def test_a_failed_write_at_the_end_of_a_run_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with (
        pytest.raises(MsrlError, match=mentions(tmp_path / "full", "No space left on device")),
        _open(tmp_path) as log,
    ):
        log.log(StepReport(1, {"train/loss": 2.0}, {}))
        monkeypatch.setattr(MetricsWriter, "close", _no_room)
    monkeypatch.undo()
    with (
        pytest.raises(
            MsrlError, match=mentions(tmp_path / "again", "report", "No space left on device")
        ),
        _open(tmp_path / "again") as log,
    ):
        log.log(StepReport(1, {"train/loss": 2.0}, {}))
        monkeypatch.setattr(run_log, "write_report", _no_room)
        log.finish({})
