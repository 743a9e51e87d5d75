"""Pages and reports of run folders of others: limits of files, and values of other types."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import view_runs
from msrl.errors import MsrlError
from msrl.tracking import metrics
from msrl.tracking.plots import plot_distributions, plot_metrics
from msrl.types import StepReport
from msrl.workflows.report import run as write_report
from msrl.workflows.view import lineage, run_data, samples
from msrl.workflows.view.build import write_folder
from msrl.workflows.view.samples import read_samples
from support import assert_mentions, mentions
from test_view import read_chunk

TERABYTE = 1 << 40
SAVED = "Saved checkpoint " + "of step {} to x\n"  # a line of log.txt


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return view_runs.make_run(tmp_path / "runs" / "grpo")


def overview(run: Path, tmp_path: Path) -> dict[str, Any]:
    write_folder([run], tmp_path / "view")
    (shown,) = read_chunk(tmp_path / "view", "runs")
    return shown


def append(path: Path, *rows: Any) -> None:
    with path.open("a") as file:
        file.writelines(f"{json.dumps(row)}\n" for row in rows)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "attempts.jsonl", "config.yaml", "rollouts/step_000001.jsonl"]
)
def test_a_file_of_a_run_with_a_hole_is_one_message(name: str, run: Path, tmp_path: Path):
    """Such a file has any size on a disk with little space."""
    os.truncate(run / name, TERABYTE)
    writers: list[Callable[[], object]] = [lambda: write_folder([run], tmp_path / "view")]
    if "rollouts" not in name:
        writers.append(lambda: write_report(run))
    for write in writers:
        with pytest.raises(MsrlError, match=mentions(name, "MiB")):
            write()


def test_only_the_first_part_of_a_log_is_read(run: Path, tmp_path: Path, capsys: Any):
    log = run / "log.txt"
    log.write_text(SAVED.format("9" * 6000) + log.read_text())
    os.truncate(log, TERABYTE)
    shown = overview(run, tmp_path)
    assert shown["markers"]["checkpoints"] == [2]
    assert_mentions(shown["leftOut"][0], str(log), "256 MiB")
    assert str(log) in capsys.readouterr().err


def test_a_step_is_found_where_two_blocks_of_a_log_meet(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_data, "_LOG_BLOCK_BYTES", 50)
    (run / "log.txt").write_text(SAVED.format(1234) * 7)
    assert overview(run, tmp_path)["markers"]["checkpoints"] == [1234]


def test_metrics_beyond_the_limits_are_left_out_and_named(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setattr(metrics, "_MAX_REPORTS", 3)
    shown = overview(run, tmp_path)
    assert shown["metrics"]["steps"] == [0, 1, 2]
    assert_mentions(shown["leftOut"][0], "metrics.jsonl", "first 3 lines")
    write_report(run)
    assert_mentions(capsys.readouterr().err, "metrics.jsonl", "first 3 lines")
    assert "2 steps (1 to 2)" in (run / "report.md").read_text()
    monkeypatch.setattr(metrics, "_MAX_REPORTS", 100)
    monkeypatch.setattr(metrics, "_MAX_BYTES", 500)
    assert overview(run, tmp_path)["metrics"]["steps"] == [0, 1]


def test_a_metrics_file_with_another_name_in_each_line_is_shown_in_part(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_data, "_MAX_VALUES", 300)
    append(run / "metrics.jsonl", *({"step": n, "metrics": {f"m{n}": 1}} for n in range(4, 30)))
    shown = overview(run, tmp_path)
    assert len(shown["metrics"]["values"]) == 10 and len(shown["metrics"]["steps"]) == 30
    assert_mentions(shown["leftOut"][0], "first 10")


@pytest.mark.parametrize(
    "row",
    [
        {"step": 10**400, "metrics": {}},
        {"step": 1, "metrics": {"a": []}},
        {"step": 1, "metrics": {}, "notes": [1]},
        {"step": 1, "metrics": {}, "notes": "ab"},
    ],
)
def test_a_report_of_other_types_is_one_message(row: dict[str, Any], run: Path, tmp_path: Path):
    append(run / "metrics.jsonl", row)
    for write in (lambda: write_folder([run], tmp_path / "view"), lambda: write_report(run)):
        with pytest.raises(MsrlError, match=mentions("metrics.jsonl:5")):
            write()


@pytest.mark.parametrize(
    "row", [{"command": 5}, {"command": [5]}, {"outcome": {}}, {"error": 1}, {"num_steps": "x"}]
)
def test_a_start_of_other_types_is_one_message(row: dict[str, Any], run: Path, tmp_path: Path):
    append(run / "attempts.jsonl", {"started": "2026-01-01T00:02:30+00:00", **row})
    for write in (lambda: write_folder([run], tmp_path / "view"), lambda: write_report(run)):
        with pytest.raises(MsrlError, match=mentions("attempts.jsonl")):
            write()


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    "change",
    [
        {"response": 5},
        {"answer": None},
        {"tag": ["x"]},
        {"finish_reason": {}},
        {"messages": [{"role": 1, "content": "a"}]},
        {"messages": [{"role": "user", "content": ["a"]}]},
        {"reasons": {"a": 1}},
        {"is_right": "yes"},
        {"success": 2},
        {"versions": [[1, 5], [2, -5]]},
        {"scores": {"a": "b"}},
        {"prompt_ids": [-1]},
        {"prompt_ids": [2**40]},
    ],
)
def test_a_rollout_of_other_types_is_one_message(
    change: dict[str, Any], run: Path, tmp_path: Path
) -> None:
    path = run / "rollouts" / "step_000001.jsonl"
    append(path, view_runs.jsonl_row("a", 7) | change)
    with pytest.raises(MsrlError, match=mentions("step_000001.jsonl")):
        write_folder([run], tmp_path / "view")


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_samples_beyond_the_limit_are_left_out_and_named(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run = view_runs.make_run(tmp_path / "runs" / "grpo", num_steps=1, format=format)
    monkeypatch.setattr(samples, "_MAX_SAMPLES", 5)
    shown = overview(run, tmp_path)
    assert [table["count"] for table in shown["tables"]["rollout"]] == [5]
    assert_mentions(shown["leftOut"][0], f"step_000001.{format}", "first 5")


def test_sequences_of_a_row_share_its_texts_and_versions(tmp_path: Path):
    """A row may have thousands of sequences and messages."""
    count = 3000
    messages = [{"role": "user", "content": "a"}] * count
    sequences = [{"token_ids": [1], "is_sampled": [True]}] * count
    versions = [[number, 1] for number in range(count)]
    row = view_runs.edited_episode(
        messages=messages, sequences=sequences, versions=versions, logprobs=[-1.0] * count
    )
    path = tmp_path / "step_000001.jsonl"
    path.write_text(json.dumps(row) + "\n")
    shown = read_samples(path)
    assert len(shown) == count and len({id(sample.messages) for sample in shown}) == 1
    assert [sample.versions for sample in shown] == [((number, 1),) for number in range(count)]


def test_manifests_of_a_lineage_are_read_up_to_a_limit(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lineage, "_MAX_BYTES", 50)
    monkeypatch.setattr(lineage, "_MAX_NODES", 30)
    names = {f"{tmp_path}/{'./' * number}data": 1.0 for number in range(60)}
    (tmp_path / "data_manifest.json").write_text('{"num_rows": 3, "handler": "auto"}')
    config = view_runs.make_config("grpo", data={"blend": names})
    nodes = lineage.lineage(run, config)
    assert len(nodes) == 31 and nodes[-1]["kind"] == "more"
    assert sum("3 rows" in node["note"] for node in nodes) == 1


@pytest.mark.sample(1)
@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 5e-324])
def test_values_near_the_largest_number_are_gaps_in_plots(value: float, tmp_path: Path):
    """A perplexity of a training that diverged has them."""
    reports = [StepReport(step, {"eval/perplexity": value}, {}, ()) for step in range(80)]
    plot_metrics(reports, ["eval/perplexity"], tmp_path / "a.png")
    plot_distributions({"a": [value, 1.0]}, tmp_path / "b.png")
    assert all((tmp_path / name).stat().st_size for name in ("a.png", "b.png"))
