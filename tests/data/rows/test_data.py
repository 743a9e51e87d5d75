"""Reading rows, handlers, packing, indexed files and datasets."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest

from config_inputs import make_model
from msrl.data import tokenize
from msrl.data.columns import DroppedRow
from msrl.data.dataset import PromptDataset, SftDataset, TextDataset
from msrl.data.files import readers
from msrl.data.files.readers import find_files, read_batches
from msrl.data.handlers import ALIASES, handler_names, make_handler
from msrl.data.indexed import IndexedReader, IndexedWriter
from msrl.data.pack import pack_rows
from msrl.data.tokenize import _fit_to_kind
from msrl.data.tokenizer import _build, load_tokenizer, open_tokenizer, tokenizer_hash
from msrl.errors import MsrlError
from msrl.types import Conversation, Message
from support import assert_mentions, mentions, shared_data


def read_rows(*inputs) -> list:
    return [
        row
        for batch in read_batches(find_files([str(i) for i in inputs]))
        for _, row in batch.values()
    ]


def converse(name: str, row, *, map_keys=None, kind=None, options=None) -> Conversation:
    handler = make_handler(name, kind=kind, map_keys=map_keys or {}, options=options or {})
    return handler.converter()(row)


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in conversation.messages]


# --- readers ---


def test_rows_are_the_same_from_json_jsonl_and_parquet(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"a": f"é{i}", "b": {"c": [str(i)]}} for i in range(1200)]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    (tmp_path / "y.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "z.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "w.parquet", row_group_size=100)
    for name in ("x.json", "y.jsonl", "z.json", "w.parquet"):
        assert read_rows(tmp_path / name) == rows


def test_folder_and_glob_are_read_in_order_of_name_and_each_file_once(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"name": name}) + "\n\n")
    (tmp_path / "notes.txt").write_text("no data")
    assert [r["name"] for r in read_rows(tmp_path, tmp_path / "*.jsonl")] == ["a", "b"]


def test_one_object_is_one_row(tmp_path):
    (tmp_path / "x.json").write_text('{\n "a": 1\n}')
    assert read_rows(tmp_path / "x.json") == [{"a": 1}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"a": 1}\n\n{"a": \n', ("x.jsonl:3", "JSON")),
        ("x.jsonl", b'{"a": "\xff"}\n', ("x.jsonl:1", "UTF-8")),
        ("x.json", b'[{"a": 1},\n', ("x.json", "JSON")),
        ("x.jsonl", b'{"a": ' + b"1" * 5000 + b"}\n", ("x.jsonl:1", "4300 digits")),
        ("x.json", b"[" * 200_000, ("x.json", "recursion depth")),
        ("x.parquet", b"PAR1 no parquet", ("x.parquet", "Parquet")),
        ("x.xlsx", b"a,b", ("x.xlsx", ".xlsx")),
    ],
)
def test_an_unreadable_file_raises_an_error_with_its_name(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MsrlError) as caught:
        read_rows(tmp_path / name)
    assert_mentions(caught.value, *message)


def test_an_input_without_files_is_refused(tmp_path):
    for item, message in (
        (tmp_path, ".jsonl"),
        (tmp_path / "*.jsonl", "*.jsonl"),
        (tmp_path / "x", "file or folder"),
    ):
        with pytest.raises(MsrlError, match=mentions(item, message)):
            find_files([str(item)])


ROWS = [{"q": 'a,"b"\nc', "a": "日本"}, {"q": "x", "a": "y"}]


def write_rows(path, rows) -> None:
    """Write rows in the format of the suffix, compressed if there is a second one."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    suffix = path.suffixes[0]
    table = pa.Table.from_pylist(rows)
    buffer = io.BytesIO()
    if suffix in (".csv", ".tsv"):
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, rows[0], delimiter="," if suffix == ".csv" else "\t")
        writer.writeheader()
        writer.writerows(rows)
        buffer.write(text.getvalue().encode())
    elif suffix == ".arrow":
        make = pa.ipc.new_file if "file" in path.name else pa.ipc.new_stream
        with make(buffer, table.schema) as sink:
            sink.write_table(table)
    elif suffix == ".parquet":
        pq.write_table(table, buffer)
    elif suffix == ".json":
        buffer.write(json.dumps(rows).encode())
    else:
        buffer.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    data = buffer.getvalue()
    if path.suffixes[1:] == [".gz"]:
        data = gzip.compress(data)
    elif path.suffixes[1:] == [".zst"]:
        data = pa.compress(data, "zstd", asbytes=True)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "name",
    [
        "x.csv", "x.tsv", "x.csv.gz", "x.arrow", "file.arrow", "x.arrow.zst", "x.jsonl.gz",
        "x.jsonl.zst", "x.json.gz", "x.json.zst", "x.parquet",
    ],
)  # fmt: skip
def test_every_format_and_compression_has_the_same_rows(tmp_path, name):
    write_rows(tmp_path / name, ROWS)
    for item in (tmp_path / name, tmp_path, tmp_path / "*"):
        batches = list(read_batches(find_files([str(item)])))
        assert [row for batch in batches for _, row in batch.values()] == ROWS


