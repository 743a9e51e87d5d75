"""Run log on a full disk: one message with a remedy, whatever else fails during shutdown."""

from __future__ import annotations

import errno
import io
import json
import re
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

from msrl.cli.configuration import load_configuration as load
from msrl.errors import MsrlError, ProcessFailedError, RunFailedError
from msrl.tracking import status_line
from msrl.tracking.metrics import MetricsWriter
from msrl.tracking.run import RunFolder
from msrl.types import StepReport
from msrl.workflows import report
from msrl.workflows.training import run_log
from msrl.workflows.training.run_log import RunLog
from support import assert_mentions, mentions, wait_until


def _no_room(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def _close_without_room(writer: MetricsWriter) -> None:
    writer._file.close()
    _no_room()


def _open(folder: Path, *sets: str, start_step: int = 0) -> RunLog:
    config = load(sets=[f"run.dir={folder}", "run.name=full", "log.trackers=[]", *sets]).config
    return RunLog(config, num_steps=3, start_step=start_step, curves=("train/loss",))


def _attempt(folder: Path) -> dict[str, Any]:
    """Return the last line of attempts.jsonl."""
    return json.loads((folder / "full" / "attempts.jsonl").read_text().splitlines()[-1])


def _log_steps(log: RunLog, last: int) -> None:
    for step in range(1, last + 1):
        log.log(StepReport(step, {"train/loss": 1.0 / step}, {"step": 2.0}))


def test_a_full_disk_for_metrics_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with (
        pytest.raises(
            MsrlError, match=mentions(tmp_path / "full", "step 2", "No space left on device")
        ),
        _open(tmp_path) as log,
    ):
        log.log(StepReport(1, {"train/loss": 2.0}, {}))
        monkeypatch.setattr(MetricsWriter, "log", _no_room)
        monkeypatch.setattr(
            MetricsWriter, "close", _close_without_room
        )  # close writes the buffered data
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
        monkeypatch.setattr(MetricsWriter, "close", _close_without_room)
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


def test_control_characters_of_notes_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with _open(tmp_path) as log:
        log.note("a server said \x1b]0;title\x07")
    assert "\x1b" not in capsys.readouterr().err


def test_an_attempt_records_how_it_ended(tmp_path: Path):
    with _open(tmp_path) as log:
        _log_steps(log, 3)
        log.finish({})
    assert _attempt(tmp_path).items() >= {"outcome": "completed", "last_step": 3}.items()
    with pytest.raises(MsrlError), _open(tmp_path, "checkpoint.resume=auto", start_step=3):
        raise MsrlError("disk is full\nremedy")
    failed = {"outcome": "failed", "last_step": 3, "error": "disk is full"}
    assert _attempt(tmp_path).items() >= failed.items()
    with _open(tmp_path, "checkpoint.resume=auto", start_step=2) as log:
        log.finish({})  # a signal ended it before the last step
    assert _attempt(tmp_path).items() >= {"outcome": "interrupted", "last_step": 2}.items()
    with (
        pytest.raises(KeyboardInterrupt),
        _open(tmp_path, "checkpoint.resume=auto", start_step=2),
    ):
        raise KeyboardInterrupt
    assert _attempt(tmp_path)["outcome"] == "interrupted"
    assert len((tmp_path / "full" / "attempts.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("is_restart", [False, True])
def test_samples_of_steps_that_are_repeated_are_removed(tmp_path: Path, is_restart: bool):
    with _open(tmp_path) as log:
        _log_steps(log, 3)
        names = [f"{folder}/step_00000{n}.jsonl" for folder in ("rollouts", "eval") for n in (1, 3)]
        files = [tmp_path / "full" / name for name in (*names, "rollouts/step_000002.parquet")]
        for file in files:
            file.parent.mkdir(exist_ok=True)
            file.touch()
        if is_restart:
            log.rewind(2)
    if not is_restart:
        with _open(tmp_path, "checkpoint.resume=auto", start_step=2):
            pass
    expected = [name not in ("step_000003.jsonl",) for name in (file.name for file in files)]
    assert [file.exists() for file in files] == expected


def test_the_log_has_all_printed_lines_with_their_time(tmp_path: Path):
    output = sys.stdout, sys.stderr
    with pytest.raises(ZeroDivisionError), _open(tmp_path) as log:
        log.note("starting")
        _log_steps(log, 1)
        print("a", end="")
        print("b\x07c")
        print("\x1b[2Ka bar", file=sys.stderr)
        raise ZeroDivisionError
    assert (sys.stdout, sys.stderr) == output
    text = (tmp_path / "full" / "log.txt").read_text()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in text.splitlines())
    assert_mentions(text, "starting", "step 1/3", "ab\\x07c", "ZeroDivisionError", "Traceback")
    assert "a bar" not in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _wait_for(stream: io.StringIO, text: str) -> None:
    wait_until(lambda: text in stream.getvalue())


def test_a_terminal_shows_the_stage_of_a_step_until_something_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(status_line, "INTERVAL_S", 0.01)
    with _open(tmp_path) as log:
        log.show_stage(1, "rollout")
        _wait_for(terminal, "step 1/3: rollout, ")
        log.note("a note")
        log.show_stage(1, "update")
        _wait_for(terminal, "step 1/3: update, ")
        log.show_stage(0)
    erase = "\r\x1b[2K"
    before, _, after = terminal.getvalue().partition("a note\n")
    assert before.endswith(erase) and terminal.getvalue().endswith(erase)
    assert "rollout" in before and "rollout" not in after
    assert "rollout" not in (tmp_path / "full" / "log.txt").read_text()


def test_a_long_stage_has_a_line_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    output = io.StringIO()
    monkeypatch.setattr(sys, "stderr", output)
    monkeypatch.setattr(status_line, "INTERVAL_S", 0.01)
    monkeypatch.setattr(status_line, "SILENCE_S", 0.05)
    with _open(tmp_path) as log:
        log.show_stage(2, "rollout")
        _wait_for(output, "step 2/3: rollout, ")
    assert "\x1b" not in output.getvalue()
    assert "step 2/3: rollout, " in (tmp_path / "full" / "log.txt").read_text()


def test_a_run_without_its_results_gets_them_from_the_report_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(MsrlError), _open(tmp_path) as log:
        _log_steps(log, 2)
        raise MsrlError("died before the report")
    capsys.readouterr()
    run = tmp_path / "full"
    report.run(run)
    assert "curves.png" in (run / "report.md").read_text()
    assert (run / "curves.png").is_file()
    assert_mentions(capsys.readouterr().out, run / "report.md")


@pytest.mark.parametrize("missing", ["config.yaml", "metrics.jsonl"])
def test_a_folder_that_is_no_run_has_no_report(missing: str, tmp_path: Path):
    with _open(tmp_path):
        pass
    (tmp_path / "full" / missing).unlink()
    with pytest.raises(MsrlError, match=mentions(tmp_path / "full")):
        report.run(tmp_path / "full")


RAY_DEATH = """\
rollout engine 0 failed: The actor died unexpectedly before finishing this task.
\tclass_name: RolloutActor
\tactor_id: 17e1
\tpid: 4711
\tnamespace: msrl
\tip: 10.0.0.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit \
detail: Worker unexpectedly exits with a connection error code 2. End of file. Some common causes.
also failed: training rank 1: BrokenPipeError: broken"""


def _trace() -> str:
    """Return what a rank sends before it ends."""
    try:
        int("too long")
    except ValueError:
        return f"rank 1 failed:\n{traceback.format_exc()}"
    raise AssertionError


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        (_trace(), ("rank 1", "ValueError: invalid literal", "too long")),
        (RAY_DEATH, ("rollout engine 0", "pid 4711", "10.0.0.2", "End of file|code 2")),
        ("rank 0 was ended by SIGKILL", ("rank 0", "SIGKILL")),
    ],
    ids=["exception", "death in Ray", "signal"],
)
def test_a_failed_process_is_one_message_with_the_command_that_resumes(
    text: str, summary: tuple[str, ...], tmp_path: Path
):
    checkpoints = tmp_path / "full" / "checkpoints"
    for step in (2, 4):
        (checkpoints / f"iter_{step:07d}").mkdir(parents=True)
        (checkpoints / "training" / f"iter_{step:07d}").mkdir(parents=True)
    with (
        pytest.raises(RunFailedError) as caught,
        _open(tmp_path, "checkpoint.resume=auto") as log,
    ):
        _log_steps(log, 5)
        raise ProcessFailedError(text)
    cause, resume, details = str(caught.value).splitlines()
    assert all(any(text in cause for text in fragment.split("|")) for fragment in summary)
    assert "BrokenPipe" not in cause
    assert_mentions(resume, "step 4", "--resume auto")
    assert_mentions(details, tmp_path / "full" / "log.txt")
    log_text = (tmp_path / "full" / "log.txt").read_text()
    assert all(line.strip() in log_text for line in text.replace("\t", "").splitlines())
    assert _attempt(tmp_path)["outcome"] == "failed"
