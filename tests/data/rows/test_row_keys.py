"""Keys of rows and turns: honored, refused by name, or reported as not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from msrl.data.files.readers import RowBatch
from msrl.data.handlers import make_handler
from msrl.data.render import Renderer, make_renderer
from msrl.data.rows.keys import MARKS, MEANINGS, THOUGHTS, meaning_of
from msrl.data.templates.files import load_template
from msrl.data.tokenize import TokenizeSettings, _convert_rows
from msrl.data.tokenizer import open_tokenizer
from msrl.errors import MsrlError
from msrl.types import Conversation, PreferenceRow
from support import ROOT, mentions, shared_data

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ROWS: dict[str, dict[str, Any]] = {
    "sharegpt": {"messages": CHAT},
    "alpaca": {"instruction": "a", "output": "b"},
    "r1": {"instruction": "a", "output": "b"},
    "gsm8k": {"question": "a", "answer": "b #### 4"},
    "auto": {"question": "a", "answer": "b"},
    "pairs": {"prompt": "a", "chosen": "b", "rejected": "c"},
    "sharegpt_pairs": {"messages": CHAT[:1], "chosen": CHAT[1], "rejected": "c"},
    "alpaca_pairs": {"instruction": "a", "chosen": "b", "rejected": "c"},
    "labeled": {"prompt": "a", "completion": "b", "label": True},
    "steps": {"prompt": "a", "completions": ["b"], "labels": [True]},
    "pretrain": {"text": "a"},
}


def read(
    name: str,
    row: Any,
    kind: str | None = None,
    *,
    keep: tuple[str, ...] = (),
    ignore: tuple[str, ...] = (),
    **map_keys: str,
) -> tuple[Any, dict[str, int]]:
    """Return a row as preprocessing reads it, and the counts of keys that nothing read."""
    handler = make_handler(name, kind=kind, map_keys=map_keys, options={})
    job: Any = TokenizeSettings(
        handler, None, None, None, False, None, None, keep, frozenset(ignore)
    )  # type: ignore[arg-type]
    rows = _convert_rows(job, RowBatch("x.jsonl", 1, [row], lines=False))
    return (rows.items or [rows.dropped])[0], dict(rows.unread)


def answer(**keys: Any) -> dict[str, Any]:
    """Return a row of two answers, the first with keys."""
    return {"messages": [CHAT[0], {**CHAT[1], **keys}, CHAT[0], CHAT[1]]}


# --- keys with a meaning ---

WITH_WEIGHTS = ("pairs", "sharegpt_pairs", "alpaca_pairs", "labeled")
MASKS: dict[str, Any] = {
    "loss_mask": [0, 1], "lossMask": 0, "LOSS-MASK": "0,1", "completion_mask": [1, 1],
    "assistant_masks": [0, 1], "weight": 0.5, "sample_weight": 2, "train": False,
    "is_trained": 0, "trainOnTurn": "no", "loss_scale": 0.5,
}  # fmt: skip


@pytest.mark.sample(16)
@pytest.mark.parametrize("handler", [name for name in ROWS if name not in WITH_WEIGHTS])
@pytest.mark.parametrize("key", MASKS)
def test_a_column_that_masks_or_weights_a_row_is_refused_by_every_handler(handler: str, key: str):
    with pytest.raises(MsrlError, match=mentions("x.jsonl", key, "--ignore")):
        read(handler, {**ROWS[handler], key: MASKS[key]})
    read(handler, {**ROWS[handler], key: MASKS[key]}, ignore=(key,))


MEANT: dict[str, Any] = {
    "system_message": "s", "SystemPrompt2": "s", "available_tools": [{"name": "f"}],
    "options": ["x", "y"], "choices": {"text": ["x"]}, "A": "x", "thought": "t",
    "deepseek_reasoning": "t", "Complex_CoT": "t", "images": ["x.png"], "image_path": "x",
    "context": "c", "Passages": ["c"], "history_": [["q", "r"]], "is_correct": False,
    "correctness": 0, "answer_is_wrong": True, "label": 0, "kto_tag": "true",
    "rejected_response": "c", "chosen": "c", "chat_template_kwargs": {"enable_thinking": False},
    "enable_thinking": False, "reasoning_effort": "low", "teacher_prompt": "t",
    "input_ids": [1, 2], "segments": [{"label": True, "text": "a"}],
}  # fmt: skip


@pytest.mark.sample(16)
@pytest.mark.parametrize("handler", ["sharegpt", "alpaca", "auto"])
@pytest.mark.parametrize("key", MEANT)
def test_a_column_that_decides_what_is_shown_or_trained_is_refused_by_name(handler: str, key: str):
    if handler == "alpaca" and key == "history_":
        pytest.skip("read by the handler as history")
    with pytest.raises(MsrlError, match=mentions("x.jsonl:", key)):
        read(handler, {**ROWS[handler], key: MEANT[key]})
    item, unread = read(handler, {**ROWS[handler], key: MEANT[key]}, ignore=(key,))
    assert [m.content for m in item.messages] == ["a", "b"] and not unread


@pytest.mark.parametrize(
    "row",
    [
        {"weight": 1, "loss": True, "is_correct": True, "label": "positive", "options": []},
        {"images": None, "system_prompt": "", "rejected_response": None, "verified": "yes"},
        {"parallel_tool_calls": True, "tools_kwargs": {"a": 1}, "image_id": 3, "train_split": "x"},
        {"reasoning_tokens": 12, "correct_answer": "no", "source": "web"},
    ],
)
def test_values_that_say_nothing_and_names_of_descriptions_are_not_refused(row: dict[str, Any]):
    item, unread = read("sharegpt", {**ROWS["sharegpt"], **row})
    assert isinstance(item, Conversation)
    assert set(unread) == {key for key, value in row.items() if value not in (None, "", [])}


def test_all_keys_with_a_meaning_are_named_in_one_message():
    row = {**ROWS["alpaca"], "loss_mask": [1], "options": ["x"], "is_correct": False}
    with pytest.raises(MsrlError, match=mentions("loss_mask", "options", "is_correct=False")):
        read("alpaca", row)


@pytest.mark.parametrize(
    ("key", "value"), [("finish_reason", "length"), ("stop_reason", "max_tokens"),
                       ("is_truncated", True)]
)  # fmt: skip
def test_a_truncated_answer_is_refused_in_rows_and_turns(key: str, value: Any):
    for row in ({"messages": CHAT, key: value}, answer(**{key: value})):
        with pytest.raises(MsrlError, match=mentions(key, "truncated")):
            read("auto", row)
    read("auto", answer(finish_reason="stop", is_truncated=False))


def test_every_spelling_has_the_meaning_of_its_class():
    for meaning in MEANINGS:
        for key in meaning.keys:
            plural = key if key.endswith("s") else f"{key}s"
            for spelling in (key, key.upper(), key.replace("_", "-"), plural):
                if len(key) > 1:
                    assert meaning_of(spelling) is not None, spelling


def test_the_table_of_the_documentation_has_all_keys_and_words():
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    table = page.partition("### Keys")[2].partition("###")[0]
    names = {key for meaning in MEANINGS for key in meaning.keys} | {*MARKS, *THOUGHTS}
    assert [key for key in sorted(names) if f"`{key}`" not in table] == []
    words = {word for meaning in MEANINGS for word in meaning.words}
    assert [word for word in sorted(words) if word not in table] == []


# --- masks of turns ---


@pytest.fixture(scope="module")
def renderers() -> dict[str, Renderer]:
    tokenizer = open_tokenizer(str(shared_data("tokenizers", "qwen2.5-0.5b-instruct")))
    return {name: make_renderer(load_template(name), tokenizer) for name in ("qwen", "native")}


@pytest.mark.sample(16)
@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("value", [False, 0, 0.0])
@pytest.mark.parametrize("template", ["qwen", "native"])
def test_an_answer_that_a_mark_excludes_is_context_only(
    renderers: dict[str, Renderer], name: str, value: Any, template: str
):
    masked, _ = read("sharegpt", answer(**{name: value}))
    plain, _ = read("sharegpt", answer(**{name: 1}))
    a, b = renderers[template].examples([masked, plain])
    assert a.token_ids.tolist() == b.token_ids.tolist()
    answers = b.loss_mask.nonzero()[0]
    assert a.loss_mask.nonzero()[0].tolist() == answers[len(answers) // 2 :].tolist()


@pytest.mark.sample(12)
@pytest.mark.parametrize("value", [0.5, 2, "false", "x", [0, 1]])
@pytest.mark.parametrize("name", MARKS)
def test_a_mark_that_is_neither_true_nor_false_is_refused(name: str, value: Any):
    with pytest.raises(MsrlError, match=mentions("turn 2", name, "--ignore")):
        read("sharegpt", answer(**{name: value}))


def test_marks_of_a_turn_and_its_blocks_must_agree():
    parts = [{"type": "text", "text": "b", "train": False}, {"type": "text", "text": "c"}]
    with pytest.raises(MsrlError, match=mentions("turn 2", "train=false", "completely")):
        read("sharegpt", answer(content=parts))
    with pytest.raises(MsrlError, match=mentions("turn 2", "loss=true", "weight=false")):
        read("sharegpt", answer(loss=True, weight=0))
    both = [{**part, "train": False} for part in parts]
    assert not read("sharegpt", answer(content=both))[0].messages[1].is_trained
    assert not read("sharegpt", answer(content=both[:1], loss=False))[0].messages[1].is_trained


def test_a_mark_that_trains_a_question_is_refused():
    row = {"messages": [{**CHAT[0], "training": True}, CHAT[1]]}
    with pytest.raises(MsrlError, match=mentions("turn 1", "training", "answers")):
        read("sharegpt", row)
    harmless = {"messages": [{**CHAT[0], "training": False, "weight": 1.0}, CHAT[1]]}
    assert isinstance(read("sharegpt", harmless)[0], Conversation)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lossMaskOfWords", [0, 1]), ("train_detail", [{"begin_offset": 0}]), ("mask", 1),
        ("no_loss", True), ("is_correct", False), ("images", ["x"]), ("rejected_text", "c"),
        ("channel", "analysis"), ("recipient", "browser"), ("end_turn", False), ("prefix", True),
        ("partial", True), ("refusal", "I cannot."), ("scratchpad", "t"), ("system_note", "s"),
    ],
)  # fmt: skip
def test_a_key_of_a_turn_with_a_meaning_is_refused_by_name(key: str, value: Any):
    for handler, row in (
        ("sharegpt", answer(**{key: value})),
        ("auto", answer(**{key: value})),
        ("pairs", {**ROWS["pairs"], "chosen": [{**CHAT[1], key: value}]}),
    ):
        with pytest.raises(MsrlError, match=mentions("x.jsonl", key)):
            read(handler, row)
        read(handler, row, ignore=(key,))


def test_the_last_answer_of_preference_data_must_be_trained():
    with pytest.raises(MsrlError, match=mentions("last answer")):
        read("pairs", {**ROWS["pairs"], "chosen": [{**CHAT[1], "loss": False}]})


@pytest.mark.parametrize("key", THOUGHTS)
def test_thoughts_are_read_under_all_usual_names(key: str):
    message = read("sharegpt", answer(**{key: "t"}))[0].messages[1]
    assert (message.fields or {})["reasoning_content"] == "t"


def test_reasoning_details_are_a_thought_if_all_are_text():
    details = [{"type": "reasoning.text", "text": text, "format": "x"} for text in ("t", "u")]
    message = read("sharegpt", answer(reasoning_details=details, reasoning="tu"))[0].messages[1]
    assert (message.fields or {})["reasoning_content"] == "tu"
    with pytest.raises(MsrlError, match=mentions("turn 2", "different thoughts")):
        read("sharegpt", answer(reasoning_details=details, reasoning="other"))
    with pytest.raises(MsrlError, match=mentions("reasoning_details", "encrypted")):
        read("sharegpt", answer(reasoning_details=[{"type": "reasoning.encrypted", "data": "x"}]))


@pytest.mark.parametrize("role", ["user", "system"])
def test_a_thought_or_call_of_a_turn_that_is_no_answer_is_refused(role: str):
    for extra in ({"reasoning": "t"}, {"tool_calls": [{"function": {"name": "f"}}]}):
        with pytest.raises(MsrlError, match=mentions("turn 1", role)):
            read("sharegpt", {"messages": [{"role": role, "content": "a", **extra}, *CHAT]})


# --- tool calls ---


@pytest.mark.parametrize("arguments", ["", None, "null", {}, "{}"])
def test_a_call_without_arguments_has_empty_ones(arguments: Any):
    call = {"function": {"name": "f", "arguments": arguments}}
    message = read("sharegpt", answer(content="", tool_calls=[call]))[0].messages[1]
    assert json.loads(message.content.split("\n")[1]) == {"name": "f", "arguments": {}}


@pytest.mark.parametrize("key", ["parameters", "input", "args", "kwargs"])
def test_arguments_are_read_under_all_usual_names_and_unknown_parts_are_refused(key: str):
    call = {"name": "f", key: {"x": 1}}
    message = read("sharegpt", answer(content="", tool_calls=[call]))[0].messages[1]
    assert '"arguments": {"x": 1}' in message.content
    with pytest.raises(MsrlError, match=mentions("turn 2", "params")):
        read("sharegpt", answer(content="", tool_calls=[{"name": "f", "params": {"x": 1}}]))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_lacks_are_refused_in_arguments(number: str):
    text = f'{{"x": {number}}}'
    for arguments in (text, json.loads(text)):
        call = {"function": {"name": "f", "arguments": arguments}}
        with pytest.raises(MsrlError, match=mentions("turn 2", "NaN", "arguments")):
            read("sharegpt", answer(content="", tool_calls=[call]))


# --- system texts, tools, several columns ---


@pytest.mark.parametrize("handler", ["sharegpt", "auto", "pairs", "labeled", "r1"])
def test_a_system_column_beside_another_system_turn_is_refused(handler: str):
    own = {"role": "system", "content": "own"}
    rows: dict[str, dict[str, Any]] = {
        "sharegpt": {"messages": [own, *CHAT]},
        "auto": {"messages": [own, *CHAT]},
        "pairs": {**ROWS["pairs"], "prompt": [own, CHAT[0]]},
        "labeled": {"messages": [own, *CHAT], "label": 1},
        "r1": {"instruction": [own, CHAT[0]], "output": "b"},
    }
    for name in ("system", "system_prompt"):
        with pytest.raises(MsrlError, match=mentions("system", "turns")):
            read(handler, {**rows[handler], name: "other"})
        item, _ = read(handler, {**rows[handler], name: "own"})
        side = item.conversations[0] if isinstance(item, PreferenceRow) else item
        assert [m.content for m in side.messages if m.role == "system"] == ["own"]


@pytest.mark.parametrize("handler", ["sharegpt", "alpaca", "r1", "auto", "pairs", "alpaca_pairs"])
@pytest.mark.parametrize("name", ["tools", "functions"])
def test_tools_are_shown_with_every_handler_of_conversations(handler: str, name: str):
    item, unread = read(handler, {**ROWS[handler], name: [{"name": "f"}]})
    side = item.conversations[0] if isinstance(item, PreferenceRow) else item
    assert json.loads(side.extra["tools"])[0]["function"] == {"name": "f"} and not unread


def test_auto_refuses_a_row_that_can_be_read_in_several_ways():
    row = {"problem": "a", "solution": "long", "answer": "42"}
    with pytest.raises(MsrlError, match=mentions("solution", "answer", "--ignore")):
        read("auto", row)
    item, unread = read("auto", row, "prompts")
    assert item.answer == "42" and unread == {"solution": 1}
    with pytest.raises(MsrlError, match=mentions("question", "prompt")):
        read("auto", {"question": "a", "prompt": "b", "answer": "c"})
    with pytest.raises(MsrlError, match=mentions("messages", "conversations")):
        read("auto", {"messages": CHAT, "conversations": [*CHAT, *CHAT]})
    with pytest.raises(MsrlError, match=mentions("conversations and messages", "map-keys")):
        read("sharegpt", {"messages": CHAT, "conversations": [*CHAT, *CHAT]})


@pytest.mark.parametrize("value", [42, "42"])
def test_auto_reads_numbers_and_labels_as_ground_truths(value: Any):
    for name in ("answer", "ground_truth", "label"):
        item, _ = read("auto", {"question": "a", name: value}, "prompts")
        assert item.answer == "42"
    with pytest.raises(MsrlError, match=mentions("label", "KTO")):
        read("auto", {"prompt": CHAT[:1], "label": 1}, "prompts")


@pytest.mark.parametrize("name", ["answer", "solution", "ground_truth", "final_answer", "output"])
@pytest.mark.parametrize("value", ["0", "1", 1])
def test_a_label_that_repeats_the_ground_truth_is_no_truth_value(name: str, value: Any):
    for handler in ("auto", "r1"):
        keys = {"prompt": "question", "query": "", "response": name} if handler == "r1" else {}
        row = {"question": "a", name: "1" if value == 1 else value, "label": value}
        item, _ = read(handler, row, "prompts", **keys)
        assert item.answer == str(value)
        with pytest.raises(MsrlError, match=mentions("label", "KTO")):
            read(handler, {**row, "label": True}, "prompts", **keys)
    with pytest.raises(MsrlError, match=mentions("label")):
        read("r1", {"question": "a", name: "7", "label": value}, "prompts", **keys)


@pytest.mark.parametrize("label", [True, 1, "1", "true", 1.0])
def test_labels_are_truth_values_in_every_form(label: Any):
    row = {"prompt": "a", "completion": "b"}
    assert read("labeled", {**row, "label": label})[0].value == 1.0
    with pytest.raises(MsrlError, match=mentions("label", "KTO")):
        read("auto", {**row, "label": label})


def test_a_thought_in_a_column_is_trained_if_it_is_named():
    row = {"instruction": "a", "output": "b", "Complex_CoT": "t"}
    item, _ = read("alpaca", row, thought="Complex_CoT")
    assert (item.messages[-1].fields or {})["reasoning_content"] == "t"
    item, _ = read("alpaca", {"instruction": "a", "output": "b", "reasoning_content": "t"})
    assert "<think>\nt\n</think>" in item.messages[-1].content


def test_a_prompt_that_ends_with_an_answer_is_refused():
    row = {"prompt": CHAT, "reward_model": {"ground_truth": "4"}}
    with pytest.raises(MsrlError, match=mentions("prompt", "last turn")):
        read("auto", row, "prompts")


def test_turns_that_end_with_a_tool_response_wait_for_an_answer():
    calls = [{"function": {"name": "f", "arguments": {}}}]
    turns = [CHAT[0], {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "r"}]
    item, _ = read("auto", {"messages": turns, "answer": "4"}, "prompts")
    assert item.answer == "4" and item.messages[-1].role == "tool"
    with pytest.raises(MsrlError, match=mentions("messages", "answer", "--ignore answer")):
        read("auto", {"messages": turns, "answer": "4"}, "sft")


def test_a_row_of_unknown_format_shows_which_columns_are_empty():
    for value in (None, float("nan")):
        with pytest.raises(MsrlError, match=mentions("question", "answer (empty)")):
            read("auto", {"question": "a", "answer": value})


# --- unread columns ---


def test_unread_keys_of_rows_turns_and_blocks_are_counted():
    blocks = [{"type": "text", "text": "b", "citations": ["c"], "cache_control": {"a": 1}}]
    row = {**answer(timestamp=3, content=blocks), "source": "web", "empty": None}
    _, unread = read("sharegpt", row)
    expected = {"source": 1, "timestamp of turns": 1, "citations of content blocks": 1}
    assert unread == expected


def test_unread_columns_are_kept_as_extra_on_request():
    row = {"instruction": "a", "output": "4", "level": 3, "tag": {"x": [1]}, "source": "web"}
    item, unread = read("r1", row, keep=("all",))
    assert item.extra == {"level": "3", "tag": '{"x": [1]}', "source": "web"} and not unread
    item, unread = read("r1", row, keep=("level",))
    assert item.extra == {"level": "3"} and unread == {"tag": 1, "source": 1}
    mapped, _ = read("r1", row, **{"extra.level": "level", "extra.none": "tag.x"})
    assert mapped.extra == {"level": "3", "none": "[1]"}


def test_a_kept_column_may_have_a_meaning_but_not_all_columns():
    row = {"instruction": "a", "output": "4", "loss_mask": [1]}
    assert read("r1", row, keep=("loss_mask",))[0].extra == {"loss_mask": "[1]"}
    with pytest.raises(MsrlError, match=mentions("loss_mask")):
        read("r1", row, keep=("all",))


def test_all_missing_columns_are_named_in_one_message():
    message = mentions("'instruction'", "'output'", "map-keys", '"prompt"', '"response"')
    with pytest.raises(MsrlError, match=message):
        read("alpaca", {"q": "a"})
    with pytest.raises(MsrlError, match=mentions("'x'", "'y'")):
        read("alpaca", {"q": "a"}, prompt="x", query="y", response="q")


def test_turns_of_own_handlers_have_the_same_keys(tmp_path: Path):
    path = tmp_path / "own.py"
    path.write_text("def rows(row):\n    return row['messages']\n")
    assert not read(f"{path}:rows", answer(loss=0))[0].messages[1].is_trained
    with pytest.raises(MsrlError, match=mentions("turn 2", "train_detail")):
        read(f"{path}:rows", answer(train_detail=[1]))


# --- formats of ms-swift ---


def test_pairs_of_ms_swift_are_read():
    question, chosen = CHAT
    rejected = {"role": "assistant", "content": "c"}
    for side in (
        {"rejected_response": "c"},
        {"rejected_response": [rejected]},
        {"rejected_messages": [question, rejected]},
        {"chosen": chosen, "rejected": "c"},
    ):
        turns = [question] if "chosen" in side else [question, chosen]
        item, unread = read("sharegpt_pairs", {"messages": turns, **side})
        texts = [[m.content for m in c.messages] for c in item.conversations]
        assert texts == [["a", "b"], ["a", "c"]] and not unread
    with pytest.raises(MsrlError, match=mentions("chosen", "map-keys")):
        read("sharegpt_pairs", {"messages": [question], "rejected_response": "c"})
    with pytest.raises(MsrlError, match=mentions("rejected", "rejected_response")):
        read("sharegpt_pairs", {"messages": CHAT, "rejected": "c", "rejected_response": "d"})


def test_calls_in_turns_of_their_own_belong_to_one_answer():
    def turn(role: str, content: str) -> dict[str, Any]:
        return {"role": role, "content": content}

    calls = [json.dumps({"name": name, "arguments": {}}) for name in "fg"]
    turns = [CHAT[0], turn("assistant", "t"), *(turn("tool_call", call) for call in calls)]
    turns += [turn("tool_response", "x"), turn("tool_response", "y"), CHAT[1]]
    openai = [{"function": json.loads(call)} for call in calls]
    joined = [CHAT[0], {**turn("assistant", "t"), "tool_calls": openai}]
    joined += [turn("tool", "x"), turn("tool", "y"), CHAT[1]]
    assert read("sharegpt", {"messages": turns})[0] == read("sharegpt", {"messages": joined})[0]


def test_members_of_metadata_that_have_a_meaning_are_reported_by_name():
    metadata = {"loss_mask": [0], "index": 3, "is_correct": False, "tools": []}
    _, unread = read("sharegpt", {**ROWS["sharegpt"], "metadata": metadata})
    assert unread == {"metadata": 1, "metadata.loss_mask": 1, "metadata.is_correct": 1}


REVERSED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"score_chosen": 1.0, "score_rejected": 4.5}, {}),
    ({"chosen-rating": 3, "rejected-rating": 4}, {}),
    ({"chosenScore": "-2.5", "rejectedScore": "1e0"}, {}),
    ({"Chosen Avg Rating": 1, "Rejected Avg Rating": 2}, {}),
    ({"reward_positive": 0.1, "reward_negative": 0.2}, {}),
    ({"chosen_rank": 2, "rejected_rank": 1}, {}),
    ({"info_chosen": {"score": 1}, "info_rejected": {"score": 2}}, {}),
    (
        {
            "chosen": [*CHAT[:1], {**CHAT[1], "score": 1}],
            "rejected": [*CHAT[:1], {"role": "assistant", "content": "c", "score": 2}],
            "prompt": None,
        },
        {},
    ),
    (
        {"response_a": "b", "response_b": "c", "score_a": 1, "score_b": 2},
        {"chosen": "response_a", "rejected": "response_b"},
    ),
]


@pytest.mark.parametrize(("keys", "names"), REVERSED)
def test_a_pair_whose_scores_say_that_it_is_reversed_is_refused(
    keys: dict[str, Any], names: dict[str, str]
):
    row = {**ROWS["pairs"], **keys}
    if names:
        row = {"prompt": "a", **keys}
    with pytest.raises(MsrlError, match=mentions("chosen answer", "rejected one")):
        read("pairs", row, **names)


@pytest.mark.parametrize(
    "keys",
    [
        {"score_chosen": 4.5, "score_rejected": 1.0},
        {"score_chosen": 2, "score_rejected": 2},
        {"score_chosen": 1, "score_rejected": float("nan")},
        {"score_chosen": "low", "score_rejected": "high"},
        {"chosen_rank": 1, "rejected_rank": 2},
        {"chosen_length": 3, "rejected_length": 400},
        {"score_chosen": 1, "rating_rejected": 2},
        {"score": 1, "score_rejected": 2},
    ],
)
def test_scores_that_do_not_reverse_a_pair_are_only_counted(keys: dict[str, Any]):
    assert set(read("pairs", {**ROWS["pairs"], **keys})[1]) <= set(keys)


def test_ignored_scores_do_not_refuse_a_pair():
    row = {**ROWS["pairs"], "score_chosen": 1.0, "score_rejected": 4.5}
    assert read("pairs", row, ignore=("score_chosen",))[1] == {"score_rejected": 1}


@pytest.mark.parametrize("key", ["tie", "preference", "winner", "\uff57inner"])
def test_a_key_that_says_which_side_is_better_is_refused_in_pairs(key: str):
    with pytest.raises(MsrlError, match=mentions(f"column {key}", "better", f"--ignore {key}")):
        read("pairs", {**ROWS["pairs"], key: 2})
    assert read("pairs", {**ROWS["pairs"], key: False})[1] == {key: 1}


@pytest.mark.parametrize(
    ("handler", "key", "value"),
    [
        ("r1", "apply_chat_template_kwargs", {"enable_thinking": False}),
        ("r1", "multi_modal_inputs", {"x": 1}),
        ("sharegpt", "plugins", [{"name": "f"}]),
        ("alpaca", "desirable", False),
        ("alpaca", "endings", ["a", "b"]),
    ],
)
def test_names_of_other_systems_have_the_meaning_of_their_class(handler: str, key: str, value: Any):
    with pytest.raises(MsrlError, match=mentions(f"column {key}", f"--ignore {key}")):
        read(handler, {**ROWS[handler], key: value})


@pytest.mark.parametrize("value", [True, False, "A"])
def test_a_name_with_better_is_refused_in_pairs_whatever_its_value(value: Any):
    with pytest.raises(MsrlError, match=mentions("chosen_is_better", "--ignore")):
        read("pairs", {**ROWS["pairs"], "chosen_is_better": value})


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("functions", [{"name": "f"}], "column tools"),
        ("system_prompt", "s", "role system"),
        ("context", "c", "into the content"),
        ("rationale", "t", "reasoning_content"),
    ],
)
def test_the_remedy_for_a_key_of_a_turn_names_no_column_mapping(key: str, value: Any, remedy: str):
    with pytest.raises(MsrlError, match=mentions("turn", key, remedy)) as error:
        read("sharegpt", answer(**{key: value}))
    assert "--map-keys" not in str(error.value)


@pytest.mark.parametrize("row", [None, 3, "a", [1]])
def test_a_row_that_is_no_object_is_refused_with_its_place(row: Any):
    with pytest.raises(MsrlError, match=mentions("x.jsonl: row 1", "not an object")):
        read("auto", row)