def test_a_line_of_a_text_file_is_a_document(tmp_path):
    (tmp_path / "x.txt").write_bytes("\ufeffa 日本\r\n\nb".encode())
    [batch] = read_batches(find_files([str(tmp_path)]))
    assert [row["text"] for _, row in batch.values()] == ["a 日本", "", "b"]
    wiki = shared_data("sft", "wiki_demo.txt")
    texts = [row["text"] for b in read_batches([wiki]) for _, row in b.values()]
    assert texts == wiki.read_text().splitlines() and len(texts) == 30


@pytest.mark.parametrize(
    ("name", "content", "fragments"),
    [
        ("x.csv", b"a,b\n1,2,3\n", ("row 1", "values")),
        ("x.csv", b"a,b\n1\n", ("row 1", "values")),
        ("x.csv", b"a,a\n1,2\n", ("header",)),
        ("x.csv", b'a,b\n"1,2\n', ("CSV",)),
        ("x.csv", b"a,b\n\xff,2\n", ("UTF-8",)),
        ("x.txt", b"\xff\n", ("UTF-8",)),
        ("x.jsonl.gz", b"{}", ("read",)),
        ("x.jsonl.gz", gzip.compress(b"{}" * 1000, mtime=0)[:-9], ("read",)),
        ("x.jsonl.zst", b"{}", ("read",)),
        ("x.arrow", b"{}", ("Arrow",)),
        ("x.arrow", b"ARROW1{}", ("Arrow",)),
        ("x.parquet.gz", b"", ("cannot read", ".gz")),
    ],
)
def test_a_damaged_file_of_any_format_is_named(tmp_path, name, content, fragments):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MsrlError) as caught:
        read_rows(tmp_path / name)
    assert_mentions(caught.value, name, *fragments)


@pytest.mark.parametrize("name", ["x.jsonl.gz", "x.json.gz", "x.txt.gz", "x.jsonl", "x.csv"])
def test_a_line_without_end_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch, name):
    monkeypatch.setattr(readers, "MAX_LINE_BYTES", 1000)
    content = b'{"text": "a"}\n{"text": "' + b"x" * 1000
    if name == "x.json.gz":  # rows in lines too
        content = b'{"text": "a"}\n' * 2 + content
    if name == "x.csv":  # a row in several lines, of fields within their limit
        content = b"a,b\n1,2\n" + b'"\n' + b"x" * 600 + b'",' + b'"\n' + b"x" * 600
    content = gzip.compress(content) if name.endswith(".gz") else content
    (tmp_path / name).write_bytes(content)
    with pytest.raises(MsrlError, match=mentions(name, "line", "bytes")):
        list(read_batches(find_files([str(tmp_path / name)])))


def test_a_row_with_too_much_text_is_refused_before_it_is_tokenized(monkeypatch):
    monkeypatch.setattr(tokenize, "MAX_TEXT_BYTES", 100)
    turns = (Message("user", "x" * 60), Message("assistant", "y" * 60))
    tools = Conversation((Message("user", "x"),), extra={"tools": "z" * 120})
    for item in ("\u00e9" * 60, Conversation(turns), tools):
        with pytest.raises(MsrlError, match=mentions("bytes", "100")):
            tokenize._check_texts(item)
    tokenize._check_texts("x" * 100)
    tokenize._check_texts(Conversation((Message("user", "x"),), extra={"kept": "z" * 120}))


