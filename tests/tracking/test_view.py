"""Files of `msrl view`: data of runs, their escaping, the page and its server."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import view_runs
from msrl.cli.app import main
from msrl.errors import MsrlError
from msrl.files import take_lock
from msrl.tracking.rollouts import write_records
from msrl.tracking.run import LOCK, read_notes, run_state
from msrl.workflows.report import run as write_report
from msrl.workflows.view.build import View, write_folder, write_single_file
from msrl.workflows.view.chunks import InlineChunks, safe_json
from msrl.workflows.view.page import MODULES, page
from msrl.workflows.view.pieces import open_pieces
from msrl.workflows.view.samples import read_samples, sample_files
from msrl.workflows.view.serve import ViewHandler, ViewServer, open_server
from support import assert_mentions, mentions

STATIC = Path(page.__code__.co_filename).parent / "static"


def read_chunk(folder: Path, name: str) -> Any:
    """Return the value of a data file."""
    text = (folder / "data" / f"{name}.js").read_text(encoding="utf-8")
    call = re.fullmatch(r'msrlChunk\("([^"]*)",(.*)\);\n', text, re.DOTALL)
    assert call is not None
    assert call[1] == name
    return json.loads(call[2])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return view_runs.make_run(tmp_path / "runs" / "grpo")


def test_a_view_is_a_page_below_two_megabytes_with_data_beside_it(run: Path, tmp_path: Path):
    index = write_folder([run], tmp_path / "view")
    assert index.stat().st_size < 2_000_000
    (overview,) = read_chunk(tmp_path / "view", "runs")
    assert overview["name"] == "grpo"
    assert overview["metrics"]["steps"] == [0, 1, 2, 3]
    assert overview["metrics"]["values"]["train/kl"] == [None, None, None, None]
    assert overview["markers"] == {"checkpoints": [2], "evaluations": [0, 3], "restarts": [2]}
    assert [entry["count"] for entry in overview["tables"]["rollout"]] == [12, 12, 12]
    assert [entry["step"] for entry in overview["tables"]["eval"]] == [0, 3]


def test_the_page_requests_nothing_from_a_network(run: Path, tmp_path: Path):
    text = write_folder([run], tmp_path / "view").read_text()
    assert not re.search(r"""(?:src|href|action)=["']?\s*(?:https?:)?//""", text)
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|sendBeacon|importScripts)\(", text)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1] and "http" not in policy[1]


def test_the_front_end_sets_text_only_as_text():
    code = "".join(path.read_text() for path in (STATIC / "app").glob("*.js"))
    for name in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "DOMParser",
    ):
        assert name not in code


def test_the_modules_of_the_front_end_share_no_name():
    names: list[str] = []
    assert {path.name for path in (STATIC / "app").glob("*.js")} == {*MODULES}
    for module in MODULES:
        text = (STATIC / "app" / module).read_text()
        pattern = r"^(?:export )?(?:async )?(?:const|let|function|class) (\w+)"
        names += re.findall(pattern, text, re.MULTILINE)
    assert len(names) > 100
    assert len(names) == len({*names})


def test_vendored_libraries_have_their_license():
    assert "MIT License" in (STATIC / "vendor" / "uPlot.LICENSE").read_text()


