"""Output of a run: progress, metrics, trackers, console, plots, the run folder and the report."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import pty
import re
import subprocess
import sys
import time
import types
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml

from golden import wandb_records
from msrl.errors import MsrlError
from msrl.files import atomic_write, write_text
from msrl.limits import one_line
from msrl.tracking.console import COLUMNS, StepConsole
from msrl.tracking.curves import Point, plot_curves
from msrl.tracking.metrics import MetricsWriter, read_metrics, to_line
from msrl.tracking.plots import plot_distributions, plot_metrics, running_mean
from msrl.tracking.progress import amount_text, duration_text, progress
from msrl.tracking.report import lines, summarize, write_report
from msrl.tracking.run import RunFolder, read_attempts, resume_command, stack_versions
from msrl.tracking.tracker import Trackers, open_trackers
from msrl.types import StepReport
from support import assert_mentions, mentions, wait_until


def report(step: int, **metrics: float) -> StepReport:
    return StepReport(
        step,
        {name.replace("__", "/"): value for name, value in metrics.items()},
        {"step": 0.5, "update": 0.25},
    )


def test_a_link_in_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    """A folder of others, such as that of a run, may have links with any names."""
    (tmp_path / "other").write_text("other")
    (tmp_path / f".report.md.{os.getpid()}.part").symlink_to(tmp_path / "other")
    write_text(tmp_path / "report.md", "new")
    assert (tmp_path / "other").read_text() == "other"
    assert (tmp_path / "report.md").read_text() == "new"
    assert not (tmp_path / "report.md").is_symlink()


def test_a_file_is_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with pytest.raises(RuntimeError), atomic_write(path) as beside:
        beside.write_text("half of the n")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_progress_without_a_terminal_is_plain_lines_with_rate_and_remaining_time() -> None:
    out = io.StringIO()
    with progress("converting", total=4_000_000, unit="B", stream=out, interval_s=0.0) as bar:
        bar.advance(1_000_000)
        bar.advance(3_000_000)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("converting: 1.0 MB of 4.0 MB (25%), ")
    assert lines[0].endswith(" left")
    assert lines[-1].startswith("converting: done, 4.0 MB in ")


def test_progress_without_a_terminal_has_lines_while_nothing_advances() -> None:
    out = io.StringIO()
    with progress("loading", total=3, unit="sequences", stream=out, interval_s=0.01):
        wait_until(out.getvalue)
    assert out.getvalue().startswith("loading: 0 of 3 sequences (0%), ")


def test_progress_of_quick_work_is_one_line() -> None:
    out = io.StringIO()
    with progress("reading", unit="rows", stream=out) as bar:
        for _ in range(1000):
            bar.advance()
    assert len(out.getvalue().splitlines()) == 1
    assert "1,000 rows" in out.getvalue()


def test_progress_reports_that_work_was_stopped() -> None:
    out = io.StringIO()
    with pytest.raises(KeyboardInterrupt), progress("reading", total=10, stream=out) as bar:
        bar.advance(3)
        raise KeyboardInterrupt
    assert_mentions(out.getvalue(), "reading: ", "stopped", "3 it")


def run_on_terminal(code: str) -> tuple[bytes, str]:
    """Run Python code; return its standard output, and its standard error, which is a terminal."""
    leader, follower = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-c", code],
        stderr=follower,
        stdout=subprocess.PIPE,
        env=os.environ | {"TERM": "xterm"},
        check=True,
    )
    os.close(follower)
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    return done.stdout, shown


def test_progress_on_a_terminal_is_a_bar_on_standard_error_only() -> None:
    code = (
        "from msrl.tracking.progress import progress\nwith progress('packing', total=2, "
        "unit='rows') as bar: bar.advance(2)"
    )
    output, shown = run_on_terminal(code)
    assert output == b""
    assert "packing" in shown
    assert "2/2" in shown


def test_standard_output_stays_where_it_is_while_a_bar_is_shown() -> None:
    code = (
        "from msrl.tracking.progress import progress\nwith progress('packing', total=2) as bar:\n"
        "    print('verified'); bar.advance(2)\nprint('table')"
    )
    output, shown = run_on_terminal(code)
    assert output == b"verified\ntable\n" and "verified" not in shown


@pytest.mark.parametrize(
    ("amount", "unit", "text"),
    [
        (999, "B", "999 B"),
        (1_190_000_000, "B", "1.2 GB"),
        (2.5e12, "B", "2.5 TB"),
        (6000, "docs", "6,000 docs"),
    ],
)
def test_amounts_are_formatted(amount: float, unit: str, text: str) -> None:
    assert amount_text(amount, unit) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(4.24, "4.2 s"), (9.97, "0:00:10"), (65, "0:01:05"), (3 * 3600 + 59.6, "3:01:00")],
)
def test_durations_are_formatted(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_metrics_are_read_as_they_were_logged(tmp_path: Path) -> None:
    reports = (
        report(1, train__loss=2.5),
        StepReport(2, {"a": math.inf, "b": -math.inf}, notes=("slow \u2028 node",)),
    )
    with MetricsWriter(tmp_path) as writer:
        for row in reports:
            writer.log(row)
    assert read_metrics(tmp_path) == reports


def test_metrics_are_json_that_strict_parsers_read(tmp_path: Path) -> None:
    line = to_line(report(1, train__loss=math.nan))
    row = json.loads(line, parse_constant=pytest.fail)
    assert row == {
        "step": 1,
        "metrics": {"train/loss": "NaN"},
        "seconds": {"step": 0.5, "update": 0.25},
    }
    (tmp_path / "metrics.jsonl").write_bytes(line)
    assert math.isnan(read_metrics(tmp_path)[0].metrics["train/loss"])


def test_numbers_are_read_back_exactly() -> None:
    values = [0.1, -0.0, 1e-6, 1e22, 5e-324, sys.float_info.max, 1 / 3, 2**53, np.float32(0.1)]
    metrics = {f"value_{index}": value for index, value in enumerate(values)}
    row = json.loads(to_line(StepReport(1, metrics)))
    assert [float(value) for value in row["metrics"].values()] == values


def test_each_step_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.log(report(1, train__loss=1.0))
    assert len(read_metrics(tmp_path)) == 1
    writer.close()


def test_resuming_removes_later_steps_and_a_truncated_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(
        b"".join(to_line(report(step, x=step)) for step in range(1, 6))
        + b'{"step": 6, "notes": ["\xc3'
    )
    assert [row.step for row in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    with MetricsWriter(tmp_path, resumed_step=3) as writer:
        assert writer.num_dropped == 3
        writer.log(report(4, x=40))
    assert [row.metrics["x"] for row in read_metrics(tmp_path)] == [1, 2, 3, 40]


def test_metrics_of_another_run_are_not_appended_to(tmp_path: Path) -> None:
    MetricsWriter(tmp_path).log(report(1))
    with pytest.raises(MsrlError, match=mentions("metrics.jsonl", "run.name")):
        MetricsWriter(tmp_path)


def test_a_broken_line_of_metrics_raises_an_error_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(to_line(report(1)) + b"[]\n" + to_line(report(2)))
    with pytest.raises(MsrlError, match=mentions("metrics.jsonl:2", "step")):
        read_metrics(tmp_path)


def test_missing_metrics_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MsrlError, match=mentions(tmp_path / "nothing", "metrics")):
        read_metrics(tmp_path / "nothing")


def test_tensorboard_reads_the_events_and_hides_repeated_steps_of_a_resumed_run(
    tmp_path: Path,
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resumed_step, steps, loss in [(None, (1, 2, 3), 1.0), (1, (2, 3), 2.0)]:
        (tracker,) = open_trackers(("tensorboard",), tmp_path, resumed_step=resumed_step)
        for step in steps:
            tracker.log(report(step, train__loss=loss * step))
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [
        (1, 1.0),
        (2, 4.0),
        (3, 6.0),
    ]
    assert [event.value for event in events.Scalars("seconds/update")] == [0.25] * 3


def test_tensorboard_gets_metrics_whose_names_change_every_step(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tracker,) = open_trackers(("tensorboard",), tmp_path)
    for step in range(1, 41):
        tracker.log(StepReport(step, {f"reward/{step % 20}": step, "train/loss": -step}, {}))
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.value for event in events.Scalars("train/loss")] == [-s for s in range(1, 41)]
    for number in range(20):
        values = [event.value for event in events.Scalars(f"reward/{number}")]
        assert values == [number or 20, number + 20 if number else 40]


@pytest.mark.full
@pytest.mark.slow
def test_wandb_stores_every_step_of_every_attempt_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "config.yaml").write_text("train: {steps: 3}\n")
    attempts = []
    for resumed_step, steps in [(None, (1, 2, 3)), (1, (2, 3))]:
        (tracker,) = open_trackers(("wandb",), tmp_path, resumed_step=resumed_step)
        for step in steps:
            tracker.log(report(step, train__loss=2.0 * step))
        tracker.close()
        (file,) = set(tmp_path.glob("wandb/offline-run-*/*.wandb")) - {
            file for file, _, _ in attempts
        }
        records = [Record.FromString(data) for data in wandb_records(file)]
        names = {record.run.display_name for record in records if record.run.display_name}
        items = [
            {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            for record in records
        ]
        attempts.append(
            (
                file,
                names,
                [
                    (json.loads(row["_step"]), json.loads(row["train/loss"]))
                    for row in items
                    if "train/loss" in row
                ],
            )
        )
        assert all(row["seconds/update"] == "0.25" for row in items if "train/loss" in row)
    assert [[names, steps] for _, names, steps in attempts] == [
        [{tmp_path.name}, [(1, 2.0), (2, 4.0), (3, 6.0)]],
        [{f"{tmp_path.name} from step 1"}, [(2, 4.0), (3, 6.0)]],
    ]


def test_wandb_without_the_package_or_a_login_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        MsrlError, match=mentions("log.trackers=wandb", "wandb", "pip install 'msrl[wandb]'")
    ):
        open_trackers(("wandb",), tmp_path)
    nobody = types.ModuleType("wandb")
    vars(nobody)["login"] = lambda **_: False
    monkeypatch.setitem(sys.modules, "wandb", nobody)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    with pytest.raises(MsrlError, match=mentions("WANDB_MODE=offline", "logged in")):
        open_trackers(("wandb",), tmp_path)


def test_tensorboard_writes_to_the_folder_of_its_option(tmp_path: Path) -> None:
    options = {"tensorboard": {"dir": str(tmp_path / "boards" / "one")}}
    (tracker,) = open_trackers(("tensorboard",), tmp_path, options=options)
    tracker.log(report(1, train__loss=1.0))
    tracker.close()
    assert list((tmp_path / "boards" / "one").glob("events.*"))
    assert not (tmp_path / "tensorboard").exists()


@pytest.mark.full
@pytest.mark.slow
def test_wandb_has_the_project_the_names_and_the_folder_of_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.delenv("WANDB_MODE", raising=False)
    values = {"project": "math", "entity": "team", "group": "all", "name": "first", "tags": ["a"]}
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    options = {"wandb": {**values, "notes": "a note", "dir": str(folder), "mode": "offline"}}
    (tracker,) = open_trackers(("wandb",), tmp_path, options=options)
    tracker.log(report(1, train__loss=1.0))
    tracker.close()
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    runs = [Record.FromString(data).run for data in wandb_records(file)]
    (run,) = [run for run in runs if run.project]
    assert (run.project, run.entity, run.run_group, run.display_name) == (
        "math",
        "team",
        "all",
        "first",
    )
    assert (list(run.tags), run.notes) == (["a"], "a note")


def test_an_unknown_option_of_a_tracker_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MsrlError, match=mentions("log.options.tensorboard.folder", "dir")):
        open_trackers(("tensorboard",), tmp_path, options={"tensorboard": {"folder": "x"}})


def test_an_unknown_tracker_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(MsrlError, match=mentions("log.trackers=tensorbord", "'tensorboard'")):
        open_trackers(("tensorbord",), tmp_path)


def test_all_trackers_are_closed_even_if_one_fails() -> None:
    class Failing:
        def log(self, report: StepReport) -> None: ...

        def close(self) -> None:
            raise OSError("disk full")

    class Closing(Failing):
        closed = False

        def close(self) -> None:
            self.closed = True

    last = Closing()
    with pytest.raises(OSError, match="disk full"):
        Trackers([Failing(), last]).close()
    assert last.closed


def test_the_console_line_contains_loss_rate_speed_and_remaining_time() -> None:
    out = io.StringIO()
    console = StepConsole(100, stream=out)
    console.log(
        report(20, train__loss=2.34567, train__lr=1e-4, perf__tokens_per_s=4096.4, other=1.0)
    )
    assert (
        out.getvalue()
        == "step  20/100  loss 2.3457  lr 1.0e-04  tok/s 4,096  0.50 s/step  0:00:40 left\n"
    )


def test_the_console_prints_the_first_step_every_nth_the_last_evaluations_and_notes() -> None:
    out = io.StringIO()
    console = StepConsole(9, every_steps=4, stream=out)
    for step in range(1, 10):
        metrics = {"eval/reward": 0.25} if step == 6 else {}
        console.log(
            StepReport(step, metrics, notes=("all rewards are equal",) if step == 3 else ())
        )
    expected = [
        "step 1/9",
        "step 3: all rewards are equal",
        "step 4/9",
        "step 6/9  eval reward 0.250",
        "step 8/9",
        "step 9/9",
    ]
    assert out.getvalue().splitlines() == expected


def test_a_run_folder_contains_the_resolved_configuration_and_the_versions(tmp_path: Path) -> None:
    with RunFolder.create(
        tmp_path, "first", config={"run": {"seed": 0}, "stop": ["é"]}, argv=["msrl", "train-sft"]
    ) as run:
        assert yaml.safe_load((run.path / "config.yaml").read_text()) == {
            "run": {"seed": 0},
            "stop": ["é"],
        }
        attempt = json.loads((run.path / "attempts.jsonl").read_text())
        assert attempt["command"] == ["msrl", "train-sft"]
        assert attempt["versions"] == stack_versions()
        assert attempt["versions"]["numpy"] == __import__("numpy").__version__
        assert run.attempt == 1


@pytest.mark.parametrize(
    "file", ["metrics.jsonl", "checkpoints/iter_0000002/x", "iter_0000002/x", "notes.txt"]
)
def test_an_existing_run_is_refused_with_a_remedy(file: str, tmp_path: Path) -> None:
    if file != "notes.txt":  # any file of a folder without attempts belongs to someone else
        RunFolder.create(tmp_path, "a", config={}).close()
    (tmp_path / "a" / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "a" / file).write_text("1\n")
    before = sorted(tmp_path.rglob("*"))
    for open_run in (RunFolder.check, partial(RunFolder.create, config={})):
        with pytest.raises(MsrlError, match=mentions(tmp_path / "a", "--resume auto", "run.name")):
            open_run(tmp_path, "a")
    RunFolder.check(tmp_path, "a", resume=True)
    assert sorted(path for path in tmp_path.rglob("*") if path.name != ".lock") == [
        path for path in before if path.name != ".lock"
    ]


def test_a_run_that_failed_before_its_first_step_can_be_started_again(
    tmp_path: Path,
) -> None:
    with RunFolder.create(tmp_path, "a", config={"lr": 1}) as failed:
        Trackers(
            [MetricsWriter(failed.path), *open_trackers(("tensorboard",), failed.path)]
        ).close()
        (failed.path / "checkpoints").mkdir()
        with pytest.raises(MsrlError, match=mentions(tmp_path / "a", "process")):
            RunFolder.check(tmp_path, "a")
    RunFolder.check(tmp_path, "a")
    with RunFolder.create(tmp_path, "a", config={"lr": 2}) as run:
        assert run.attempt == 2 and len((run.path / "attempts.jsonl").read_text().splitlines()) == 2
        assert yaml.safe_load((run.path / "config.1.yaml").read_text()) == {"lr": 1}


def test_a_start_that_was_not_recorded_completely_is_left_out(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a", config={}).close()
    with (tmp_path / "a" / "attempts.jsonl").open("a") as file:
        file.write('{"attempt": 2, "comm')  # as on a full disk
    assert resume_command(tmp_path / "a") is not None
    with RunFolder.create(tmp_path, "a", config={}, resume=True) as run:
        assert run.attempt == 2
    assert [row["attempt"] for row in read_attempts(tmp_path / "a")] == [1, 2]


def test_a_resumed_run_keeps_its_earlier_configuration(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a", config={"lr": 1}).close()
    RunFolder.create(tmp_path, "a", config={"lr": 1}, resume=True).close()
    with RunFolder.create(tmp_path, "a", config={"lr": 2}, resume=True) as run:
        assert run.attempt == 3
        assert yaml.safe_load((run.path / "config.yaml").read_text()) == {"lr": 2}
        assert yaml.safe_load((run.path / "config.2.yaml").read_text()) == {"lr": 1}


def test_a_run_is_written_by_one_process_at_a_time(tmp_path: Path) -> None:
    code = (
        f"from msrl.tracking.run import RunFolder; RunFolder.create({str(tmp_path)!r}, 'a', "
        f"config={{}}, resume=True)"
    )
    with RunFolder.create(tmp_path, "a", config={}):
        other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert_mentions(other.stderr, tmp_path / "a", "process")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("name", ["", "..", "a/b", "/tmp"])
def test_a_run_name_cannot_leave_its_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(MsrlError, match=r"run\.name="):
        RunFolder.create(tmp_path, name, config={})


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("a/b", "file"),
        ("/proc/x", "No such file"),
        ("/sys/kernel/x", "denied|not permitted|Read-only"),
        ("l" * 300, "too long"),
    ],
)
def test_a_run_folder_that_cannot_be_created_is_refused_with_the_reason(
    folder: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("")
    for open_run in (RunFolder.check, partial(RunFolder.create, config={})):
        with pytest.raises(MsrlError, match=rf"(?s)folder.*({reason}).*run\.dir"):
            open_run(tmp_path / folder, "run")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_plot_is_a_png_with_a_panel_per_metric_and_returns_missing_metrics(
    tmp_path: Path,
) -> None:
    from PIL import Image

    reports = [
        report(step, loss=math.nan if step == 3 else 1 / step, reward=step) for step in range(1, 80)
    ]
    assert plot_metrics(
        reports, ["loss", "reward", "kl"], tmp_path / "curves.png", title="a run"
    ) == ("kl",)
    assert plot_metrics(reports, ["loss"], tmp_path / "loss.png") == ()
    curves, loss = Image.open(tmp_path / "curves.png"), Image.open(tmp_path / "loss.png")
    assert curves.format == "PNG"
    assert curves.width > loss.width
    assert len({pixel for _, pixel in loss.convert("RGB").getcolors(1 << 20)}) > 10


def test_metrics_of_training_and_evaluation_share_a_panel_within_natural_bounds() -> None:
    from matplotlib.figure import Figure

    from msrl.tracking import plots

    figures: list[Figure] = []
    reports = [
        report(step, **{"train/loss": 1.0, "eval/loss": 2.0, "eval/pass@1": 0.0, "train/lr": step})
        for step in range(1, 80)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
        patch.setattr(plots, "atomic_write", lambda path: contextlib.nullcontext(path))
        plot_metrics(
            reports, ["train/loss", "eval/loss", "eval/pass@1", "train/lr"], Path("curves.png")
        )
    panels = {axes.get_title(): axes for axes in figures[0].axes if axes.get_visible()}
    assert list(panels) == ["loss", "eval/pass@1", "train/lr"]
    assert [text.get_text() for text in panels["loss"].get_legend().get_texts()] == [
        "train/loss, running mean",
        "eval/loss, running mean",
    ]
    assert panels["eval/pass@1"].get_ylim()[0] >= -0.03
    assert len(panels["train/lr"].lines) == 1, "a learning rate has no noise to smooth"


def test_a_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MsrlError, match=mentions("plot", "kl")):
        plot_metrics([report(1)], ["kl"], tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_a_running_mean_ignores_nan() -> None:
    assert running_mean([1.0, math.nan, 5.0], 2) == [1.0, 1.0, 5.0]
    assert math.isnan(running_mean([math.nan], 3)[0])


@pytest.mark.slow
def test_plots_need_no_display_and_do_not_import_pyplot() -> None:
    code = (
        "import sys, pathlib, tempfile\nfrom msrl.tracking.plots import plot_metrics\nfrom "
        "msrl.types import StepReport\n"
        "plot_metrics([StepReport(1, {'a': 1.0})], ['a'], pathlib.Path(tempfile.mkdtemp()) / "
        "'a.png')\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    environment = {name: value for name, value in os.environ.items() if name != "DISPLAY"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_the_report_contains_metrics_times_and_notes(
    tmp_path: Path,
) -> None:
    reports = [
        StepReport(s, {"loss": v}, {"step": 2.0, "rollout": 1.5}, ("retry",))
        for s, v in [(3, 2.0), (4, math.nan), (5, 1.0)]
    ]
    path = write_report(tmp_path, summarize(reports), results={"exported": "hf"})
    text = path.read_text()
    assert "3 steps (3 to 5) in 6.0 s." in text
    assert "- exported: hf" in text
    assert "| loss (1 not finite) | 2 | 1 | 1 | 2 |" in text
    assert "| rollout | 4.5 s | 75% |" in text
    assert "- `retry` (3 times)" in text


@pytest.mark.parametrize("text", ["![x](http://h/?q) <img src=x>", "a`b``c`", "`", "a\n# b\x1b[2J"])
def test_no_markup_of_a_note_takes_effect_in_the_report(tmp_path: Path, text: str) -> None:
    path = write_report(tmp_path, summarize([StepReport(1, {}, {}, (text,))]))
    (line,) = [row for row in path.read_text().splitlines() if row.endswith("(1 times)")]
    code = re.fullmatch(r"- (`+)( ?)(.*)\2\1 \(1 times\)", line)
    assert code is not None and "\x1b" not in line
    assert code[1] not in re.findall("`+", code[3])
    assert code[3] == one_line(text)


def test_the_report_shows_the_curves_and_the_next_command(tmp_path: Path) -> None:
    summary = summarize([StepReport(1, {"loss": 1.0}, {"step": 90.0})])
    path = write_report(tmp_path, summary, picture="curves.png", command="msrl chat --model a")
    text = path.read_text()
    assert "in 0:01:30" in text
    assert "](curves.png)" in text
    assert "```bash\nmsrl chat --model a\n```" in text


def test_a_console_line_fits_into_100_characters_and_has_no_negative_zero() -> None:
    metrics = {name: 12345.6789 for name, _, _ in COLUMNS} | {"eval/pass@1": 1.0}
    line = StepConsole(10_000).line(
        StepReport(9_999, {**metrics, "train/loss": -0.00001, "reward/mean": -0.0}, {"step": 12.3})
    )
    assert len(line) <= 100
    assert "loss 0.0000" in line
    assert "reward 0.000" in line
    short = StepConsole(10).line(StepReport(1, {"train/loss": -0.5, "train/lr": 1e-6}, {}))
    assert "loss -0.5000" in short
    assert "lr 1.0e-06" in short


def test_metrics_that_were_removed_during_a_run_are_restored(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.log(report(1))
        writer.path.unlink()
        writer.log(report(2))
        writer.log(report(3))
        assert [row.step for row in read_metrics(tmp_path)] == [1, 2, 3]
        writer.path.unlink()
    assert [row.step for row in read_metrics(tmp_path)] == [1, 2, 3]


def test_lines_of_metrics_have_a_time_that_a_resumed_run_retains(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.log(report(1))
        writer.log(report(2))
    first = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert abs(datetime.fromisoformat(first["time"]).timestamp() - time.time()) < 60
    MetricsWriter(tmp_path, resumed_step=1).close()
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()] == [first]


def test_the_command_that_resumes_a_run_is_its_last_one_with_resume(tmp_path: Path) -> None:
    for resume in ([], ["--resume", "auto"], ["--resume=auto"]):
        argv = ["/bin/msrl", "train-sft", "-c", "my file.yaml", *resume, "--lr", "1e-5"]
        with RunFolder.create(tmp_path, "run", config={}, resume=True, argv=argv):
            pass
        command = resume_command(tmp_path / "run")
        assert command == "msrl train-sft -c 'my file.yaml' --lr 1e-5 --resume auto"


def test_an_evaluation_of_the_initial_model_is_not_a_step(tmp_path: Path) -> None:
    summary = summarize([StepReport(0, {"eval/loss": 2.0}, {"eval": 1.0})])
    assert summary.num_steps == 0
    assert "No step" in write_report(tmp_path, summary).read_text()


def test_a_run_without_steps_has_no_report() -> None:
    with pytest.raises(MsrlError, match=mentions("step")):
        summarize([])


def test_names_of_a_report_are_no_markup() -> None:
    name = "a|b\n<img src=x>[y](z)`"
    summary = summarize([StepReport(1, {name: 1.0}, {name: 1.0}, ())])
    text = lines(summary, title=name, results={name: name})
    plain = r"a\|b\\n\<img src=x\>\[y\](z)\`"
    assert text[0] == f"# {plain}"
    assert f"- {plain}: {plain}" in text
    assert sum(line.startswith(f"| {plain} |") for line in text) == 2


def test_the_report_of_an_asynchronous_run_has_a_timeline_of_its_steps() -> None:
    reports = [
        StepReport(step, {"perf/engine_idle": 0.25 * step}, {"wait": 0.5, "update": 1.0 * step})
        for step in (1, 2)
    ]
    text = lines(summarize(reports), title="run", results={})
    assert "| step | wait (s) | update (s) | engines idle |" in text
    assert text[-2:] == ["| 1 | 0.50 | 1.00 | 25% |", "| 2 | 0.50 | 2.00 | 50% |"]
    synchronous = [StepReport(1, {"reward/mean": 0.0}, {"update": 1.0})]
    assert not summarize(synchronous).timeline


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [r"a$\frac$b", "$x$ \x1b\n", "\udcff"])
def test_names_in_plots_are_no_formulas(name: str, tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.png" for number in range(3)]
    plot_metrics([StepReport(1, {name: 1.0}, {}, ())], [name], files[0], title=name)
    plot_distributions({name: [1.0]}, files[1], title=name)
    points = [
        Point(series, name, None, {name: 0.5}, {name: (0.0, 1.0)}) for series in (name, "other")
    ]
    assert plot_curves(points, files[2])
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)
