"""Preference data: formats of rows, rows dropped by name, truncation, files on disk, rows to train.

The rows of LLaMA-Factory and torchtune are real inputs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msrl.config.schema import Config
from msrl.data.columns import DroppedRow
from msrl.data.dataset import SftDataset
from msrl.data.handlers import make_handler
from msrl.data.indexed import IndexedReader
from msrl.data.preferences import PreferenceDataset, fit, last_answer_only
from msrl.errors import MsrlError
from msrl.types import DatasetManifest, PreferenceRow, RenderedExample, RenderedPreference
from msrl.workflows.preference.batches import make_batch, unrelated_sides
from msrl.workflows.preference.rows import open_rows
from msrl.workflows.preprocess import run
from support import assert_mentions, mentions, shared_data
from tiny_qwen2 import CHATML, make_tokenizer

USER = {"role": "user", "content": "1 + 1?"}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def convert(name: str, row: Mapping[str, Any], **map_keys: str) -> PreferenceRow:
    return make_handler(name, kind=None, map_keys=map_keys, options={}).converter()(row)


def sides(row: PreferenceRow) -> list[list[str]]:
    return [[m.content for m in side.messages] for side in row.conversations]


PAIR = [["1 + 1?", "2"], ["1 + 1?", "3"]]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def preprocess(
    tokenizer: Path, rows: Sequence[Mapping[str, Any]], handler: str = "pairs", **settings: Any
) -> tuple[DatasetManifest, str]:
    """Preprocess rows with a tokenizer of one token per byte; return manifest and prefix."""
    folder = tokenizer.parent
    source, prefix = folder / "rows.jsonl", str(folder / "data")
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    section = {
        "input": [str(source)],
        "tokenizer": str(tokenizer),
        "handler": handler,
        "template": "qwen",
        "output_prefix": prefix,
        "overwrite": True,
        **settings,
    }
    return run(Config.model_validate({"preprocess": section}, strict=False)), prefix


# --- formats ---


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("AlpacaStylePairwiseHandler", {"instruction": "1 + 1?", "chosen": "2", "rejected": "3"}),
        ("alpaca_pairs", {"instruction": "1 + 1?", "output": ["2", "3"]}),
        (
            "SharegptStylePairwiseHandler",
            {
                "conversations": [{"from": "human", "value": "1 + 1?"}],
                "chosen": {"from": "gpt", "value": "2"},
                "rejected": {"from": "gpt", "value": "3"},
            },
        ),
        ("sharegpt_pairs", {"messages": [USER], "chosen": "2", "rejected": "3"}),
        ("pairs", {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}),
        (
            "pairs",
            {"prompt": [USER], "chosen": [assistant("2")], "rejected": [assistant("3")]},
        ),
        ("pairs", {"chosen": [USER, assistant("2")], "rejected": [USER, assistant("3")]}),
        (
            "pairs",
            {
                "prompt": "1 + 1?",
                "chosen": [USER, assistant("2")],
                "rejected": [USER, assistant("3")],
            },
        ),
    ],
)
def test_pairs_are_read_in_the_usual_formats(name: str, row: dict[str, Any]) -> None:
    made = convert(name, row)
    assert sides(made) == PAIR and (made.value, made.weight) == (0.0, 1.0)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1 + 1?", "completion": "2", "label": True},
        {"prompt": [USER], "completion": [assistant("2")], "label": "true"},
        {"messages": [USER, assistant("2")], "label": True},
        {"conversations": [USER, assistant("2")], "kto_tag": True},
        {"instruction": "1 + 1?", "output": "2", "kto_tag": True},
    ],
)
def test_labeled_answers_are_read_in_the_usual_formats(row: dict[str, Any]) -> None:
    made = convert("labeled", row)
    assert sides(made) == PAIR[:1] and made.value == 1.0


def test_margins_and_weights_are_numbers_of_the_row() -> None:
    row = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3", "margin": 0.5, "weight": 2}
    made = convert("pairs", row)
    assert (made.value, made.weight) == (0.5, 2.0)
    text = convert("pairs", {**row, "margin": " 0.5 ", "weight": ""})
    assert (text.value, text.weight) == (0.5, 1.0)
    for column, value in (
        ("margin", "high"),
        ("margin", "nan"),
        ("weight", "1e999"),
        ("margin", True),
        ("weight", 0),
        ("weight", -1),
    ):
        with pytest.raises(MsrlError, match=mentions(column, value)):
            convert("pairs", {**row, column: value})


@pytest.mark.parametrize(("suffix", "separator"), [("csv", ","), ("tsv", "\t")])
def test_tables_of_text_have_margins_and_weights(
    suffix: str, separator: str, tokenizer: Path
) -> None:
    source = tokenizer.parent / f"rows.{suffix}"
    rows = ("prompt chosen rejected margin weight", "a b c 0.25 2", "d e f  ")
    source.write_text("".join(f"{row.replace(' ', separator)}\n" for row in rows))
    _, prefix = preprocess(tokenizer, [], input=[str(source)])
    dataset = PreferenceDataset(prefix, "pairs")
    assert [dataset.values(number) for number in range(2)] == [(0.25, 2.0), (0.0, 1.0)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rejected": "2"}, "equal_answers"),
        ({"rejected": "  "}, "empty_answer"),
        ({"chosen": ""}, "empty_answer"),
        ({"prompt": ""}, "empty_prompt"),
        ({"chosen": [{"role": "user", "content": "?"}, assistant("2")]}, "different_prompts"),
        ({"chosen": [USER]}, "empty_answer"),
    ],
)
def test_a_bad_pair_is_dropped_with_its_reason(change: dict[str, Any], reason: str) -> None:
    row = {"prompt": "1 + 1?", "chosen": "2", "rejected": "3", **change}
    with pytest.raises(DroppedRow) as caught:
        convert("pairs", row)
    assert caught.value.reason == reason


def test_sides_that_differ_before_the_answer_are_dropped() -> None:
    other = {"role": "user", "content": "2 + 2?"}
    row = {"chosen": [USER, assistant("2")], "rejected": [other, assistant("3")]}
    with pytest.raises(DroppedRow) as caught:
        convert("pairs", row)
    assert caught.value.reason == "different_prompts"


@pytest.mark.parametrize("label", [None, 3, "maybe", 0.5])
def test_a_label_that_is_neither_true_nor_false_is_refused(label: Any) -> None:
    with pytest.raises(MsrlError, match=mentions("label", repr(label), "true")):
        convert("labeled", {"prompt": "a", "completion": "b", "label": label})


def test_missing_columns_are_refused_with_their_names() -> None:
    with pytest.raises(MsrlError, match=mentions("label", "map-keys")):
        convert("labeled", {"prompt": "a", "completion": "b"})
    with pytest.raises(MsrlError, match=mentions("rejected", "map-keys")):
        convert("pairs", {"prompt": "a", "chosen": "b"})
    with pytest.raises(MsrlError, match=mentions("prompt", "map-keys")):
        convert("pairs", {"chosen": "b", "rejected": "c"})


# --- limits ---


def example(length: int, answer: int, token: int = 7) -> RenderedExample:
    ids = np.concatenate((np.arange(answer), np.full(length - answer, token)))
    return RenderedExample(ids, np.arange(length) >= answer)


def test_only_the_last_answer_of_a_conversation_is_trained() -> None:
    mask = np.array([0, 1, 1, 0, 0, 1, 1], np.bool_)
    last = last_answer_only(RenderedExample(np.arange(7), mask))
    assert last.loss_mask.tolist() == [False] * 5 + [True] * 2


def test_an_answer_whose_thought_the_chat_template_removes_is_not_trained(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    shown = "{{ m['content'].split('</think>')[-1] }}"
    tokenizer.chat_template = CHATML.replace("{{ m['content'] }}", shown)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    turns = [{"role": "user", "content": "1?"}, assistant("one"), USER]
    chosen, rejected = [*turns, assistant("<think>1</think>2")], [*turns, assistant("3")]
    rows = [
        {"chosen": chosen, "rejected": rejected},
        {"chosen": rejected, "rejected": [*turns, assistant("4")]},
    ]
    manifest, prefix = preprocess(tmp_path / "tokenizer", rows, template="native")
    assert dict(manifest.dropped) == {"nothing_to_learn": 1}
    for side, answer in zip(PreferenceDataset(prefix, "pairs")[0].sides, "34", strict=True):
        assert tokenizer.decode(side.token_ids[side.loss_mask]) == f"{answer}<|im_end|>"


@pytest.mark.parametrize(
    ("enable_thinking", "dropped"),
    [(None, {"different_thoughts": 1}), (True, {}), (False, {})],
)
def test_a_thought_on_one_side_only_needs_a_thinking_mode(
    enable_thinking: bool | None, dropped: Mapping[str, int], tokenizer: Path
) -> None:
    rows = [
        {"prompt": "1 + 1?", "chosen": "<think>\nI add.\n</think>\n\n2", "rejected": "3"},
        {"prompt": "1 + 1?", "chosen": "2", "rejected": "3"},
    ]
    settings = {"template": "qwen3", "enable_thinking": enable_thinking}
    manifest, _ = preprocess(tokenizer, rows, **settings)
    assert dict(manifest.dropped) == dropped


def test_each_side_is_truncated_on_its_own() -> None:
    pair = (example(9, 4), example(5, 4, 8))
    fitted = fit(pair, 6, must_truncate=True)
    assert not isinstance(fitted, str)
    assert [len(side.token_ids) for side in fitted] == [6, 5]
    assert fit(pair, 6, must_truncate=False) == "too_long"
    assert fit(pair, 9, must_truncate=False) is pair


@pytest.mark.parametrize(
    ("pair", "reason"),
    [
        ((example(9, 6), example(8, 6, 8)), "prompt_too_long"),
        ((example(9, 4), example(8, 4)), "equal_answers"),  # equal after truncation
        ((example(9, 4), example(8, 3)), "different_prompts"),
        ((example(4, 4), example(5, 4)), "nothing_to_learn"),
    ],
)
def test_a_pair_that_cannot_be_trained_on_has_a_reason(
    pair: tuple[RenderedExample, ...], reason: str
) -> None:
    assert fit(pair, 6, must_truncate=True) == reason


# --- files ---


def test_dropped_pairs_are_counted_by_reason(tokenizer: Path) -> None:
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        {"prompt": "a", "chosen": "", "rejected": "c"},
        {"prompt": "a" * 100, "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b" * 100, "rejected": "c"},
    ]
    manifest, _ = preprocess(tokenizer, rows, seq_length=100)
    assert (manifest.kind, manifest.num_examples) == ("pairs", 1)
    assert dict(manifest.dropped) == {
        "empty_answer": 1,
        "equal_answers": 1,
        "prompt_too_long": 1,
        "too_long": 1,
    }
    manifest, _ = preprocess(tokenizer, rows, seq_length=100, too_long="truncate")
    assert (manifest.num_examples, manifest.truncated) == (2, 1)


def test_pairs_have_the_files_of_mindspeed_and_their_numbers(tokenizer: Path) -> None:
    rows = [
        {"prompt": "a", "chosen": "bb", "rejected": "c", "margin": 0.5, "weight": 2.0},
        {"prompt": "d", "chosen": "e", "rejected": "f"},
    ]
    manifest, prefix = preprocess(tokenizer, rows)
    for key in ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels"):
        assert len(IndexedReader(f"{prefix}_packed_{key}_document")) == 2
    data = PreferenceDataset(prefix, "pairs")
    assert [data.values(i) for i in range(2)] == [(0.5, 2.0), (0.0, 1.0)]
    chosen, rejected = data[0].sides
    decode = make_tokenizer().decode
    assert [decode(side.token_ids[side.loss_mask]) for side in (chosen, rejected)] == [
        "bb<|im_end|>",
        "c<|im_end|>",
    ]
    assert manifest.num_tokens == sum(len(s.token_ids) for i in range(2) for s in data[i].sides)


def test_pairs_of_mindspeed_without_numbers_have_no_margin(tokenizer: Path) -> None:
    _, prefix = preprocess(tokenizer, [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    for path in Path(prefix).parent.glob("data_packed_values*"):
        path.unlink()
    Path(f"{prefix}_manifest.json").unlink()
    assert PreferenceDataset(prefix, "pairs").values(0) == (0.0, 1.0)


def test_preference_data_is_no_data_of_train_sft(tokenizer: Path) -> None:
    _, prefix = preprocess(
        tokenizer, [{"prompt": "a", "completion": "b", "label": False}], handler="labeled"
    )
    with pytest.raises(MsrlError, match=mentions("labeled", "sft")):
        SftDataset(prefix)
    with pytest.raises(MsrlError, match=mentions("labeled", "pairs")):
        PreferenceDataset(prefix, "pairs")


REAL = [
    pytest.param(
        "dpo_en_demo.json",
        "SharegptStylePairwiseHandler",
        {},
        "pairs",
        300,
        marks=pytest.mark.full,
    ),
    ("kto_en_demo.json", "labeled", {}, "labeled", 300),
    (
        "stack_exchange_paired_tiny.json",
        "pairs",
        {"chosen": "response_j", "rejected": "response_k"},
        "pairs",
        25,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "handler", "map_keys", "kind", "count"), REAL)
def test_real_preference_data_is_preprocessed_completely(
    name: str, handler: str, map_keys: dict[str, str], kind: str, count: int, tmp_path: Path
) -> None:
    section = {
        "input": [str(shared_data("sft", name))],
        "tokenizer": str(shared_data("tokenizers", "qwen2.5-0.5b-instruct")),
        "handler": handler,
        "map_keys": map_keys,
        "template": "qwen",
        "output_prefix": str(tmp_path / "x"),
    }
    manifest = run(Config.model_validate({"preprocess": section}, strict=False))
    data = PreferenceDataset(tmp_path / "x", kind)
    assert (manifest.num_examples, len(data), manifest.dropped) == (count, count, {})
    for number in (0, count // 2, count - 1):
        row = data[number]
        assert len(row.sides) == (2 if kind == "pairs" else 1)
        assert all(side.loss_mask[1:].any() for side in row.sides)


# --- rows to train on ---


def config(prefix: str, **data: Any) -> Config:
    return Config.model_validate({"data": {"train": prefix, **data}}, strict=False)


def test_long_sides_are_refused_dropped_or_truncated_when_rows_are_opened(tokenizer: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b" * number, "rejected": "c"} for number in (1, 2, 30)]
    _, prefix = preprocess(tokenizer, rows)
    data = PreferenceDataset(prefix, "pairs")
    limit = max(len(side.token_ids) for side in data[1].sides)
    with pytest.raises(MsrlError, match=mentions("data.seq_length", limit, "row 2")):
        open_rows(config(prefix, seq_length=limit), data, range(3))
    dropped = open_rows(config(prefix, seq_length=limit, too_long="drop"), data, range(3))
    assert (len(dropped), dict(dropped.dropped)) == (2, {"too_long": 1})
    truncated = open_rows(config(prefix, seq_length=limit, too_long="truncate"), data, range(3))
    assert (len(truncated), truncated.num_truncated) == (3, 1)
    assert max(len(side.token_ids) for side in truncated.examples(2).sides) == limit
    assert_mentions("\n".join(truncated.notes()), "1", "truncated")


def test_packed_rows_hold_whole_pairs_and_every_pair_once(tokenizer: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b" * (1 + i % 5), "rejected": "c" * 9} for i in range(20)]
    _, prefix = preprocess(tokenizer, rows)
    data = PreferenceDataset(prefix, "pairs")
    packed = open_rows(config(prefix, pack=True, seq_length=200), data, range(20))
    assert len(packed) < 20 and packed.longest <= 400
    assert sorted(number for row in packed.members for number in row) == list(range(20))
    batch = make_batch(packed, [0, 1], 3)
    assert len(batch.rows) == 3 and batch.total_weight == batch.num_real
    assert sum(len(row) for row in batch.rows) == 2 * len(batch.examples)
    fillers = batch.examples[batch.num_real :]
    assert {example.weight for example in fillers} == {0.0}


def test_each_prompt_gets_the_answer_of_the_example_before_it() -> None:
    rows = [RenderedPreference((example(3 + i, 2, token=10 + i),), 1.0, 1.0) for i in range(3)]
    unrelated = unrelated_sides(rows, 4)
    assert [side.token_ids[2:].tolist() for side in unrelated] == [[12, 12], [10], [11, 11]]
    assert all(not side.loss_mask[:2].any() and side.loss_mask[2:].all() for side in unrelated)