def test_rows_of_csv_are_read_in_batches_of_limited_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "MAX_BYTES", 1000)
    (tmp_path / "x.csv").write_text("a,b\n" + f"{'x' * 300},2\n" * 10)
    batches = list(read_batches([tmp_path / "x.csv"]))
    assert [(batch.first, len(batch.rows)) for batch in batches] == [(1, 4), (5, 4), (9, 2)]


def test_a_compressed_array_that_expands_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "_MAX_COMPRESSED_BYTES", 1000)
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(b"[" + b" " * 2000 + b"]"))
    with pytest.raises(MsrlError, match=mentions("x.json.gz", "1,000", "line")):
        list(read_batches([tmp_path / "x.json.gz"]))


# --- handlers ---


def test_alpaca_joins_instruction_and_input_and_keeps_history():
    row = {
        "instruction": "Add.",
        "input": "1 2",
        "output": "3",
        "system": "Be brief.",
        "history": [["Hi", "Hello"]],
    }
    expected = [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello"),
        ("user", "Add.\n1 2"),
        ("assistant", "3"),
    ]
    assert turns(converse("alpaca", row)) == expected
    assert turns(converse("alpaca", {"instruction": "Hi", "input": "", "output": "Hello"})) == [
        ("user", "Hi"),
        ("assistant", "Hello"),
    ]


def test_alpaca_reads_the_columns_that_map_keys_names():
    keys = {"prompt": "q.text", "query": "", "response": "a.0"}
    row = {"q": {"text": "Hi"}, "a": ["Hello"], "input": "not this"}
    assert turns(converse("alpaca", row, map_keys=keys)) == [("user", "Hi"), ("assistant", "Hello")]


def test_sharegpt_reads_both_formats_and_tool_calls():
    row = shared_rows("sft/glaive_toolcall_en_demo.json")[0]
    made = converse("sharegpt", row)
    assert [m.role for m in made.messages] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
    ]
    call = row["conversations"][3]["value"]
    assert made.messages[3].content == f"<tool_call>\n{call}\n</tool_call>"
    tools = [{"type": "function", "function": tool} for tool in json.loads(row["tools"])]
    assert json.loads(made.extra["tools"]) == tools
    openai = {
        "messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    }
    assert turns(converse("sharegpt", openai)) == [("user", "Hi"), ("assistant", "Hello")]


def test_sharegpt_writes_openai_tool_calls_in_tags():
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    messages = [
        {"role": "user", "content": "Go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "1"},
    ]
    made = converse("sharegpt", {"messages": [*messages, {"role": "assistant", "content": "Done"}]})
    assert (
        made.messages[1].content
        == '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    )


def test_reasoning_content_is_put_in_front_of_the_answer():
    call = {"function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Go"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "First f.\n",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "Done", "reasoning_content": "It is 1."},
    ]
    made = converse("sharegpt", {"messages": messages})
    call_text = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert made.messages[1].content == f"<think>\nFirst f.\n</think>\n\n{call_text}"
    assert made.messages[3].content == "<think>\nIt is 1.\n</think>\n\nDone"


def test_a_ground_truth_does_not_contain_the_thought():
    answer = {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"}
    row = {"messages": [{"role": "user", "content": "2+2?"}, answer]}
    assert _fit_to_kind(converse("sharegpt", row), "prompts").answer == "4"
    assert (
        converse(
            "r1", {"instruction": "2+2?", "output": [{"role": "user", "content": "2+2?"}, answer]}
        ).answer
        == "4"
    )


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"role": ["user"], "content": "x"}, ("turn 1", "role", "'user'")),
        ({"role": "user", "content": [{"type": "image_url"}]}, ("turn 1", "text", "list")),
        (
            {"role": "assistant", "content": ["x"], "tool_calls": [{"name": "f", "arguments": {}}]},
            ("turn 1", "text", "list"),
        ),
        ({"role": "assistant", "content": "x", "tool_calls": 5}, ("turn 1", "tool_calls", "int")),
        (
            {"role": "assistant", "content": "x", "reasoning_content": ["y"]},
            ("turn 1", "reasoning_content", "list"),
        ),
    ],
)
def test_a_turn_of_another_format_raises_an_error_with_its_number(turn, message):
    with pytest.raises(MsrlError) as caught:
        converse("sharegpt", {"messages": [turn]})
    assert_mentions(caught.value, *message)


