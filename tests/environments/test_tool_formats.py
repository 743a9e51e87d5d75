"""Tool formats read the calls of models, and any other text without an exception."""

from __future__ import annotations

from keyword import iskeyword
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl.config.templates import template_names
from msrl.data.rows.turns import ToolCall
from msrl.data.templates.files import load_template
from msrl.environments.base import Environment
from msrl.environments.tool_call import MalformedCall, ParsedAnswer, read_json
from msrl.environments.tools import (
    check_arguments,
    detect_format,
    run_calls,
    schema,
    tool,
    tool_format,
    tool_schemas,
)
from msrl.errors import MsrlError
from scripted_episodes import TOOL_FORMATS
from support import mentions

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
# Lone surrogates cannot come out of a tokenizer.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.builds(ToolCall, NAMES, st.dictionaries(NAMES, VALUES, max_size=4)), min_size=1, max_size=3
)
FORMATS = sorted(TOOL_FORMATS)
FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<arg_key>",
     "</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁calls▁begin｜>",
     "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
     "```json", "```", "{", "}", "[", "<function=f>", "<parameter=a>", "</parameter>",
     "</function>", "<minimax:tool_call>", '<invoke name="f">', "</invoke>", "<tool_calls>",
     "<|tool_call|>", "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>",
     "<|tool_call_end|>", "<｜DSML｜function_calls>", '<｜DSML｜invoke name="f">', "<|channel|>",
     "commentary to=functions.f", "<|message|>", "<|call|>", "[f(a=1)]", "[f(",
     "]", '{"name": "f", "arguments": {}}', '{"name": "f", "parameters": 1}', "<think>",
     "</think>", "\0", "\ud800"]
)  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_tool_format_reads_its_row(name: str):
    row = TOOL_FORMATS[name]
    assert tool_format(name).parse(row.text, ()) == ParsedAnswer(row.content, tuple(row.calls))


@pytest.mark.parametrize("name", FORMATS)
def test_a_malformed_call_has_a_problem_for_the_model(name: str):
    for text in TOOL_FORMATS[name].malformed:
        (call,) = tool_format(name).parse(text, ()).calls
        assert isinstance(call, MalformedCall) and call.problem, text


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FORMATS)
@given(text=st.lists(FRAGMENTS | st.text(max_size=20), max_size=12).map("".join))
@settings(max_examples=40, deadline=None)
def test_any_text_is_read_without_an_exception(name: str, text: str):
    parsed = tool_format(name).parse(text, ())
    assert isinstance(parsed, ParsedAnswer)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FORMATS)
@given(calls=CALLS)
@settings(max_examples=40, deadline=None)
def test_rendered_calls_are_read_back(name: str, calls: list[ToolCall]):
    calls = readable_calls(name, calls)
    parsed = tool_format(name).parse(tool_format(name).render(calls), ())
    assert [(call.name, call.arguments) for call in parsed.calls] == [
        (call.name, call.arguments) for call in calls
    ]


TEXT_FORMATS = ("glm", "qwen3_coder", "minimax")  # texts without quotes
MARKS_OF_TEXT_FORMATS = ("<", "\n", "\r")


def readable(name: str, arguments: dict) -> dict:
    """Return the arguments that a format can express.

    Formats with tags write texts as they are, so that one that is JSON becomes its value.
    """
    if name not in TEXT_FORMATS:
        return {key: value for key, value in arguments.items() if not iskeyword(key)}
    return {
        key: value
        for key, value in arguments.items()
        if not any(mark in repr(value) for mark in MARKS_OF_TEXT_FORMATS) and not is_json(value)
    }


def is_json(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        read_json(value)
    except ValueError:
        return False
    return True


def readable_calls(name: str, calls: list[ToolCall]) -> list[ToolCall]:
    return [
        ToolCall(call.name, readable(name, call.arguments))
        for call in calls
        if not iskeyword(call.name)
    ]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FORMATS)