@pytest.mark.parametrize("text", [*view_runs.HOSTILE, "\ud800 lone", "\ufeff\x7f\x9b"])
def test_hostile_texts_are_escaped_and_read_back(text: str):
    encoded = safe_json({text: [text]})
    assert not re.search("[<>&\u2028\u2029\ud800-\udfff\x7f-\x9f\x00-\x1f]", encoded)
    assert json.loads(encoded) == {text: [text]}


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_run_folder_with_something_in_place_of_a_file_is_refused(tmp_path: Path, kind: str):
    run = view_runs.make_run(tmp_path / "grpo")
    path = run / "rollouts" / "step_000099.jsonl"
    path.symlink_to(path) if kind == "link" else path.mkdir()
    with pytest.raises(MsrlError, match=mentions(path, kind)):
        write_folder([run], tmp_path / "view")


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_hostile_completions_are_only_in_escaped_strings(tmp_path: Path, format: str):
    run = view_runs.make_run(tmp_path / "grpo", texts=view_runs.HOSTILE, format=format)
    write_folder([run], tmp_path / "view")
    rows = read_chunk(tmp_path / "view", "0/rollout-samples-0")
    further = rows[12 : 12 + len(view_runs.HOSTILE)]
    assert [row["turns"][1][1] for row in further] == [*view_runs.HOSTILE]
    for path in (tmp_path / "view" / "data").rglob("*.js"):
        assert not re.search("[<\u2028\u2029]", path.read_text())


def test_both_formats_give_the_same_samples(tmp_path: Path):
    runs = [
        view_runs.make_run(tmp_path / format, num_steps=1, format=format)
        for format in ("jsonl", "parquet")
    ]
    lines, records = (read_samples(*sample_files(run, "rollout"), 4) for run in runs)
    for line, record in zip(lines, records, strict=True):
        for name in ("step", "group", "sample", "prompt_index", "reward", "staleness", "versions"):
            assert getattr(line, name) == getattr(record, name)
        assert line.messages == record.messages
        assert line.token_ids.tolist() == record.token_ids.tolist()
        assert {*record.advantages[record.is_sampled]} == {line.advantages}
    assert set(records[0].values) == {"behavior", "trainer", "reference", "entropy"}


def test_the_turns_of_an_episode_are_those_of_the_conversation(tmp_path: Path):
    """The rewards score the answers, not the last message, which may come from a tool."""
    turns = (("prompt", "8+7?"), ("assistant", "\\boxed{15}"), ("tool", "ok"))
    is_sampled = [False, False, True, True, False]
    row = view_runs.jsonl_row("\\boxed{15}", 0, prompt_ids=[1, 2], response_ids=[3, 4])
    messages = [{"role": role, "content": text} for role, text in turns]
    sequence = {"token_ids": [1, 2, 3, 4, 5], "is_sampled": is_sampled}
    row |= {"logprobs": [-1.0, -2.0], "messages": messages, "sequences": [sequence]}
    (tmp_path / "step_000001.jsonl").write_text(json.dumps(row) + "\n")
    recorded = view_runs.record(1, 0, 0, "\\boxed{15}", messages=turns)
    write_records(tmp_path / "step_000002.parquet", [recorded])
    (line,), (record,) = map(read_samples, sorted(tmp_path.iterdir()))
    assert line.messages == record.messages == turns
    assert line.response == record.response == "\\boxed{15}"
    assert line.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert line.is_sampled.tolist() == is_sampled and line.num_response_tokens == 2
    assert line.values["behavior"].tolist() == [0, 0, -1, -2, 0]