def test_tools_that_are_not_objects_are_refused():
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    for tools, message in (([1], ("tools", "objects")), ("[" * 200_000, ("tools", "JSON"))):
        with pytest.raises(MsrlError, match=mentions(*message)):
            converse("sharegpt", {"messages": messages, "tools": tools})


def test_null_keys_of_parquet_turns_are_ignored():
    empty = {"from": None, "value": None, "tool_calls": None}
    row = {
        "messages": [
            {**empty, "role": "user", "content": "x"},
            {**empty, "role": "assistant", "content": "y"},
        ]
    }
    assert turns(converse("sharegpt", row)) == [("user", "x"), ("assistant", "y")]


@pytest.mark.parametrize(
    "order",
    [
        "assistant user",
        "user user",
        "user assistant assistant",
        "user system assistant",
        "user tool assistant",
    ],
)
def test_sharegpt_drops_turns_in_an_impossible_order(order):
    with pytest.raises(DroppedRow, match="turn_order"):
        converse(
            "sharegpt", {"messages": [{"role": role, "content": "x"} for role in order.split()]}
        )


def test_gsm8k_answer_is_the_number_after_the_mark():
    row = {"question": "How many?", "answer": "1000+234 = <<1000+234=1234>>1,234.\n#### 1,234"}
    worked = converse("gsm8k", row)
    assert worked.answer == "1234" and turns(worked) == [
        ("user", "How many?"),
        ("assistant", row["answer"]),
    ]
    shown = converse("gsm8k", row, options={"style": "r1", "calculator": False}).messages[1].content
    assert shown == "<think>1000+234 = 1,234.</think><answer>\\boxed{1234}</answer>"
    with pytest.raises(MsrlError, match=mentions("#### number")):
        converse("gsm8k", {"question": "How many?", "answer": "12"})


def shared_rows(name: str) -> list:
    return read_rows(shared_data(*name.split("/")))


MATH = {
    "math/dapo_math_17k.parquet": (
        "r1",
        {"prompt": "prompt", "response": "reward_model.ground_truth"},
        17917,
        "34",
    ),
    "math/deepscaler_1209.parquet": (
        "Math17kAlpacaStyleInstructionHandler",
        {},
        1209,
        "\\frac{3}{7}",
    ),
    "math/orz_math_57k_collected.first1785.json": (
        "r1",
        {"prompt": "0.value", "response": "1.ground_truth.value"},
        1785,
        "n = 4",
    ),
    "math/math500.jsonl": (
        "r1",
        {"prompt": "problem", "response": "answer"},
        500,
        "\\left( 3, \\frac{\\pi}{2} \\right)",
    ),
    "math/gsm8k_test.jsonl": ("gsm8k", {}, 1319, "18"),
}


@pytest.mark.parametrize("name", MATH)
@pytest.mark.slow
def test_public_math_datasets_are_read_with_map_keys(name):
    handler_name, keys, count, first = MATH[name]
    handler = make_handler(handler_name, kind="prompts", map_keys=keys, options={})
    made = [handler.converter()(row) for row in shared_rows(name)]
    assert len(made) == count and made[0].answer == first
    assert all(
        c.answer is not None and c.messages[0].role == "user" and c.messages[0].content
        for c in made
    )


def test_r1_accepts_integer_answers_but_no_other_types():
    row = {"q": "2+2?", "a": 4, "tag": "sums"}
    made = converse("r1", row, map_keys={"prompt": "q", "response": "a", "extra.tag": "tag"})
    assert made == Conversation((Message("user", "2+2?"),), "4", {"tag": "sums"})
    with pytest.raises(MsrlError, match=mentions("column 'a'", "number")):
        converse("r1", {"q": "2+2?", "a": 4.5}, map_keys={"prompt": "q", "response": "a"})