@given(calls=CALLS)
@settings(max_examples=15, deadline=None)
def test_a_call_that_was_cut_does_not_run(name: str, calls: list[ToolCall]):
    calls = readable_calls(name, calls)
    text = tool_format(name).render(calls)
    for length in range(len(text)):
        parsed = tool_format(name).parse(text[:length], ()).calls
        complete = [call[:2] for call in parsed if isinstance(call, ToolCall)]
        assert complete == [call[:2] for call in calls[: len(complete)]], text[:length]


CUT = {
    "deepseek": [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>",
        "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"add\">\n",
        "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"add\">\n"
        "<｜DSML｜parameter name=\"a\" string=\"false\">1",
    ],
    "mistral": ["[TOOL_CALLS]add[ARGS]", "[TOOL_CALLS]add", '[TOOL_CALLS]add{"a": 1'],
    "minimax": ['<tool_calls>\n{"name": "add", "arguments": {"a": 1'],
}  # fmt: skip


@pytest.mark.parametrize(("name", "text"), [(n, text) for n in CUT for text in CUT[n]])
def test_a_cut_call_of_another_dialect_is_malformed(name: str, text: str):
    (call,) = tool_format(name).parse(text, ()).calls
    assert isinstance(call, MalformedCall)


ADD = ToolCall("add", {"a": 1, "text": "x"})
DIALECTS = [
    ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value><arg_key>text</arg_key>"
     "<arg_value>x</arg_value></tool_call>", ADD),
    ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1, "text": "x"}'
     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", ADD),
    ("deepseek", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter '
     'name="a" string="false">1</｜DSML｜parameter>\n<｜DSML｜parameter name="text" string="true">x'
     "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>", ADD),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "text": "x"}', ADD),
    ("mistral", '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1, "text": "x"}', ADD),
    ("mistral", '[TOOL_CALLS]add{"a": 1, "text": "x"}', ADD),
    ("minimax", '<tool_calls>\n{"name": "add", "arguments": {"a": 1, "text": "x"}}\n</tool_calls>',
     ADD),
    ("granite", '<tool_call> [{"name": "add", "arguments": {"a": 1, "text": "x"}}]', ADD),
    ("llama3", '<|python_start|>{"name": "add", "parameters": {"a": 1, "text": "x"}}<|python_end|>',
     ADD),
    ("llama4_pythonic", '<|python_start|>[add(a=1, text="x")]<|python_end|>', ADD),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "call"), DIALECTS)
def test_dialects_of_a_format_are_read(name: str, text: str, call: ToolCall):
    (parsed,) = tool_format(name).parse(text, ()).calls
    assert isinstance(parsed, ToolCall) and parsed[:2] == call[:2]


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in TEXT_FORMATS])
def test_the_marks_of_a_format_are_text_inside_of_a_json_string(name: str):
    text = "".join(mark for other in FORMATS for mark in TOOL_FORMATS[other].malformed[0])
    text += "</tool_call><tool_call>```<｜tool▁call▁end｜>[TOOL_CALLS]<|tool_call_end|><|call|>; "
    calls = [ToolCall("write", {"text": text}), ToolCall("stop", {})]
    parsed = tool_format(name).parse(tool_format(name).render(calls), ())
    assert [call[:2] for call in parsed.calls] == [call[:2] for call in calls]
    assert not parsed.content


def test_a_closing_tag_inside_of_an_argument_is_text():
    for name in TEXT_FORMATS:
        call = ToolCall("write", {"text": "a </tool_call> b </function> </invoke> c", "n": 1})
        (parsed,) = tool_format(name).parse(tool_format(name).render([call]), ()).calls
        assert parsed == call