def test_each_sequence_of_an_edited_episode_has_its_own_context(tmp_path: Path):
    (tmp_path / "step_000006.jsonl").write_text(json.dumps(view_runs.edited_episode()) + "\n")
    first, second = read_samples(tmp_path / "step_000006.jsonl")
    assert (first.sample, first.sequence) == (0, 0)
    assert (second.sample, second.sequence) == (0, 1)
    assert first.token_ids.tolist() == [1, 2, 3, 4, 5] and second.token_ids.tolist() == [1, 6, 7]
    assert first.values["behavior"].tolist() == [0, 0, -1, -2, 0]
    assert second.values["behavior"].tolist() == [0, 0, -3]
    assert first.versions == ((3, 1), (4, 1)) and second.versions == ((4, 1),)
    assert (first.staleness, second.staleness) == (2, 1)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_an_episode_with_several_sequences_is_one_sample(tmp_path: Path, format: str):
    run = view_runs.make_run(tmp_path / "grpo", num_steps=1)
    file = run / "rollouts" / "step_000001.jsonl"
    if format == "jsonl":
        rows = [view_runs.edited_episode(), view_runs.jsonl_row("\\boxed{14}", 0)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        file.unlink()
        tokens = {"token_ids": np.array([1, 7]), "is_sampled": np.array([False, True])}
        part = {**tokens, "loss_mask": tokens["is_sampled"], "advantages": np.zeros(2, np.float32)}
        part |= {"behavior_logprobs": np.zeros(2, np.float32), "versions": ((0, 1),)}
        values = dict.fromkeys(("trainer_logprobs", "reference_logprobs", "entropies"))
        records = [
            view_runs.record(1, 0, 0, "\\boxed{15}"),
            view_runs.record(1, 0, 0, "\\boxed{15}", sequence=1, **part, **values),
            view_runs.record(1, 0, 1, "\\boxed{14}"),
        ]
        write_records(file.with_suffix(".parquet"), records)
    write_folder([run], tmp_path / "view")
    (overview,) = read_chunk(tmp_path / "view", "runs")
    assert [entry["count"] for entry in overview["tables"]["rollout"]] == [2]
    table = read_chunk(tmp_path / "view", "0/rollout-tables-0")[0]
    assert table["sample"] == [0, 1] and table["verdict"] == [1, 0]
    rows = read_chunk(tmp_path / "view", "0/rollout-samples-0")
    assert [len(row["sequences"]) for row in rows] == [2, 1]
    assert table["length"][0] == {"jsonl": 3, "parquet": len("\\boxed{15}") + 1}[format]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_step_without_samples_has_an_empty_table(tmp_path: Path, format: str):
    run = view_runs.make_run(tmp_path / "grpo", num_steps=1)
    file = run / "rollouts" / "step_000001.jsonl"
    if format == "jsonl":
        file.write_text("")
    else:
        file.unlink()
        write_records(file.with_suffix(".parquet"), [])
    write_folder([run], tmp_path / "view")
    (overview,) = read_chunk(tmp_path / "view", "runs")
    assert [entry["count"] for entry in overview["tables"]["rollout"]] == [0]


def test_an_environment_without_a_reward_source_decides_the_verdict(tmp_path: Path):
    config = view_runs.make_config("grpo", reward={"sources": []}, environment={"name": "sokoban"})
    run = view_runs.make_run(tmp_path / "grpo", num_steps=1, config=config)
    outcomes = [("", True), ("", False), ("", None), ("chat", None)]
    rows = [
        view_runs.jsonl_row("a", 0, scores={}, success=value, tag=tag) for tag, value in outcomes
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "rollouts" / "step_000001.jsonl").write_text(text)
    write_folder([run], tmp_path / "view")
    table = read_chunk(tmp_path / "view", "0/rollout-tables-0")[0]
    assert table["verdict"] == [1, 0, 0, -1]  # a limit ended the third, none of "chat" reports


def test_a_step_with_files_of_both_formats_is_that_of_the_newer_file(tmp_path: Path):
    run = view_runs.make_run(tmp_path / "grpo", num_steps=1)
    older, newer = (run / "rollouts" / f"step_000001.{name}" for name in ("jsonl", "parquet"))
    write_records(newer, [view_runs.record(1, 0, 0, "\\boxed{15}")])
    os.utime(older, (1, 1))
    (run / "rollouts" / "step_000001.backup.jsonl").write_text("{}")
    assert sample_files(run, "rollout") == [newer]


def test_verdicts_need_no_secret_of_the_configuration(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("MSRL_TEST_KEY", raising=False)
    config = view_runs.make_config("grpo", cluster={"env": {"KEY": "${env:MSRL_TEST_KEY}"}})
    run = view_runs.make_run(tmp_path / "grpo", num_steps=1, config=config)
    write_folder([run], tmp_path / "view")
    table = read_chunk(tmp_path / "view", "0/rollout-tables-0")[0]
    assert {*table["verdict"]} == {0, 1}


def test_a_configuration_that_cannot_be_read_is_reported(tmp_path: Path, capsys):
    config = view_runs.make_config("grpo", unknown_section={})
    run = view_runs.make_run(tmp_path / "grpo", num_steps=1, config=config)
    view = View([run], tmp_path / "view")
    view.update()
    view.update()
    (line,) = capsys.readouterr().err.splitlines()
    assert_mentions(line, str(run / "config.yaml"), "verdicts", "unknown_section")


def test_metrics_with_any_text_and_a_cut_end_are_read(tmp_path: Path):
    run = view_runs.make_run(tmp_path / "grpo", num_steps=1)
    row = {"step": 2, "time": "2026-01-01T00:03:00+00:00", "metrics": {"train/loss": 12345678}}
    line = json.dumps(row | {"notes": ["a\u2028b\u0085c"]}, ensure_ascii=False).encode() + b"\n"
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(line + '{"step": 3, "notes": ["\u00e9'.encode()[:-1])
    with (run / "attempts.jsonl").open("ab") as file:
        file.write(b'{"attempt": 3')
    write_folder([run], tmp_path / "view")
    (overview,) = read_chunk(tmp_path / "view", "runs")
    assert overview["metrics"]["steps"] == [0, 1, 2] and len(overview["attempts"]) == 2
    assert overview["metrics"]["values"]["train/loss"][-1] == 12345678
    assert overview["metrics"]["notes"] == [[2, "a\u2028b\u0085c"]]


def test_a_wrong_answer_has_its_verdict_and_the_reason_of_each_verifier(run: Path, tmp_path: Path):
    write_folder([run], tmp_path / "view")
    table = read_chunk(tmp_path / "view", "0/rollout-tables-0")[0]
    rows = read_chunk(tmp_path / "view", "0/rollout-samples-0")
    wrong = table["verdict"].index(0)
    assert_mentions(rows[wrong]["reasons"]["base_acc"], "14", "15", "box")
    assert_mentions(rows[wrong]["reasons"]["format"], "in order")
    assert table["verdict"] == [int("boxed{15}" in row["turns"][1][1]) for row in rows[:12]]


def test_repeated_prompts_are_separate_groups(tmp_path: Path):
    path = tmp_path / "step_000002.jsonl"
    rows = [view_runs.jsonl_row("a", 7) for _ in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [sample.group for sample in read_samples(path, 4)] == [0] * 4 + [1] * 4


def test_rollouts_of_earlier_versions_show_which_responses_were_trained(tmp_path: Path):
    path = tmp_path / "step_000001.jsonl"
    rows = [view_runs.jsonl_row("a", 7), view_runs.jsonl_row("b", 7, is_trained=False)]
    for row in rows:
        row["is_learnt"] = row.pop("is_trained")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [sample.is_trained for sample in read_samples(path)] == [True, False]


def test_deep_values_in_a_rollout_file_are_one_message(tmp_path: Path):
    path = tmp_path / "step_000001.jsonl"
    path.write_text("[" * 100_000 + "\n")
    with pytest.raises(MsrlError, match=mentions(path)):
        read_samples(path)


@pytest.mark.parametrize("name", ["metrics.jsonl", "log.txt", "rollouts/step_000001.jsonl"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_pipes_and_devices_of_a_run_folder_are_refused(name: str, kind: str, tmp_path: Path):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("run: {name: x}\n")
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    for write in (lambda run: write_folder([run], tmp_path / "view"), write_report):
        with pytest.raises(MsrlError, match=mentions(path, "pipe")):
            write(tmp_path / "run")


def test_a_damaged_rollout_file_is_one_message(tmp_path: Path):
    path = tmp_path / "step_000001.jsonl"
    path.write_text('{"prompt_index": 1}\n')
    with pytest.raises(MsrlError) as error:
        read_samples(path)
    assert_mentions(error, str(path), "cannot be read")


def test_tokens_are_texts_or_bytes_of_a_character(run: Path):
    pieces = open_pieces([run / "missing", run / "checkpoints" / "hf"])
    assert pieces is not None
    euro = list("\u20ac".encode())
    assert pieces.pieces([ord("a"), ord(" "), *euro]) == {
        ord("a"): "a",
        ord(" "): " ",
        **{byte: [byte] for byte in euro},
    }


def test_configurations_and_lineage_of_two_runs_can_be_compared(tmp_path: Path):
    first = view_runs.make_run(tmp_path / "runs" / "a")
    config = view_runs.make_config("b", train={"optimizer": {"lr": 2e-4}})
    config["model"] = {"path": "runs/a/checkpoints"}
    second = view_runs.make_run(tmp_path / "runs" / "b", config=config)
    write_folder([first, second], tmp_path / "view")
    a, b = read_chunk(tmp_path / "view", "runs")
    differing = {key for key in a["config"] if a["config"][key] != b["config"].get(key)}
    assert differing == {"run.name", "model.path", "train.optimizer.lr"}
    assert (0, "run", str(tmp_path / "runs" / "a")) in [
        (node["depth"] - 1, node["kind"], node["path"]) for node in b["lineage"]
    ]


def test_the_lineage_leads_back_to_the_converted_folder(tmp_path: Path):
    run = view_runs.make_run(tmp_path / "runs" / "grpo", num_steps=1)
    (tmp_path / "hf" / "qwen").mkdir(parents=True)
    (tmp_path / "hf" / "qwen" / "config.json").write_text("{}")
    (tmp_path / "model").mkdir()
    source = str(tmp_path / "hf" / "qwen")
    record = {"layout": {"tp": 2}, "dtype": "float32", "files": {"a": {"bytes": 1}}}
    manifest = {"format": 1, "iterations": {"1": {**record, "source": source}}}
    (tmp_path / "model" / "msrl_manifest.json").write_text(json.dumps(manifest))
    write_folder([run], tmp_path / "view")
    nodes = read_chunk(tmp_path / "view", "runs")[0]["lineage"]
    kinds = {node["path"]: (node["kind"], node["note"]) for node in nodes}
    assert kinds[str(tmp_path / "model" / "iter_0000001")] == ("initial model", "tp=2, float32")
    assert kinds[source] == ("converted from", "Hugging Face folder")


def test_runs_and_checkpoints_that_name_each_other_have_a_finite_lineage(tmp_path: Path):
    run = view_runs.make_run(tmp_path / "runs" / "grpo", num_steps=1)
    (tmp_path / "model").mkdir()
    steps = {str(step): {"source": str(tmp_path / "model")} for step in range(1, 31)}
    steps["31"] = {"source": "a" * 5000}
    bad = {"x": {}, "9" * 5000: {}, "33": 5, "32": {"layout": [], "files": 3, "source": {}}}
    manifest = {"format": 1, "iterations": {**steps, **bad}}
    (tmp_path / "model" / "msrl_manifest.json").write_text(json.dumps(manifest))
    write_folder([run], tmp_path / "view")
    (data,) = read_chunk(tmp_path / "view", "runs")
    assert 31 <= len(data["lineage"]) < 100
    (tmp_path / "model" / "msrl_manifest.json").write_text("[" * 100_000)
    write_folder([run], tmp_path / "view")


@pytest.mark.slow
def test_a_configuration_with_expanding_aliases_is_one_message(tmp_path: Path):
    run = view_runs.make_run(tmp_path / "runs" / "grpo", num_steps=1)
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 10):
        items = ", ".join([f"*a{level - 1}"] * 10)
        lines.append(f"a{level}: &a{level} [{items}]")
    (run / "config.yaml").write_text("\n".join(lines))
    with pytest.raises(MsrlError, match=mentions("config.yaml", "aliases")):
        write_folder([run], tmp_path / "view")


@pytest.mark.parametrize("line", ["{}", '{"started": "now"}', "5", "[" * 100_000])
def test_a_damaged_record_of_attempts_is_one_message(tmp_path: Path, line: str):
    run = view_runs.make_run(tmp_path / "runs" / "grpo", num_steps=1)
    (run / "attempts.jsonl").write_text(f"{line}\n{line}\n")
    with pytest.raises(MsrlError, match=mentions("attempts.jsonl", "line")):
        write_folder([run], tmp_path / "view")


def test_a_single_file_has_a_limit_in_bytes(run: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("msrl.workflows.view.build.SINGLE_FILE_BYTES", 2000)
    with pytest.raises(MsrlError, match=mentions("--single-file", "MB")):
        write_single_file([run], tmp_path / "view.html")
    chunks = InlineChunks(8)
    chunks.add("a", '"ab"')
    with pytest.raises(MsrlError):
        chunks.add("b", '"abc"')


def test_runs_that_are_too_large_for_a_single_file_are_refused_before_they_are_read(
    run: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setattr("msrl.workflows.view.build.SINGLE_FILE_BYTES", 2000)
    monkeypatch.setattr("msrl.workflows.view.build._write_runs", lambda *_: pytest.fail("read"))
    with pytest.raises(MsrlError, match=mentions("--single-file", "MB")):
        write_single_file([run], tmp_path / "view.html")


def test_a_single_file_holds_its_data_and_allows_no_other_file(run: Path, tmp_path: Path):
    text = write_single_file([run], tmp_path / "view.html").read_text()
    assert text.count("data-chunk=") == 6
    policy = re.search(r"script-src ([^;]*);", text)
    assert policy is not None
    assert "'self'" not in policy[1] and "file:" not in policy[1]


def test_only_changed_files_are_converted_again(run: Path, tmp_path: Path):
    view = View([run], tmp_path / "view")
    view.update()
    data = tmp_path / "view" / "data" / "0"
    before = {path.name: path.stat().st_mtime_ns for path in data.iterdir()}
    (run / "rollouts" / "step_000004.jsonl").write_bytes(
        (run / "rollouts" / "step_000003.jsonl").read_bytes()
    )
    view.update()
    after = {path.name: path.stat().st_mtime_ns for path in data.iterdir()}
    changed = {name for name, time in after.items() if before.get(name) != time}
    assert changed == {"rollout-samples-1.js", "rollout-tables-1.js", "pieces.js"}
    (overview,) = read_chunk(tmp_path / "view", "runs")
    assert len(overview["tables"]["rollout"]) == 4
    assert read_chunk(tmp_path / "view", "version") == 2


def test_a_folder_with_other_contents_is_refused(run: Path, tmp_path: Path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("important")
    with pytest.raises(MsrlError) as error:
        write_folder([run], tmp_path / "other")
    assert_mentions(error, "--output", str(tmp_path / "other"), "not empty")
    write_folder([run], tmp_path / "view")
    write_folder([run], tmp_path / "view")  # an earlier view is replaced


def test_links_of_an_earlier_view_are_not_followed(run: Path, tmp_path: Path):
    """A run folder of others may have a view with links to any folder."""
    write_folder([run], run / "view")
    other = tmp_path / "other"
    (run / "view" / "data").rename(other)
    before = sorted(other.rglob("*"))
    (run / "view" / "data").symlink_to(other)
    (other / "runs.js").write_text("other")
    write_folder([run], run / "view")
    assert (other / "runs.js").read_text() == "other" and sorted(other.rglob("*")) == before
    assert not (run / "view" / "data").is_symlink()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path):
    with pytest.raises(MsrlError) as error:
        write_folder([tmp_path], tmp_path / "view")
    assert_mentions(error, str(tmp_path), "config.yaml", "run")


def test_a_run_before_its_first_step_has_a_view(tmp_path: Path):
    run = tmp_path / "sft"
    run.mkdir()
    (run / "config.yaml").write_text("run: {name: sft}\n")
    write_folder([run], tmp_path / "view")
    (overview,) = read_chunk(tmp_path / "view", "runs")
    assert overview["metrics"]["steps"] == []


@pytest.fixture
def served(run: Path, tmp_path: Path) -> Iterator[ViewServer]:
    """Serve a view; yield its server."""
    view = View([run], tmp_path / "view", is_live=True)
    view.update()
    with open_server(view, 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def ask(server: ViewServer, path: str, **headers: str) -> int:
    """Return the status of a request, without following redirects."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path, headers={"Host": f"127.0.0.1:{port}", **headers})
    return connection.getresponse().status


def test_the_server_answers_only_requests_that_name_it(served: ViewServer):
    port = served.server_address[1]
    cookie = {"Cookie": f"msrl_view_{port}={served.token}"}
    assert ask(served, "/", **cookie) == 200
    assert ask(served, "/", Host=f"localhost:{port}", **cookie) == 200
    for host in ("evil.example:80", f"evil.example:{port}", "127.0.0.1:1", "127.0.0.1", ""):
        assert ask(served, "/", Host=host, **cookie) == 403
    for origin in ("http://evil.example", "https://127.0.0.1", "http://127.0.0.1:1", "null"):
        assert ask(served, "/", Origin=origin, **cookie) == 403
    assert ask(served, "/", Origin=f"http://127.0.0.1:{port}", **cookie) == 200
    for path in ("/data/", "/../grpo", "/%00", "/index.html%00"):
        assert ask(served, path, **cookie) == 404


def test_hostile_headers_are_answered_at_once(
    served: ViewServer, capfd: pytest.CaptureFixture[str]
):
    start = time.process_time()
    for cookie in ('a="' + "\\" * 60_000 + '"', 'a="' + "\\1" * 30_000 + '"', "a=b;" * 15_000):
        assert ask(served, "/", Cookie=cookie) == 403
    for path in ("http://[", "http://[x]/"):
        assert ask(served, path) == 400
    for length in ("9" * 5000, "\xb2", "-1", ""):
        assert send(served, "POST", "/notes", "{}", **{"Content-Length": length}).status == 400
    assert time.process_time() - start < 5
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\n"])
def test_a_request_that_does_not_end_is_closed(
    served: ViewServer, monkeypatch: pytest.MonkeyPatch, capfd: Any, start: bytes
):
    """Each connection has a thread, which every user of the machine can occupy."""
    monkeypatch.setattr(ViewHandler, "timeout", 0.1)
    with socket.create_connection(served.server_address, timeout=60) as client:
        client.sendall(start)
        assert client.recv(1) == b""
    assert capfd.readouterr().err == ""


def test_only_the_printed_link_opens_the_view(
    served: ViewServer, capfd: pytest.CaptureFixture[str]
):
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(served.link) as reply:
        assert b"msrl view" in reply.read()
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert "token" not in reply.url
    port = served.server_address[1]
    for path in ("/", "/index.html", "/data/runs.js", "/?token=", "/?token=x", "/?token=\xe9"):
        assert ask(served, urllib.parse.quote(path, safe="/?=")) == 403
    for cookie in ("", "x", f"msrl_view_{port}", f"msrl_view_{port}=x", "a=;;\x01"):
        assert ask(served, "/", Cookie=cookie) == 403
    served.token = None
    assert ask(served, "/") == 200 and "token" not in served.link
    assert capfd.readouterr().err == ""


def send(server: ViewServer, method: str, path: str, body: str = "", **headers: str) -> Any:
    """Return the response to a request with the token and the origin of the page."""
    port = server.server_address[1]
    own = {
        "Host": f"127.0.0.1:{port}",
        "Origin": f"http://127.0.0.1:{port}",
        "Cookie": f"msrl_view_{port}={server.token}",
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request(method, path, body or None, {**own, **headers})
    return connection.getresponse()


def test_tags_and_notes_are_saved_only_for_the_page_itself(served: ViewServer, run: Path):
    body = json.dumps({"run": 0, "tags": ["good"], "note": "</script> \u4e00"})
    for headers in ({"Origin": "http://evil.example"}, {"Cookie": ""}, {"Origin": ""}):
        assert send(served, "POST", "/notes", body, **headers).status == 403
    for wrong in (
        "{",
        "[]",
        '{"run": 1, "tags": [], "note": ""}',
        '{"run": 0, "tags": 1}',
        "x" * 99_999,
    ):
        assert send(served, "POST", "/notes", wrong).status == 400
    assert not (run / "notes.json").exists()
    assert send(served, "POST", "/notes", body).status == 204
    assert read_notes(run) == {"tags": ["good"], "note": "</script> \u4e00"}
    served.view.update()
    (overview,) = read_chunk(served.view.output, "runs")
    assert overview["tags"] == ["good"]


def test_the_server_finds_texts_of_all_steps(served: ViewServer, run: Path):
    def hits(text: str, kind: str = "rollout") -> list[list[int]]:
        query = urllib.parse.urlencode({"run": 0, "kind": kind, "text": text})
        return json.loads(send(served, "GET", f"/search?{query}").read())["hits"]

    assert hits("8+7? (21)") == [[2, row] for row in range(4, 8)]
    assert len(hits("BOXED{15}")) == 18
    assert len(hits("boxed{13}", "eval")) == 4
    assert hits("no such text") == []
    (run / "rollouts" / "step_000002.jsonl").write_text("")
    served.view.update()
    assert hits("8+7? (21)") == []


def test_a_folder_of_runs_is_a_view_of_all_its_runs(run: Path, tmp_path: Path):
    view = View([run.parent], tmp_path / "view")
    view.update()
    view_runs.make_run(run.parent / "dapo", num_steps=1)
    (run.parent / "other").mkdir()
    view.update()
    runs = read_chunk(tmp_path / "view", "runs")
    assert [(row["name"], len(row["tables"]["rollout"])) for row in runs] == [
        ("grpo", 3),
        ("dapo", 1),
    ]


def test_the_command_writes_a_view_into_the_run_folder(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["msrl", "view", str(run)])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    assert capsys.readouterr().out.strip() == str(run / "view" / "index.html")
    assert (run / "view" / "index.html").is_file()


def test_serve_and_single_file_exclude_each_other(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["msrl", "view", str(run), "--serve", "--single-file"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert_mentions(capsys.readouterr().err, "--serve", "--single-file", "exclude")


def test_the_lock_and_the_last_line_tell_a_running_from_a_killed_run(run: Path):
    def state(**changes: Any) -> str:
        attempt = {
            "attempt": 1,
            "started": "2026-01-01T00:00:00+00:00",
            "host": socket.gethostname(),
        }
        return run_state(run, [attempt | changes])

    assert run_state(run, []) == "unknown"
    assert state(outcome="interrupted") == "interrupted"
    assert state() == "killed"
    assert state(host="another") == "running"  # its lines are new
    for name in ("log.txt", "metrics.jsonl"):
        os.utime(run / name, (0, 0))
    assert state(host="another") == "killed"
    with (run / LOCK).open("w") as lock:
        assert take_lock(lock)
        assert state() == "running"
    assert state() == "killed"


def test_changed_settings_are_told_from_defaults(run: Path, tmp_path: Path):
    write_folder([run], tmp_path / "view")
    (overview,) = read_chunk(tmp_path / "view", "runs")
    assert "train.optimizer.lr" in overview["set"]
    assert "run.dir" not in overview["set"]
    assert "run.dir" in overview["config"]
    assert overview["metrics"]["time"] == pytest.approx([3.1, 6.2, 9.3, 12.4])
    assert overview["metrics"]["tokens"] == pytest.approx([310, 620, 930, 1240])