@pytest.mark.parametrize(
    ("row", "keys", "message"),
    [
        ({"question": "x", "output": "y"}, {}, ("'instruction'", "'prompt'", "question, output")),
        ({"instruction": "x", "output": ["y"]}, {}, ("'output'", "'response'", "list")),
        ({"instruction": "x", "output": None}, {}, ("'output'", "null")),
        ({"instruction": "x", "output": "y"}, {"query": "context"}, ("'context'", "'query'")),
        (
            {"instruction": "x", "output": "y"},
            {"respons": "output"},
            ("map_keys.respons", "'response'"),
        ),
        ({"instruction": "x", "output": "y"}, {"response": ""}, ("map_keys.response", "column")),
        ({"instruction": "x", "output": "y", "history": ["a"]}, {}, ("history", "pairs")),
        (5, {}, ("row", "number")),
        (None, {}, ("row", "null")),
        ("x", {}, ("row", "text")),
    ],
)
def test_a_row_that_does_not_match_raises_an_error_with_the_column(row, keys, message):
    with pytest.raises(MsrlError) as caught:
        converse("alpaca", row, map_keys=keys)
    assert_mentions(caught.value, *message)


def test_handlers_are_selected_by_msrl_and_mindspeed_names():
    assert {
        "pretrain",
        "alpaca",
        "sharegpt",
        "r1",
        "gsm8k",
        "AlpacaStyleInstructionHandler",
    } <= set(handler_names())
    for name in handler_names():
        assert make_handler(name, kind=None, map_keys={}, options={}).name == ALIASES.get(
            name, name
        )
    assert (
        make_handler("R1SharegptStyleInstructionHandler", kind=None, map_keys={}, options={}).kind
        == "prompts"
    )


def test_unknown_handler_kind_and_option_are_refused():
    for name, kind, options, message in (
        ("alpacca", None, {}, ("alpacca", "'alpaca'")),
        ("pretrain", "sft", {}, ("pretrain", "sft")),
        ("gsm8k", None, {"stile": "r1"}, ("preprocess.options.stile", "option", "'style'")),
    ):
        with pytest.raises(MsrlError) as caught:
            make_handler(name, kind=kind, map_keys={}, options=options)
        assert_mentions(caught.value, *message)


# --- packing ---


def test_best_fit_selects_the_row_with_the_least_free_space():
    # Longest first: 7 and 6 start rows, 4 fills the row of 6, 3 fills the row of 7, 2 starts a row,
    # and the other 2 joins it.
    assert pack_rows([2, 6, 3, 7, 2, 4], 10) == [[0, 4], [1, 5], [2, 3]]


def test_every_example_is_in_one_row_and_rows_are_nearly_full():
    lengths = np.random.default_rng(0).integers(1, 400, 3000).tolist()
    rows = pack_rows(lengths, 512)
    assert sorted(i for row in rows for i in row) == list(range(3000))
    assert all(sum(lengths[i] for i in row) <= 512 for row in rows)
    assert len(rows) <= -(-sum(lengths) // 512) * 1.02


# --- indexed files ---


def write(folder, name: str, sequences) -> None:
    writer = IndexedWriter(folder / f"{name}.bin", folder / f"{name}.idx")
    for sequence in sequences:
        writer.add(np.array(sequence, np.int32), np.array([len(sequence)], np.int32))
    writer.close()


def test_the_index_has_megatrons_format_byte_for_byte(tmp_path):
    write(tmp_path, "x", [[1, -100, 3], [], [2**31 - 1]])
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<4i", 1, -100, 3, 2**31 - 1)
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 4)
    assert (tmp_path / "x.idx").read_bytes() == header + struct.pack(
        "<3i3q4q", 3, 0, 1, 0, 12, 12, 0, 1, 2, 3
    )
    reader = IndexedReader(tmp_path / "x")
    assert [reader[i].tolist() for i in range(len(reader))] == [[1, -100, 3], [], [2**31 - 1]]