@pytest.mark.parametrize("arguments", ['""', "null", '" "', "{}"])
def test_arguments_may_be_empty(arguments: str):
    text = f'<tool_call>{{"name": "stop", "arguments": {arguments}}}</tool_call>'
    assert tool_format("hermes").parse(text, ()).calls == (ToolCall("stop", {}),)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {}}}}]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob", "parameters": {}}',
        '{"name": "Bob", "parameters": {"a": 1',
        '{"name": "Bob"}',
        "{}",
        "[link(s) to follow]",
        "[see](address)",
    ],
)
def test_an_answer_that_calls_no_tool_is_text(text: str):
    for name in ("llama3", "llama4_pythonic"):
        assert tool_format(name).parse(text, TOOLS) == ParsedAnswer(text)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        ("5", {"type": ["string", "null"]}, "5"),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("True", {"type": "boolean"}, True),
        ("[1]", {"type": "array"}, [1]),
        ("five", {"type": "integer"}, "five"),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", None, 5),
    ],
)
def test_the_schema_of_a_parameter_decides_the_type_of_its_text(text, schema, value):
    properties = {} if schema is None else {"a": schema}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    for name in TEXT_FORMATS:
        call = tool_format(name).render([ToolCall("f", {"a": text})])
        assert tool_format(name).parse(call, tools).calls == (ToolCall("f", {"a": value}),), name


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", "[" * 150 + "]" * 150])
def test_a_call_with_a_value_that_json_cannot_hold_is_malformed(value: str):
    text = f'<tool_call>{{"name": "f", "arguments": {{"x": {value}}}}}</tool_call>'
    (call,) = tool_format("hermes").parse(text, ()).calls
    assert isinstance(call, MalformedCall)


def test_a_text_parameter_of_glm_stays_text():
    text = "<tool_call>f<arg_key>a</arg_key><arg_value>5</arg_value></tool_call>"
    properties = {"a": {"type": "string"}}
    tools = [{"function": {"name": "f", "parameters": {"properties": properties}}}]
    assert tool_format("glm").parse(text, tools).calls == (ToolCall("f", {"a": "5"}),)
    assert tool_format("glm").parse(text, ()).calls == (ToolCall("f", {"a": 5}),)
    anything = [{"function": {"name": "f", "parameters": {"properties": {"a": True}}}}]
    assert tool_format("glm").parse(text, anything).calls == (ToolCall("f", {"a": 5}),)


def test_a_packaged_template_with_tools_has_a_tool_format():
    for name in template_names():
        template = load_template(name)
        if template.tools:
            assert detect_format(template.tools) == "hermes", name


MARKED = {
    "hermes": '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}',
    "llama3": "<|python_tag|>",
    "deepseek": "<｜tool▁calls▁begin｜>",
    "glm": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "mistral": "[TOOL_CALLS] [",
    "qwen3_coder": "<tool_call>\n<function=example_function_name>",
    "granite": "respond with <|tool_call|> followed by a JSON list",
    "minimax": '<minimax:tool_call>\n<invoke name="tool-name-1">',
    "kimi_k2": "<|tool_calls_section_begin|>",
    "llama4_pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...)]",
    "gpt_oss": "Calls to these tools must go to the commentary channel: <|channel|>",
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_detected_in_a_chat_template(name: str):
    assert detect_format(MARKED[name]) == name
    assert detect_format("{{ messages }}") is None
    assert detect_format("[TOOL_CALLS] or <|tool_call|>") is None  # not guessed


class Shop(Environment):
    """Environment with tools of many types."""

    TOOLS = ("close_shop",)

    @tool
    def order(
        self, item: str, count: int = 1, kind: Literal["new", "old"] = "new",
        notes: list[str] | None = None,
    ) -> dict:  # fmt: skip
        """Order an item,
        and pay for it.

        Longer text.

        Args:
            item: Name of the item, as
                the list shows it.
            count (int): Number of items.

        Returns:
            Something.
        """
        return {"item": item, "count": count, "kind": kind, "notes": notes}

    def close_shop(self) -> str:
        """Close."""
        return "closed"

    def hidden(self) -> str:
        """This is no tool."""
        return ""


def test_a_schema_is_derived_from_signature_and_docstring():
    assert schema("order", Shop().order) == {
        "type": "function",
        "function": {
            "name": "order",
            "description": "Order an item, and pay for it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {
                        "type": "string",
                        "description": "Name of the item, as the list shows it.",
                    },
                    "count": {"type": "integer", "description": "Number of items.", "default": 1},
                    "kind": {"enum": ["new", "old"], "type": "string", "default": "new"},
                    "notes": {
                        "anyOf": [{"items": {"type": "string"}, "type": "array"}, {"type": "null"}],
                        "default": None,
                    },
                },
                "required": ["item"],
            },
        },
    }
    assert [entry["function"]["name"] for entry in tool_schemas(Shop())] == ["order", "close_shop"]


