"""Rows of usual formats as conversations, and rows that are refused."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from msrl import strict_json
from msrl.data.columns import DroppedRow
from msrl.data.files.readers import RowBatch
from msrl.data.handlers import ALIASES, REFUSED, Handler, handler_mistake, make_handler
from msrl.data.tokenize import TokenizeSettings, _convert_rows
from msrl.errors import MsrlError
from msrl.types import Conversation
from support import assert_mentions, mentions, shared_data

QUESTION = {"role": "user", "content": "Weather?"}
CALLS = (
    '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
)


def handler(name: str, kind: str | None = None, **map_keys: str) -> Handler:
    return make_handler(name, kind=kind, map_keys=map_keys, options={})


def converse(name: str, row: Any, kind: str | None = None, **map_keys: str) -> Conversation:
    return handler(name, kind, **map_keys).converter()(row)


def read(name: str, rows: list[Any], kind: str | None = None, **map_keys: str) -> list[Any]:
    """Return the conversations of rows as preprocessing reads them."""
    job: Any = TokenizeSettings(handler(name, kind, **map_keys), None, None, None, False, None)  # type: ignore[arg-type]
    return _convert_rows(job, RowBatch("x.jsonl", 1, rows, lines=False)).items


def turns(conversation: Conversation) -> list[tuple[str, str]]:
    return [(m.role, m.content) for m in conversation.messages]


def shared_rows(name: str) -> list[Any]:
    return json.loads(shared_data("sft", name).read_text())


# --- preference data ---


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("dpo_en_demo.json", ("chosen", "rejected", "DPO")),
        ("kto_en_demo.json", ("label", "KTO")),
        ("stack_exchange_paired_tiny.json", ("response_j", "response_k")),
    ],
)
@pytest.mark.parametrize("reader", ["sharegpt", "alpaca", "r1", "auto"])
@pytest.mark.parametrize("kind", ["sft", "prompts"])
def test_preference_rows_are_refused_by_every_handler(
    name: str, fragments: tuple[str, ...], reader: str, kind: str
):
    rows = shared_rows(name)
    for row in (rows[0], rows[-1]):
        with pytest.raises(MsrlError) as caught:
            read(reader, [row], kind)
        assert_mentions(caught.value, "x.jsonl", *fragments)


def test_one_side_of_a_preference_pair_cannot_be_mapped_as_the_answer():
    with pytest.raises(MsrlError, match=mentions("map_keys.response=chosen", "pair")):
        handler("alpaca", prompt="prompt", response="chosen")


def test_null_columns_and_class_labels_are_no_preference_data():
    row = {"instruction": "a", "output": "b", "chosen": None, "rejected": None, "label": 3}
    assert turns(read("alpaca", [row])[0]) == [("user", "a"), ("assistant", "b")]


def test_a_label_in_text_form_is_refused():
    with pytest.raises(MsrlError, match=mentions("label=False", "KTO")):
        read("alpaca", [{"instruction": "a", "output": "b", "label": "False"}])


# --- tools and calls ---


def test_tools_are_written_in_the_form_of_openai():
    messages = [QUESTION, {"role": "assistant", "content": "?"}]
    bare = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    wrapped = [{"type": "function", "function": bare}]
    anthropic = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
    flat = {"type": "function", **bare}
    for tool in (bare, wrapped[0], anthropic, flat):
        for tools in ([tool], json.dumps([tool])):
            made = converse("sharegpt", {"messages": messages, "tools": tools})
            assert json.loads(made.extra["tools"]) == wrapped


def test_every_row_of_glaive_has_wrapped_tools():
    rows = [row for row in shared_rows("glaive_toolcall_en_demo.json") if row["tools"] != "[]"]
    assert len(rows) == 191
    for row in rows:
        made = json.loads(converse("sharegpt", row).extra["tools"])
        expected = json.loads(row["tools"])
        assert made == [{"type": "function", "function": tool} for tool in expected]


PARALLEL = [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
FORMS: dict[str, dict[str, Any]] = {
    "function_call list": {"from": "function_call", "value": json.dumps(PARALLEL)},
    "openai": {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": call} for call in PARALLEL],
    },
    "openai with arguments as text": {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "1", "function": {"name": "f", "arguments": '{"x":1}'}},
            {"id": "2", "function": {"name": "g", "arguments": ""}},
        ],
    },
    "anthropic": {
        "role": "assistant",
        "content": [
            {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
            {"type": "tool_use", "id": "2", "name": "g", "input": {}},
        ],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_parallel_calls_are_one_block_each(form: str):
    made = converse("sharegpt", {"messages": [QUESTION, FORMS[form]]})
    assert turns(made) == [("user", "Weather?"), ("assistant", CALLS)]
    fields = made.messages[1].fields
    assert fields is not None
    functions = [call["function"] for call in fields["tool_calls"]]
    assert functions == [{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]


def test_a_thought_before_a_function_call_stays_in_front_of_it():
    turn = {"from": "function_call", "value": "<think>\nhm\n</think>\n\n" + json.dumps(PARALLEL)}
    made = converse("sharegpt", {"messages": [QUESTION, turn]})
    assert made.messages[1].content == f"<think>\nhm\n</think>\n\n{CALLS}"


@pytest.mark.parametrize(
    "value", ["no JSON", "[]", '{"arguments": {}}', '{"name": "f", "arguments": 1}']
)
def test_a_function_call_without_a_call_is_refused(value: str):
    with pytest.raises(MsrlError, match=mentions("turn 2")):
        converse("sharegpt", {"messages": [QUESTION, {"from": "function_call", "value": value}]})


# --- formats ---


def test_anthropic_blocks_are_turns():
    row = {
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "sunny"},
                    {"type": "text", "text": "So?"},
                ],
            },
            {"role": "assistant", "content": "Fine."},
        ],
    }
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    assert turns(converse("auto", row)) == [
        ("system", "Be brief."),
        ("user", "Weather?"),
        ("assistant", f"<think>\nhm\n</think>\n\nI look.\n{call}"),
        ("tool", "sunny"),
        ("user", "So?"),
        ("assistant", "Fine."),
    ]


def test_images_without_a_model_that_reads_them_are_refused():
    turn = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(MsrlError, match=mentions("x.jsonl", "images", "text")):
        read("sharegpt", [{"messages": [turn, {"role": "assistant", "content": "b"}]}])


PAIR = [("user", "a"), ("assistant", "b")]
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
USUAL: dict[str, dict[str, Any]] = {
    "messages": {"messages": CHAT},
    "conversations": {
        "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    },
    "conversation": {"conversation": CHAT, "id": 3},
    "alpaca": {"instruction": "a", "input": "", "output": "b"},
    "query and response": {"query": "a", "response": "b"},
    "question and answer": {"question": "a", "answer": "b"},
    "prompt and completion": {"prompt": "a", "completion": "b"},
    "prompt and completion as turns": {"prompt": CHAT[:1], "completion": CHAT[1:]},
    "null columns": {"messages": None, "instruction": "a", "output": "b", "text": None},
    "problem and solution": {"problem": "a", "solution": "b", "level": 5},
}


def test_columns_beside_question_and_answer_are_used_or_refused():
    dolly = {"instruction": "a", "context": "c", "response": "b", "category": "x"}
    assert turns(read("auto", [dolly])[0]) == [("user", "a\nc"), ("assistant", "b")]
    orca = {"system_prompt": "s", "question": "a", "response": "b", "id": "1"}
    assert turns(read("auto", [orca])[0]) == [("system", "s"), *PAIR]
    squad = {"question": "a", "context": "c", "answer": "b"}
    with pytest.raises(MsrlError, match=mentions("context", "map-keys", "query")):
        read("auto", [squad])
    assert turns(read("auto", [{**squad, "context": ""}])[0]) == PAIR


@pytest.mark.parametrize("reader", ["sharegpt", "auto"])
def test_rows_with_images_are_refused(reader: str):
    rows = [{"messages": CHAT, "images": images} for images in ([], ["x.png"])]
    assert turns(read(reader, rows[:1])[0]) == PAIR
    with pytest.raises(MsrlError, match=mentions("images", "text")):
        read(reader, rows[1:])


@pytest.mark.parametrize("case", USUAL)
def test_auto_recognizes_usual_rows(case: str):
    assert turns(read("auto", [USUAL[case]])[0]) == PAIR


def test_auto_reads_prompts_with_a_ground_truth():
    row = {"prompt": CHAT[:1], "reward_model": {"ground_truth": "4"}, "data_source": "x"}
    made = read("auto", [row], "prompts")[0]
    assert turns(made) == [("user", "a")] and made.answer == "4"


def test_auto_refuses_unknown_rows_with_their_columns_and_the_handler_that_fits():
    with pytest.raises(MsrlError, match=mentions("x.jsonl", "columns: left, right", "map-keys")):
        read("auto", [{"left": "a", "right": "b"}])
    with pytest.raises(MsrlError, match=mentions("columns: text", "handler pretrain")):
        read("auto", [{"text": "a"}])


def test_the_wrong_handler_names_the_one_that_fits():
    with pytest.raises(MsrlError, match=mentions("'instruction'", "handler sharegpt")):
        read("alpaca", [{"messages": CHAT}])
    with pytest.raises(MsrlError, match=mentions("conversations", "handler alpaca")):
        read("sharegpt", [{"instruction": "a", "output": "b"}])


@pytest.mark.parametrize(("name", "label"), [("auto", False), ("labeled", "maybe")])
def test_a_row_with_a_label_is_not_sent_to_a_handler_of_sft(name: str, label: Any):
    row = {"prompt": "a", "completion": "b", "label": label}
    with pytest.raises(MsrlError) as caught:
        read(name, [row])
    assert "label" in str(caught.value) and "alpaca" not in str(caught.value)


# --- prompts without a ground truth ---


@pytest.mark.parametrize("name", ["r1", "alpaca"])
def test_prompts_need_no_ground_truth_if_its_column_is_mapped_to_nothing(name: str):
    made = read(name, [{"instruction": "a"}], "prompts", response="")[0]
    assert turns(made) == [("user", "a")] and made.answer is None
    with pytest.raises(MsrlError, match=mentions("'output'", "ground truth", "map-keys")):
        read(name, [{"instruction": "a"}], "prompts")
    with pytest.raises(MsrlError, match=mentions("map_keys.response", "requires")):
        handler(name, "sft", response="")


# --- handlers ---

MINDSPEED_LLM = [
    "GeneralPretrainHandler",
    "AlpacaPretrainHandler",
    "SharegptPretrainHandler",
    "StackOverflowPythonPretrainHandler",
    "LlamaFactoryInstructionHandler",
    "AlpacaStyleInstructionHandler",
    "SharegptStyleInstructionHandler",
    "OpenAIInstructionHandler",
    "HunyuanInstructionHandler",
    "AlpacaStylePairwiseHandler",
    "SharegptStylePairwiseHandler",
    "PPOAlpacaStyleInstructionHandler",
    "R1AlpacaStyleInstructionHandler",
    "R1SharegptStyleInstructionHandler",
    "GeneralInstructionHandler",
    "BelleMultiTurnInstructionHandler",
    "MOSSMultiTurnHandler",
    "MOSSInstructionHandler",
    "LeetcodePythonInstructionHandler",
]


@pytest.mark.parametrize("name", MINDSPEED_LLM)
def test_every_handler_of_mindspeed_is_an_alias_or_refused_with_a_reason(name: str):
    assert (name in ALIASES) != (name in REFUSED)
    if name in REFUSED:
        assert handler_mistake(name) == REFUSED[name]
        with pytest.raises(MsrlError, match=mentions(f"preprocess.handler={name}", "use")):
            handler(name)


def test_sharegpt_pretrain_joins_the_texts_of_the_turns():
    row = {"conversations": [{"from": "human", "value": "a "}, {"role": "gpt", "content": "b"}]}
    assert read("SharegptPretrainHandler", [row]) == ["a b"]


OWN = """
class Pairs:
    def __init__(self, prefix=""):
        self.prefix = prefix

    def conversation(self, row):
        if row["q"] == "skip":
            return None
        question = {"role": "user", "content": self.prefix + row["q"]}
        return [question, {"role": "assistant", "content": row["a"]}]

    def text(self, row):
        return row["q"]

