"""Tool formats read the calls of models, and any other text without an exception."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from msrl.config.templates import template_names
from msrl.data.templates.files import load_template
from msrl.data.turns import ToolCall
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
from scripted_episodes import TOOL_FORMATS

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
     "```json", "```", "{", "}", "[",
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


@pytest.mark.parametrize("name", FORMATS)
@given(text=st.lists(FRAGMENTS | st.text(max_size=20), max_size=12).map("".join))
@settings(max_examples=60, deadline=None)
def test_any_text_is_read_without_an_exception(name: str, text: str):
    parsed = tool_format(name).parse(text, ())
    assert isinstance(parsed, ParsedAnswer)


@pytest.mark.parametrize("name", FORMATS)
@given(calls=CALLS)
@settings(max_examples=40, deadline=None)
def test_rendered_calls_are_read_back(name: str, calls: list[ToolCall]):
    calls = [ToolCall(call.name, readable(name, call.arguments)) for call in calls]
    parsed = tool_format(name).parse(tool_format(name).render(calls), ())
    assert [(call.name, call.arguments) for call in parsed.calls] == [
        (call.name, call.arguments) for call in calls
    ]


def readable(name: str, arguments: dict) -> dict:
    """Return the arguments that a format can express: texts without its own marks.

    GLM writes texts as they are, so that one that is JSON becomes its value.
    """
    marks = ("<tool_call>", "</tool_call>", "<｜", "```", "[ARGS]", "[TOOL_CALLS]", "</arg_value>")
    return {
        key: value
        for key, value in arguments.items()
        if not any(mark in repr(value) for mark in marks) and not (name == "glm" and is_json(value))
    }


def is_json(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        read_json(value)
    except ValueError:
        return False
    return True


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
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_detected_in_a_chat_template(name: str):
    assert detect_format(MARKED[name]) == name
    assert detect_format("{{ messages }}") is None


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