def test_arguments_are_converted_to_their_types():
    assert check_arguments(Shop().order, {"item": 5, "count": "2"}) == {"item": "5", "count": 2}


@pytest.mark.parametrize(
    ("call", "error", "keyword"),
    [
        ('{"name": "order", "arguments": {"item": "x"}}', None, '"count": 1'),
        ('{"name": "close_shop", "arguments": {}}', None, "closed"),
        ('{"name": "order", "arguments": {}}', "arguments", "item"),
        ('{"name": "order", "arguments": {"item": "x", "size": 1}}', "arguments", "size"),
        ('{"name": "order", "arguments": {"item": "x", "count": "many"}}', "arguments", "count"),
        ('{"name": "hidden", "arguments": {}}', "unknown", "order"),
        ('{"name": "step", "arguments": {}}', "unknown", "order"),
        ("order(1)", "malformed", "JSON"),
    ],
)
def test_a_call_is_answered_by_a_message_also_if_it_is_wrong(call, error, keyword):
    replies = run_calls(Shop(), f"Let me see.\n<tool_call>\n{call}\n</tool_call>")
    assert replies is not None
    ((message,), (record,)) = replies
    assert message.role == "tool" and keyword in message.content
    assert record["error"] == error


def test_a_start_tag_inside_of_an_argument_is_text():
    call = '<tool_call>{"name": "order", "arguments": {"item": "<think>"}}</tool_call>'
    replies = run_calls(Shop(), f"<think>Hm.</think>{call}")
    assert replies is not None and '"item": "<think>"' in replies[0][0].content


def test_an_unknown_format_is_refused_only_with_tools():
    shop, empty = Shop(), Environment()
    shop.tool_format = empty.tool_format = ""
    assert run_calls(empty, "<tool_call>") is None
    with pytest.raises(MsrlError, match=mentions("environment.tool_format", "hermes")):
        run_calls(shop, "Hello")


def test_calls_in_a_thought_do_not_run():
    call = '<tool_call>{"name": "close_shop", "arguments": {}}</tool_call>'
    assert run_calls(Shop(), f"<think>{call}</think>The answer is 5.") is None
    assert run_calls(Shop(), f"<think>{call}") is None
    assert run_calls(Shop(), f"<think>Hm.</think>{call}") is not None
    assert run_calls(Shop(), f"<think>Hm.</think>So.<think>{call}") is None
    thinking = Shop()
    thinking.opens_thought = True
    assert run_calls(thinking, f"Let me think. {call}") is None
    assert run_calls(thinking, f"Let me think.</think>{call}") is not None


@pytest.mark.parametrize(
    "call",
    [
        '{"name": "f", "parameters": {"a": 1}}',
        '{"name": "f", "arguments": {}, "a": 1}',
        '{"name": "f", "arguments": {"a": 1, "a": 2}}',
    ],
)
def test_a_call_with_a_part_that_would_be_lost_is_malformed(call: str):
    (parsed,) = tool_format("hermes").parse(f"<tool_call>{call}</tool_call>", ()).calls
    assert isinstance(parsed, MalformedCall)