@pytest.mark.slow
def test_megatron_reads_the_files_and_writes_identical_ones(tmp_path):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    sequences = [
        np.random.default_rng(i).integers(0, 151936, i * 7 + 1).tolist() for i in range(20)
    ]
    write(tmp_path, "ours", sequences)
    assert [row.tolist() for row in IndexedDataset(str(tmp_path / "ours"))] == sequences
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32)
    for sequence in sequences:
        builder.add_document(torch.tensor(sequence, dtype=torch.int32), [len(sequence)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (
            tmp_path / f"theirs.{suffix}"
        ).read_bytes()


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_truncated_files_are_refused(tmp_path, suffix):
    write(tmp_path, "x", [[1, 2, 3]] * 10)
    path = tmp_path / f"x.{suffix}"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(MsrlError, match=mentions(f"x.{suffix}", "bytes")):
        IndexedReader(tmp_path / "x")


# --- datasets ---


def mindspeed_files(folder, columns: dict) -> str:
    """Write files as MindSpeed's preprocessing does: no manifest, no answers as text."""
    for key, sequences in columns.items():
        write(folder, f"data_packed_{key}_document", sequences)
    return str(folder / "data")


def test_mindspeeds_rows_are_one_sequence_each(tmp_path, caplog):
    ids, labels = [[5, 6, 7], [8, 9]], [[-100, 6, 7], [-100, 9]]
    data = SftDataset(
        mindspeed_files(
            tmp_path, {"input_ids": ids, "attention_mask": [[1, 1, 1], [1, 1]], "labels": labels}
        )
    )
    assert_mentions(caplog.text, "tokenizer")
    assert data.manifest is None
    assert [[e.token_ids.tolist() for e in row] for row in data] == [[[5, 6, 7]], [[8, 9]]]
    assert [[e.loss_mask.tolist() for e in row] for row in data] == [
        [[False, True, True]],
        [[False, True]],
    ]


def test_mindspeeds_neat_packed_rows_keep_their_boundaries(tmp_path):
    mask, labels = [[1, 1, 2, 2, 2, 0]], [[-100, 6, -100, 8, 9, -100]]
    data = SftDataset(
        mindspeed_files(
            tmp_path, {"input_ids": [[5, 6, 7, 8, 9, 0]], "attention_mask": mask, "labels": labels}
        )
    )
    assert [e.token_ids.tolist() for e in data[0]] == [[5, 6], [7, 8, 9]]


def test_mindspeeds_answers_are_decoded(tmp_path):
    prefix = mindspeed_files(
        tmp_path, {"input_ids": [[5, 6]], "attention_mask": [[1, 1]], "labels": [[7, 8]]}
    )
    with pytest.raises(MsrlError, match=mentions("model.tokenizer")):
        PromptDataset(prefix)
    assert PromptDataset(prefix, decode=str)[0].answer == "[7, 8]"


def test_an_unknown_prefix_raises_an_error_with_the_existing_prefixes(tmp_path):
    mindspeed_files(tmp_path, {"input_ids": [[5]]})
    with pytest.raises(MsrlError, match=mentions(f"{tmp_path}/data", "prefix")):
        SftDataset(str(tmp_path / "date"))


def test_data_without_rows_is_refused(tmp_path):
    prefix = mindspeed_files(tmp_path, {"input_ids": [], "attention_mask": [], "labels": []})
    write(tmp_path, "data_text_document", [])
    for dataset in (SftDataset, PromptDataset, TextDataset):
        with pytest.raises(MsrlError, match=mentions("data prefix", "_document.idx", "no rows")):
            dataset(prefix)


def test_files_of_different_runs_are_refused(tmp_path):
    prefix = mindspeed_files(
        tmp_path, {"input_ids": [[5, 6]], "attention_mask": [[1, 1]], "labels": [[6]]}
    )
    with pytest.raises(MsrlError, match=mentions(f"{tmp_path}", "run")):
        SftDataset(prefix)


@pytest.mark.slow
def test_reading_data_imports_neither_torch_nor_transformers_nor_megatron():
    code = (
        "import sys, msrl.data.dataset, msrl.data.tokenize\n"
        "heavy = {'torch', 'transformers', 'megatron'}\n"
        "print([m for m in sys.modules if m in heavy])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


# --- tokenizers ---


@pytest.mark.slow
def test_a_tokenizer_opened_without_transformers_is_equal(tmp_path):
    hf = load_tokenizer(shared_data("tokenizers", "gpt2"))
    from transformers import PreTrainedTokenizerFast

    plain = PreTrainedTokenizerFast(
        tokenizer_object=hf.backend_tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>"
    )
    plain.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] in ("PreTrainedTokenizerFast", "TokenizersBackend")
    opened, loaded = open_tokenizer(tmp_path), load_tokenizer(tmp_path)
    text = "Hello, 世界! <|pad|> 1234\n\n  x"
    assert opened.backend.encode(text).ids == loaded(text)["input_ids"]
    assert opened.get_vocab() == loaded.get_vocab() and tokenizer_hash(opened) == tokenizer_hash(
        loaded
    )
    assert (opened.eos_token, opened.pad_token, opened.vocab_size) == (
        "<|endoftext|>",
        "<|pad|>",
        len(loaded),
    )


@pytest.mark.parametrize(
    "name", ["qwen2.5-0.5b-instruct", "qwen3-4b", "gpt2", "granite-3.1-1b-a400m"]
)
@pytest.mark.slow
def test_published_tokenizers_are_equal_to_those_of_transformers(name):
    folder = shared_data("tokenizers", name)
    opened, loaded = open_tokenizer(folder), load_tokenizer(folder)
    text = "Hello, 世界! 1234\n\n  x"
    assert (
        opened.backend.encode(text, add_special_tokens=False).ids
        == loaded(text, add_special_tokens=False)["input_ids"]
    )
    assert opened.vocab_size == len(loaded)


TOKENIZER_MODELS = {
    "qwen3-4b": (None, "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "llama"),
    "granite-3.1-1b-a400m": (None, "gpt2", "granite", "granitemoe", "deepseek_v3", "llama"),
    "mistral-7b-instruct-v0.2": (None, "llama"),
}


@pytest.mark.parametrize(
    ("name", "model_type"),
    [(name, model_type) for name, types in TOKENIZER_MODELS.items() for model_type in types],
)
@pytest.mark.slow
def test_the_tokenizer_is_that_of_auto_tokenizer(tmp_path, name, model_type):
    from transformers import AutoTokenizer

    folder = tmp_path / name
    shutil.copytree(shared_data("tokenizers", name), folder)
    (folder / "config.json").unlink(missing_ok=True)
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    expected, loaded = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    assert type(loaded) is type(expected)
    assert loaded.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()


@pytest.mark.parametrize("name", ["TokenizersBackend", "PreTrainedTokenizerFast"])
@pytest.mark.slow
def test_a_plain_class_of_a_qwen2_model_is_opened_without_transformers(tmp_path, name):
    from transformers import AutoTokenizer

    folder = tmp_path / name
    shutil.copytree(shared_data("tokenizers", "qwen2.5-0.5b-instruct"), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": name}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    expected, loaded = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    assert type(loaded) is type(expected)
    assert _build(folder) is not None
    text = "Hello, 世界! 1234\n\n  x"
    assert open_tokenizer(folder).backend.encode(text).ids == expected(text)["input_ids"]


@pytest.mark.slow
def test_the_hash_distinguishes_tokenizers():
    hashes = {
        tokenizer_hash(open_tokenizer(shared_data("tokenizers", n)))
        for n in ("qwen2.5-0.5b-instruct", "qwen3-4b", "gpt2")
    }
    assert len(hashes) == 3


def test_a_folder_with_only_a_model_config_is_not_a_tokenizer(tmp_path):
    make_model(tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Qwen2Tokenizer"}'
    )
    for read in (open_tokenizer, load_tokenizer):
        with pytest.raises(MsrlError, match=mentions("model", "tokenizer.json", "vocabulary")):
            read(tmp_path / "model")


def test_folder_without_a_tokenizer_is_refused(tmp_path):
    for path, message in ((tmp_path / "none", "folder"), (tmp_path, "tokenizer.json")):
        with pytest.raises(MsrlError, match=mentions(path, message)):
            open_tokenizer(path)


def test_an_input_that_is_named_twice_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    for name in ("a.jsonl", "*.jsonl", ""):
        item = str(tmp_path / name)
        with pytest.raises(MsrlError, match=mentions("preprocess.input", item, "once")):
            find_files([item, f"{tmp_path}/./{name}"])
