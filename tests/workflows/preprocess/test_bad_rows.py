"""`preprocess --on-bad-row`: rows that cannot be read are refused, or dropped and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msrl.config.schema import Config
from msrl.data.dataset import SftDataset
from msrl.errors import MsrlError
from msrl.types import DatasetManifest
from msrl.workflows.preprocess import check, run
from support import mentions
from tiny_qwen2 import make_tokenizer

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
LINES = [
    json.dumps(GOOD),
    "{not json",
    json.dumps({"messages": [{"role": "wizard", "content": "a"}]}),
    json.dumps({**GOOD, "loss_mask": [1, 0]}),
    "",
    json.dumps({**GOOD, "is_correct": False}),
    json.dumps({"messages": [{"role": "elf", "content": "a"}]}),
    json.dumps({**GOOD, "tools": [{"name": "f"}]}),
    json.dumps(GOOD),
    '"text"',
]
BAD = [2, 3, 4, 6, 7, 8, 10]


def preprocess(tmp_path: Path, name: str, text: str, **keys: Any) -> DatasetManifest:
    (tmp_path / name).write_text(text)
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    values = {
        "input": [str(tmp_path / name)],
        "tokenizer": str(tmp_path / "tokenizer"),
        "handler": "sharegpt",
        "template": "chatml",
        "output_prefix": str(tmp_path / "out" / "x"),
        "overwrite": True,
        **keys,
    }
    config = Config.model_validate({"preprocess": values}, strict=False)
    check(config)
    return run(config)


def test_bad_rows_are_refused_by_default_and_nothing_is_written(tmp_path: Path):
    with pytest.raises(MsrlError, match=mentions("x.jsonl:2", "JSON")):
        preprocess(tmp_path, "x.jsonl", "\n".join(LINES))
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [1, 2])
def test_bad_rows_are_dropped_counted_by_reason_and_written_to_a_file(
    tmp_path: Path, capsys: Any, workers: int, monkeypatch: Any
):
    monkeypatch.setattr("msrl.workflows.preprocess._PROCESS_BYTES", 1)
    manifest = preprocess(tmp_path, "x.jsonl", "\n".join(LINES), on_bad_row="drop", workers=workers)
    assert manifest.num_examples == 2 and sum(manifest.dropped.values()) == len(BAD)
    assert manifest.dropped["not JSON"] == 1 and manifest.dropped["unknown role ..."] == 2
    path = tmp_path / "out" / "x_bad_rows.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    where = [int(record["row"].rpartition(":")[2]) for record in records]
    assert sorted(where) == BAD
    assert {record["value"] for record in records} == {LINES[number - 1] for number in BAD}
    printed = capsys.readouterr().out
    assert "2, the first: " in printed and "x.jsonl:3: turn 1: unknown role" in printed
    assert "loss_mask" in printed and str(path) in printed
    assert "1 (not JSON)" in printed and "2 (unknown role ...)" in printed
    assert "1 (column loss_mask)" in printed and "1 (value of is_correct)" in printed
    assert len(SftDataset(str(tmp_path / "out" / "x"))) == 2


def test_names_and_rows_that_are_not_utf8_are_recorded_with_escapes(tmp_path: Path):
    """A folder may have files whose names are no UTF-8, and JSON halves of characters."""
    folder = tmp_path / "rows"
    folder.mkdir()
    bad = json.dumps({"messages": [{"role": "\ud83d", "content": "a"}]})
    (folder / "a\udcff.json").write_text(f"[{LINES[0]}, {bad}]")
    preprocess(tmp_path, "x.jsonl", "", input=[str(folder)], on_bad_row="drop")
    record = json.loads((tmp_path / "out" / "x_bad_rows.jsonl").read_text())
    assert "a\udcff.json" in record["row"] and record["value"] == json.loads(bad)


def test_a_later_run_without_bad_rows_removes_the_file(tmp_path: Path):
    preprocess(tmp_path, "x.jsonl", "\n".join(LINES), on_bad_row="drop")
    preprocess(tmp_path, "x.jsonl", LINES[0], on_bad_row="drop")
    assert not (tmp_path / "out" / "x_bad_rows.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "text"), [("x.csv", "question,answer\na,b\na,b,c\na\n"), ("x.json", "")]
)
def test_rows_of_every_file_format_can_be_bad(tmp_path: Path, name: str, text: str):
    text = text or json.dumps([{"question": "a", "answer": "b"}, 3, {"question": "a"}])
    keys = {"handler": "auto", "template": "chatml"}
    manifest = preprocess(tmp_path, name, text, on_bad_row="drop", **keys)
    assert manifest.num_examples == 1 and sum(manifest.dropped.values()) == 2
    with pytest.raises(MsrlError, match=mentions("row 2")):
        preprocess(tmp_path, name, text, **keys)


def test_only_bad_rows_are_refused_with_their_reasons(tmp_path: Path):
    with pytest.raises(MsrlError, match=mentions("nothing to write", "not JSON")):
        preprocess(tmp_path, "x.jsonl", "{\n", on_bad_row="drop")