def prompt(row):
    turns = [{"role": "user", "content": row["q"]}]
    return {"messages": turns, "answer": row["a"], "extra": {"k": "v"}}

def wrong(row):
    return {"mesages": []}
"""


def test_a_handler_of_the_user_is_a_class_or_function_in_a_file(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    row = {"q": "a", "a": "b"}
    made = make_handler(f"{file}:Pairs", kind=None, map_keys={}, options={"prefix": ">"})
    assert made.kind == "sft"
    assert turns(made.converter()(row)) == [("user", ">a"), ("assistant", "b")]
    with pytest.raises(DroppedRow, match="handler"):
        made.converter()({"q": "skip"})
    assert read(f"{file}:Pairs", [row], "pretrain") == ["a"]
    prompt = read(f"{file}:prompt", [row], "prompts")[0]
    assert (prompt.answer, prompt.extra) == ("b", {"k": "v"})


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("own.py:Pair", ("Pair", "'Pairs'")),
        ("own.py", ("own.py", "path/file.py:NAME")),
        ("absent.py:Pairs", ("absent.py", "exist")),
        ("broken.py:Pairs", ("broken.py", "Python")),
    ],
)
def test_a_handler_file_with_an_error_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fragments: tuple[str, ...]
):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    Path("broken.py").write_text("def (")
    with pytest.raises(MsrlError) as caught:
        handler(f"./{name}")
    assert_mentions(caught.value, "preprocess.handler", *fragments)


def test_an_error_in_a_handler_of_the_user_names_the_row(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    with pytest.raises(MsrlError, match=mentions("row 1", "own.py:prompt", "KeyError")):
        read(f"{file}:prompt", [{}], "prompts")
    with pytest.raises(MsrlError, match=mentions("own.py:wrong", "mesages", "messages")):
        read(f"{file}:wrong", [{}])


# --- lists of turns in other forms ---

TURN_FORMS: dict[str, Any] = {
    "JSON text": {"messages": json.dumps(CHAT)},
    "lists": {"messages": {"role": ["user", "assistant"], "content": [m["content"] for m in CHAT]}},
    "pairs": {"conversation": [{"human": CHAT[0]["content"], "assistant": CHAT[1]["content"]}]},
}


@pytest.mark.parametrize("form", TURN_FORMS)
def test_turns_in_other_forms_are_read_as_lists_of_turns(form: str):
    assert turns(read("auto", [TURN_FORMS[form]])[0]) == PAIR


def test_marks_in_other_forms_of_turns_are_honored():
    rows = [
        {"messages": json.dumps([CHAT[0], {**CHAT[1], "loss": False}])},
        {"messages": {"role": ["user", "gpt"], "content": ["a", "b"], "loss": [None, False]}},
        {"conversation": [{"human": "a", "assistant": "b", "loss": False}]},
    ]
    for row in rows:
        assert not read("auto", [row])[0].messages[-1].is_trained


def test_an_answer_that_looks_like_turns_stays_text():
    text = json.dumps(CHAT)
    assert read("auto", [{"question": "q", "answer": text}])[0].messages[-1].content == text


@pytest.mark.parametrize("truth", [{"answer": "4"}, {"reward_model": {"ground_truth": "4"}}])
def test_auto_reads_the_ground_truth_beside_turns_that_end_with_a_question(truth: Any):
    made = read("auto", [{"messages": CHAT[:1], **truth}], "prompts")[0]
    assert turns(made) == PAIR[:1] and made.answer == "4"


def test_an_answer_in_turns_and_another_ground_truth_are_refused_together():
    with pytest.raises(MsrlError, match=mentions("messages", "ground_truth", "--ignore")):
        read("auto", [{"messages": CHAT, "ground_truth": "5"}], "prompts")


# --- JSON ---


@pytest.mark.parametrize(
    "line",
    [
        '{"question": "q", "answer": "1", "answer": "2"}',
        '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
    ],
)
def test_a_key_that_an_object_has_twice_is_refused(line: str):
    batch = RowBatch("x.jsonl", 3, [line.encode()], lines=True)
    with pytest.raises(MsrlError, match=mentions("x.jsonl:3", "more than once")):
        list(batch.values())


def test_a_key_that_a_large_object_has_twice_is_found_in_one_pass():
    pairs = [(str(number), 0) for number in range(300_000)]
    start = time.process_time()
    with pytest.raises(ValueError, match="'299999' more than once"):
        strict_json.unique_keys([*pairs, pairs[-1]])
    assert time.process_time() - start < 10


def test_arguments_with_a_key_twice_are_refused():
    call = {"function": {"name": "f", "arguments": '{"a": 1, "a": 2}'}}
    row = {"messages": [QUESTION, {"role": "assistant", "tool_calls": [call]}]}
    with pytest.raises(MsrlError, match=mentions("arguments", "'a' more than once")):
        read("auto", [row])


def test_a_missing_value_of_pandas_is_no_answer():
    with pytest.raises(MsrlError, match=mentions("known format", "answer")):
        read("auto", [{"question": "q", "answer": float("nan")}])


def test_different_calls_in_tool_calls_and_function_call_are_refused():
    calls = {"tool_calls": [{"function": {"name": "f"}}], "function_call": {"name": "g"}}
    row = {"messages": [QUESTION, {"role": "assistant", "content": "", **calls}]}
    with pytest.raises(MsrlError, match=mentions("turn 2", "tool_calls and function_call")):
        read("auto", [row])
    same = {**calls, "function_call": {"name": "f", "arguments": "{}"}}
    row = {"messages": [QUESTION, {"role": "assistant", "content": "", **same}]}
    assert read("auto", [row])[0].messages[-1].content.count("<tool_call>") == 1


# --- one turn, one meaning ---

CALL = {"id": "c1", "function": {"name": "f", "arguments": {"a": 1}}}
OTHER_CALL = {"id": "c2", "function": {"name": "g", "arguments": {}}}
TWO_VALUES: dict[str, dict[str, Any]] = {
    "role": {"from": "gpt", "role": "user", "content": "a"},
    "content": {"role": "assistant", "content": "a", "value": "b"},
    "arguments and parameters": {
        "role": "assistant",
        "tool_calls": [{"name": "f", "arguments": {"a": 1}, "parameters": {"a": 2}}],
    },
    "reasoning_content and content": {
        "role": "assistant", "content": "<think>x</think>a", "reasoning_content": "y"},
    "thinking and content": {
        "role": "assistant", "thinking": "y",
        "content": [{"type": "thinking", "thinking": "x"}, {"type": "text", "text": "a"}]},
    "reasoning and content": {
        "from": "function_call", "reasoning": "y",
        "value": '<think>x</think>{"name": "f", "arguments": {}}'},
    "<tool_call>": {
        "role": "assistant", "tool_calls": [CALL],
        "content": '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'},
}  # fmt: skip


@pytest.mark.parametrize("keyword", TWO_VALUES)
def test_two_spellings_of_one_part_of_a_turn_must_agree(keyword: str):
    with pytest.raises(MsrlError, match=mentions("turn 2", keyword)):
        read("auto", [{"messages": [QUESTION, TWO_VALUES[keyword]]}])


def test_equal_spellings_of_a_thought_are_one_thought():
    turn = {"role": "assistant", "content": "<think>\ny\n</think>\n\na", "reasoning_content": "y"}
    message = read("auto", [{"messages": [QUESTION, turn]}])[0].messages[-1]
    assert message.content == "<think>\ny\n</think>\n\na"


def test_a_separate_thought_cannot_contain_its_end():
    turn = {"role": "assistant", "content": "a", "reasoning_content": "use </think> here"}
    with pytest.raises(MsrlError, match=mentions("turn 2", "reasoning_content", "</think>")):
        read("auto", [{"messages": [QUESTION, turn]}])


ORDERS = (
    ("assistant", [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "t"}]),
    ("assistant", [{"type": "tool_use", "name": "f", "input": {}}, {"type": "text", "text": "a"}]),
    ("user", [{"type": "text", "text": "a"}, {"type": "tool_result", "content": "r"}]),
)


@pytest.mark.parametrize(("role", "blocks"), ORDERS)
def test_blocks_whose_order_would_be_lost_are_refused(role: str, blocks: list[Any]):
    with pytest.raises(MsrlError, match=mentions("turn 2", blocks[0]["type"], blocks[1]["type"])):
        read("auto", [{"messages": [QUESTION, {"role": role, "content": blocks}]}])


def results(*ids: Any) -> dict[str, Any]:
    """Return a row of two calls with results that have these ids."""
    calls = {"role": "assistant", "tool_calls": [CALL, OTHER_CALL]}
    tools = [{"role": "tool", "content": "r", "tool_call_id": id_} for id_ in ids]
    return {"messages": [QUESTION, calls, *tools, {"role": "assistant", "content": "a"}]}


@pytest.mark.parametrize("ids", [("c2", "c1"), ("c9",), ("c1", "c1"), ("c1", "c2", "c2")])
def test_results_that_do_not_follow_the_order_of_their_calls_are_refused(ids: tuple[str, ...]):
    with pytest.raises(MsrlError, match=mentions("tool_call_id=", "order")):
        read("auto", [results(*ids)])


@pytest.mark.parametrize("ids", [("c1", "c2"), ("c2",), (None, None)])
def test_results_in_the_order_of_their_calls_are_read(ids: tuple[Any, ...]):
    assert len(read("auto", [results(*ids)])[0].messages) == 3 + len(ids)


def test_numbers_as_ids_of_calls_are_read_as_text():
    calls = {"role": "assistant", "tool_calls": [{**CALL, "id": 7}]}
    tool = {"role": "tool", "content": "r", "tool_call_id": 7}
    row = {"messages": [QUESTION, calls, tool, {"role": "assistant", "content": "a"}]}
    messages = read("auto", [row])[0].messages
    assert messages[1].fields["tool_calls"][0]["id"] == messages[2].fields["tool_call_id"] == "7"


@pytest.mark.parametrize("wrapped", [True, False])
def test_parameters_of_a_tool_that_are_text_are_refused(wrapped: bool):
    function = {"name": "f", "parameters": '{"type": "object"}'}
    tool = {"type": "function", "function": function} if wrapped else function
    with pytest.raises(MsrlError, match=mentions("parameters of tool f", "object")):
        read("auto", [{"messages": CHAT, "tools": [tool]}])


# --- fields that would be lost ---


@pytest.mark.parametrize(
    ("handler", "kind", "row", "keyword"),
    [
        ("r1", "prompts", {"instruction": CHAT[:1], "output": "4", "history": [["a", "b"]]},
         "history"),
        ("r1", "prompts", {"instruction": CHAT[:1], "output": "4", "input": "x"}, "input"),
        ("labeled", None, {"messages": CHAT, "prompt": "x", "label": True}, "prompt"),
        ("labeled", None, {"messages": CHAT, "output": "x", "label": True}, "output"),
        ("steps", None, {"prompt": "a", "completions": ["b"], "labels": [True], "input": "x"},
         "input"),
        ("alpaca_pairs", None, {"instruction": "q", "output": ["a", "b", "c"]}, "output"),
        ("labeled", None, {"messages": CHAT, "label": True, "kto_tag": False}, "kto_tag"),
        ("sharegpt_pretrain", None, {"messages": [{**CHAT[1], "tool_calls": [CALL]}]},
         "tool_calls"),
        ("sharegpt_pretrain", None, {"messages": [{**CHAT[1], "thinking": "t"}]}, "thinking"),
    ],
)  # fmt: skip
def test_a_field_that_another_field_replaces_is_refused(
    handler: str, kind: str | None, row: dict[str, Any], keyword: str
):
    with pytest.raises(MsrlError, match=mentions(keyword)):
        read(handler, [row], kind)


def test_an_empty_column_does_not_hide_another_spelling():
    row = {"instruction": "a", "output": "b", "system": "", "system_prompt": "s"}
    assert read("alpaca", [row])[0].messages[0].content == "s"


def test_a_number_as_answer_keeps_its_thought():
    row = {"instruction": "a", "output": 3, "reasoning_content": "t"}
    assert read("alpaca", [row])[0].messages[-1].content == "<think>\nt\n</think>\n\n3"


TRUTHS = {"answer": "1", "ground_truth": "2", "final_answer": "3", "label": "4"}


@pytest.mark.parametrize("question", ["q", CHAT[:1]])
@pytest.mark.parametrize("name", TRUTHS)
def test_different_ground_truths_of_a_prompt_are_refused(name: str, question: Any):
    row = {"prompt": question, "reward_model": {"ground_truth": "5"}, name: TRUTHS[name]}
    with pytest.raises(MsrlError, match=mentions("reward_model.ground_truth", name, "--ignore")):
        read("auto", [row], "prompts")
    assert read("auto", [{**row, name: "5"}], "prompts")[0].answer == "5"


def test_a_reward_model_may_be_json_text():
    row = {"prompt": CHAT[:1], "reward_model": '{"ground_truth": "4"}'}
    assert read("auto", [row], "prompts")[0].answer == "4"


@pytest.mark.parametrize("prompt", ["a", CHAT[:1]])
@pytest.mark.parametrize("name", ["completion", "output", "answer"])
def test_an_answer_in_turns_is_trained_as_it_is(name: str, prompt: Any):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    turns = [
        {**call, "loss": False},
        {"role": "tool", "content": "c"},
        {"role": "assistant", "content": "b", "reasoning_content": "t"},
    ]
    row = {"prompt": prompt, name: turns}
    for handler in ("auto", "r1"):
        keys = {"prompt": "prompt", "query": "", "response": name} if handler == "r1" else {}
        messages = read(handler, [row], "sft", **keys)[0].messages
        assert [message.is_trained for message in messages] == [True, False, True, True]
        assert messages[-1].content == "<think>\nt\n</think>\n\nb"
        assert read(handler, [row], "prompts", **keys)[0].answer == "b"


@pytest.mark.parametrize("answer", ["b", CHAT[1:2]])
def test_training_refuses_turns_whose_answer_is_in_another_column(answer: Any):
    row = {"messages": CHAT[:1], "output": answer}
    with pytest.raises(MsrlError, match=mentions("messages", "output", "--handler r1")):
        read("auto", [row])
    assert read("auto", [row], "prompts")[0].answer == "b"
