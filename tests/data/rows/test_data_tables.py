"""Tables of pyarrow and `datasets`: the same rows as JSONL, splits of folders, and limits."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from msrl import table_batches
from msrl.data.files import readers
from msrl.data.files.readers import find_files, read_batches
from msrl.data.handlers import make_handler
from msrl.errors import MsrlError
from support import mentions


def row(name: str, arguments: dict[str, Any], tool: dict[str, Any], **answer: Any) -> Any:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "1"},
        {"role": "assistant", "content": "b", **answer},
    ]
    return {"messages": turns, "tools": [tool]}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"name": name, "description": "d", "parameters": parameters}


WRAPPED = {"type": "function", "function": tool("weather", city={"type": "string"})}
ROWS = [
    row("weather", {"city": "Paris"}, WRAPPED),
    row("stock", {"ticker": "X", "n": [1, None]}, tool("stock", ticker={"type": "string"})),
    row("none", {}, tool("none"), loss=False, reasoning_content="t"),
]


def read(*inputs: Path, split: str | None = None) -> list[Any]:
    files = find_files([str(item) for item in inputs], split)
    return [row for batch in read_batches(files) for _, row in batch.values()]


def conversations(rows: list[Any]) -> list[Any]:
    handler = make_handler("auto", kind="sft", map_keys={}, options={})
    return [handler.converter()(row) for row in rows]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import datasets

    folder = tmp_path_factory.mktemp("tables")
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    padded = datasets.Dataset.from_list(ROWS)
    typed = datasets.Dataset.from_list(ROWS, on_mixed_types="use_json")
    for name, dataset in (("padded", padded), ("typed", typed)):
        dataset.to_parquet(str(folder / f"{name}.parquet"))
        dataset.save_to_disk(str(folder / name))
        pq.write_table(dataset.data.table, folder / f"{name}_arrow.parquet")
    splits = datasets.DatasetDict({"train": padded, "test": padded.select([0])})
    splits.save_to_disk(str(folder / "dict"))
    return folder


@pytest.mark.parametrize(
    "name", ["padded.parquet", "typed.parquet", "padded", "typed", "padded_arrow.parquet"]
)
def test_tables_of_datasets_give_the_conversations_of_the_same_rows_as_json(
    tables: Path, name: str
):
    assert conversations(read(tables / name)) == conversations(read(tables / "rows.jsonl"))


def test_null_members_vanish_at_every_depth_and_other_nulls_stay(tmp_path: Path):
    kind = pa.struct([("a", pa.struct([("b", pa.int64())])), ("c", pa.list_(pa.int64()))])
    values = [{"a": {"b": None}, "c": [1, None]}, None, {"a": None, "c": None}]
    mapping = pa.array([[("x", None), ("y", 1)], [], None], pa.map_(pa.string(), pa.int64()))
    objects = pa.array([[v, None] for v in values], pa.list_(kind))
    table = pa.table({"o": pa.array(values, kind), "l": objects, "m": mapping})
    pq.write_table(table, tmp_path / "x.parquet")
    first, second, third = read(tmp_path / "x.parquet")
    assert first == {"o": {"a": {}, "c": [1, None]}, "l": [{"a": {}, "c": [1, None]}, None], "m": {"x": None, "y": 1}}  # fmt: skip  # noqa: E501
    assert second == {"o": None, "l": [None, None], "m": {}}
    assert third == {"o": {}, "l": [{}, None], "m": None}


def test_explicit_nulls_of_json_columns_stay(tmp_path: Path):
    import datasets

    rows = [{"a": {"x": None}}, {"a": [1, None]}, {"a": None}]
    datasets.Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(
        str(tmp_path / "x.parquet")
    )
    assert read(tmp_path / "x.parquet")[:2] == rows[:2]


@pytest.mark.parametrize("nested", [False, True])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, nested: bool):
    fields = [pa.array(["a"]), pa.array(["b"])]
    table = pa.Table.from_arrays(fields, names=["text", "text"])
    if nested:
        table = pa.table({"o": pa.StructArray.from_arrays(fields, names=["text", "text"])})
    pq.write_table(table, tmp_path / "x.parquet")
    with (
        pa.OSFile(str(tmp_path / "x.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as w,
    ):
        w.write_table(table)
    for name in ("x.parquet", "x.arrow"):
        with pytest.raises(MsrlError, match=mentions(name, "'text'", "more than once")):
            read(tmp_path / name)


def test_a_dictionary_of_splits_asks_for_one(tables: Path):
    with pytest.raises(MsrlError, match=mentions("dict", "test", "train", "--split")):
        read(tables / "dict")
    assert len(read(tables / "dict", split="train")) == 3
    assert len(read(tables / "dict", split="test")) == 1
    assert len(read(tables / "dict" / "test")) == 1


def shards(*names: str) -> tuple[str, ...]:
    return tuple(f"data/{name}-of-00002.jsonl" for name in names)


LAYOUTS = (
    shards("train-00000", "train-00001", "test-00000"),
    shards("train_sft-00000", "train_sft-00001", "test_sft-00000"),
    ("train.jsonl", "train_2.jsonl", "validation.jsonl"),
    ("train/0.jsonl", "train/1.jsonl", "test/0.jsonl"),
    ("data/train/a.jsonl", "data/train/b.jsonl", "data/dev/c.jsonl"),
    ("x-train.jsonl", "y.train.jsonl", "x-eval.jsonl"),
)


@pytest.mark.parametrize("names", LAYOUTS)
def test_a_folder_with_several_splits_asks_for_one(tmp_path: Path, names: tuple[str, ...]):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"file": name}) + "\n")
    (tmp_path / "dataset_infos.json").write_text("{}")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "train.jsonl").write_text("{}\n")
    with pytest.raises(MsrlError, match=mentions("train", "--split")):
        read(tmp_path)
    split = "train_sft" if "train_sft" in names[0] else "train"
    assert {r["file"] for r in read(tmp_path, split=split)} == set(names[:2])
    with pytest.raises(MsrlError, match=mentions("split=trian", split)):
        read(tmp_path, split="trian")
    (tmp_path / names[2]).unlink()
    assert len(read(tmp_path)) == 2


def test_a_split_without_a_folder_and_folders_without_splits(tmp_path: Path):
    for name in ("part-00000-of-00001.jsonl", "rest-00001-of-00001.jsonl"):
        (tmp_path / name).write_text("{}\n")
    assert len(read(tmp_path)) == 2
    with pytest.raises(MsrlError, match=mentions("split=train", "none")):
        read(tmp_path, split="train")
    with pytest.raises(MsrlError, match=mentions("split=train", "no effect")):
        read(tmp_path / "part-00000-of-00001.jsonl", split="train")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_rows_of_tables_are_limited_by_bytes(tmp_path: Path, monkeypatch: Any, suffix: str):
    monkeypatch.setattr(readers, "MAX_BYTES", 1 << 10)
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1 << 15)
    path = tmp_path / f"x.{suffix}"

    def write(texts: list[str]) -> None:
        table = pa.table({"text": texts})
        if suffix == "parquet":
            pq.write_table(table, path, use_dictionary=False, compression="gzip")
        else:
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as w:
                w.write_table(table)

    write(["a" * 6000] * 20)
    batches = list(read_batches([path]))
    assert sum(len(batch.rows) for batch in batches) == 20 and len(batches) > 5
    assert [batch.first for batch in batches][1] == 1 + len(batches[0].rows)
    write(["a", "a" * 40000])
    with pytest.raises(MsrlError, match=mentions("x.", "bytes", "limit")):
        list(read_batches([path]))


def test_of_a_folder_with_several_subsets_one_is_asked_for(tmp_path: Path):
    for subset in ("main", "socratic"):
        for split in ("train", "test"):
            path = tmp_path / subset / f"{split}-00000-of-00001.parquet"
            path.parent.mkdir(exist_ok=True)
            pq.write_table(pa.table({"text": [subset]}), path)
    with pytest.raises(MsrlError, match=mentions("subsets main (1 file), socratic (1 file)")):
        find_files([str(tmp_path)], "train")
    assert read(tmp_path / "main", split="train") == [{"text": "main"}]


def test_parts_of_a_split_in_folders_are_one_subset(tmp_path: Path):
    for name in ("data/train/a/0.jsonl", "data/train/b/1.jsonl", "train/2.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('{"text": "a"}\n')
    assert len(read(tmp_path)) == 3


@pytest.mark.parametrize("encoding", ["RLE_DICTIONARY", "DELTA_BYTE_ARRAY"])
@pytest.mark.slow
def test_rows_that_repeat_a_large_text_are_decoded_a_few_at_a_time(tmp_path: Path, encoding: str):
    has_dictionary = encoding == "RLE_DICTIONARY"
    path = tmp_path / "rows.parquet"
    pq.write_table(
        pa.table({"text": ["x" * (8 << 20)] * 30}),
        path,
        use_dictionary=has_dictionary,
        column_encoding=None if has_dictionary else {"text": encoding},
        dictionary_pagesize_limit=1 << 30,
        compression="zstd",
    )
    assert path.stat().st_size < 1 << 16
    batches = [len(batch.rows) for batch in read_batches((path,)) if batch.first < 10]
    assert max(batches) <= 8


@pytest.mark.parametrize(
    "names",
    [
        ("train-00000-of-00002.jsonl",),
        ("data-00000-of-00002.jsonl", "data-00001-of-00002.jsonl", "data-00000-of-00009.jsonl"),
        ("train.jsonl", "train.csv"),
        ("train.jsonl", "train.jsonl.gz"),
    ],
)
def test_a_folder_with_missing_or_repeated_parts_of_a_dataset_is_refused(
    tmp_path: Path, names: tuple[str, ...]
):
    for name in names:
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(MsrlError, match=mentions(str(tmp_path), "name")):
        find_files([str(tmp_path)])


@pytest.mark.slow
def test_an_arrow_table_that_repeats_a_large_text_is_read_a_few_rows_at_a_time(tmp_path: Path):
    numbers = pa.array([0] * 600, pa.int32())
    table = pa.table({"text": pa.DictionaryArray.from_arrays(numbers, ["x" * (8 << 20)])})
    path = str(tmp_path / "x.arrow")
    with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    batches = [len(batch.rows) for batch in read_batches((tmp_path / "x.arrow",))]
    assert max(batches) <= 8 and sum(batches) == 600


def write_arrow(path: Path, column: Any, **options: Any) -> None:
    batch = pa.record_batch({"a": column})
    settings = pa.ipc.IpcWriteOptions(allow_64bit=True, **options)
    with (
        pa.OSFile(str(path), "wb") as sink,
        pa.ipc.new_file(sink, batch.schema, options=settings) as writer,
    ):
        writer.write_batch(batch)


def test_a_row_with_the_items_of_a_million_rows_is_refused(tmp_path: Path):
    """Its column has few bytes on disk, and few items per row on average."""
    count = 17_000_000
    offsets = pa.array([0] + [count] * 1000, pa.int32())
    items = pa.repeat(pa.scalar(0, pa.int32()), count)
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"a": pa.ListArray.from_arrays(offsets, items)}), path)
    assert path.stat().st_size < 100_000
    with pytest.raises(MsrlError, match=mentions("x.parquet", "row 1", "limit")):
        read(path)


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_compressed_arrow_batch_that_expands_is_refused(tmp_path: Path, compression: str):
    path = tmp_path / "x.arrow"
    write_arrow(path, pa.array(["x" * (65 << 20)]), compression=compression)
    assert path.stat().st_size < 1 << 20
    with pytest.raises(MsrlError, match=mentions("x.arrow", "row 1", "limit")):
        read(path)


def test_a_decoder_that_needs_more_memory_than_allowed_is_one_message(
    tmp_path: Path, monkeypatch: Any
):
    monkeypatch.setattr(table_batches, "_MAX_DECODER_BYTES", 1 << 20)
    path = tmp_path / "x.arrow"
    path.write_bytes(b"x")
    batches = (bytearray(number << 30) for number in (0, 1))
    with pytest.raises(MsrlError, match=mentions("x.arrow", "memory")):
        list(table_batches.within_memory(batches, path))
    assert len(bytearray(1 << 24)) == 1 << 24, "the limit ends with the block"


def nulls(count: int) -> Any:
    return pa.nulls(count)


EXPANDING = {
    "empty rows": lambda: nulls(1 << 33),
    "lists of nulls": lambda: pa.LargeListArray.from_arrays(pa.array([0, 1 << 33]), nulls(1 << 33)),
    "fixed lists": lambda: pa.FixedSizeListArray.from_arrays(nulls((1 << 31) - 1), (1 << 31) - 1),
    "runs": lambda: pa.RunEndEncodedArray.from_arrays(pa.array([1 << 40]), pa.array(["x"])),
    "views": lambda: pa.ListViewArray.from_arrays(
        pa.array([0] * 99, pa.int32()), pa.array([9] * 99, pa.int32()), pa.array(["x"] * 9)
    ),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", EXPANDING)
def test_an_arrow_file_of_a_few_bytes_with_billions_of_values_is_refused(tmp_path: Path, kind: str):
    path = tmp_path / "x.arrow"
    write_arrow(path, EXPANDING[kind]())
    assert path.stat().st_size < 10_000
    with pytest.raises(MsrlError, match=mentions("x.arrow")):
        read(path)


def test_a_compressed_arrow_file_is_decompressed_up_to_a_limit(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(readers, "_MAX_COMPRESSED_BYTES", 1 << 20)
    (tmp_path / "x.arrow.gz").write_bytes(gzip.compress(b"ARROW1\0\0" + bytes(4 << 20)))
    with pytest.raises(MsrlError, match=mentions("x.arrow.gz", "bytes")):
        read(tmp_path / "x.arrow.gz")


@pytest.mark.sample(1)
@pytest.mark.parametrize("start", [b"[", b"  ", b""])
def test_a_json_array_with_a_hole_is_not_read(tmp_path: Path, start: bytes):
    path = tmp_path / "x.json"
    path.write_bytes(start)
    os.truncate(path, 1 << 30)
    with pytest.raises(MsrlError, match=mentions("x.json", "hole")):
        read(path)
    os.truncate(path, 1 << 40)
    with pytest.raises(MsrlError, match=mentions("x.json", "row per line")):
        read(path)
