"""Scripted episodes of the built-in environments, and texts of the tool formats: one row each."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msrl.data.rows.turns import ToolCall
from support import locate


@dataclass(frozen=True, slots=True)
class Script:
    """Episode: the answers, and what the environment replies."""

    answers: Sequence[str]
    rewards: Sequence[float | None]
    texts: Sequence[str] = ()  # each occurs in the messages of the opening or of a reply, in order
    options: Mapping[str, Any] = field(default_factory=dict)
    row: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[str] = ()
    success: bool | None = None
    package: str = ""  # optional package


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


# The map of seed 1 without holes: the shortest path has two moves to the right and two down.
LAKE = {"size": 3, "hole_share": 0.0, "instructions": "Go!"}
SERVER = str(locate("mcp_server.py"))

ENVIRONMENTS: dict[str, Script] = {
    "single_turn": Script(["Hello"], [None], [""]),
    "retry": Script(
        ["4", "6", "5"],
        [0.0, 0.0, 0.25],
        ["", "wrong", "wrong"],
        {"verifier": "exact_match", "discount": 0.5, "max_attempts": 4},
        {"answer": "5"},
        success=True,
    ),
    "calculator": Script(
        [call("calculate", '{"expression": "(3 + 4) * 6"}'), "It is 42."],
        [None, 1.0],
        ["What is", "42"],
        {"prompt_column": "question", "reward": True},
        {"question": "What is (3 + 4) * 6?", "answer": "42"},
        ["calculate"],
        success=True,
    ),
    "python_tool": Script(
        [call("code_interpreter", '{"code": "print(6 * 7)"}'), "42"],
        [None, None],
        ["Compute", "42"],
        {"prompt_column": "question"},
        {"question": "Compute 6 * 7."},
        ["code_interpreter"],
    ),
    "search": Script(
        [call("search", '{"query_list": ["capital of France"]}'), "Paris"],
        [None, None],
        ["", "Paris is the capital"],
        {"corpus": str(locate("corpus.jsonl")), "num_results": 1},
        {},
        ["search"],
    ),
    "frozen_lake": Script(
        ["Right", "jump", "<answer>Down</answer>", "Right", "Down"],
        [0.0, -0.5, 0.0, 0.0, 1.0],
        ["P _ _\n_ _ _\n_ _ G", "_ P _", "Invalid", "_ _ _\n_ P _", "_ _ P", "_ _ P"],
        {**LAKE, "invalid_reward": -0.5},
        {"seed": 1},
        success=True,
    ),
    "sokoban": Script(
        ["push", "Left"],
        [-0.1, 0.0],
        ["X", "Invalid", "X"],
        {"max_steps": 2, "invalid_reward": -0.1},
        {"seed": 1},
        success=False,
    ),
    # FrozenLake-v1 has the actions left, down, right and up; its map without holes in the way:
    # SFFF FHFH FFFH HFFG.
    "gymnasium": Script(
        ["Down", "Down", "Right", "fly", "Right", "Down", "Right"],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
        ["SFFF", "SFFF", "SFFF", "SFFF", "Invalid", "SFFF", "SFFF", "SFFF"],
        {
            "id": "FrozenLake-v1",
            "options": {"is_slippery": False},
            "actions": ["Left", "Down", "Right", "Up"],
        },
        {"seed": 1},
        success=True,
        package="gymnasium",
    ),
    # The number of seed 1 is 5.
    "textarena": Script(
        ["<think>[3]</think><answer>10</answer>", "none", "It is [5]."],
        [0.0, 0.0, 1.0],
        ["between 1 and 20", "lower", "invalid", ""],
        {"id": "GuessTheNumber-v0"},
        {"seed": 1},
        success=True,
        package="textarena",
    ),
    "endpoint": Script(
        ["yes", "end"],
        [None, None],
        ["one", "two"],
        {"command": [sys.executable, str(locate("chat_agent.py")), "forget"]},
        package="openai",
    ),
    "mcp": Script(
        [call("add", '{"a": 2, "b": 3}'), call("fail", "{}"), "5"],
        [None, None, None],
        ["", "5", "Error"],
        {"command": [sys.executable, SERVER], "tools": ["add", "fail"]},
        {},
        ["add", "fail"],
        package="mcp",
    ),
}


@dataclass(frozen=True, slots=True)
class FormatRow:
    """Text of an answer with calls, and its calls; malformed texts."""

    text: str
    content: str
    calls: Sequence[ToolCall]
    malformed: Sequence[str]


_CALLS = (ToolCall("add", {"a": 1, "text": "x"}), ToolCall("stop", {}))
TOOL_FORMATS: dict[str, FormatRow] = {
    "hermes": FormatRow(
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "text": "x"}}\n</tool_call>\n'
        '<tool_call>{"name": "stop", "arguments": {}}',
        "I add.",
        _CALLS,
        [
            "<tool_call>add(1)</tool_call>",
            '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
            '<tool_call>{"arguments": {}}</tool_call>',
            "<tool_call>" + "[" * 100_000,
        ],
    ),
    "llama3": FormatRow(
        '<|python_tag|>{"name": "add", "parameters": {"a": 1, "text": "x"}}; '
        '{"name": "stop", "parameters": {}}',
        "",
        _CALLS,
        ['{"name": "add", "parameters": {"a": 1}', "<|python_tag|>add(1)", '{"name": 5}'],
    ),
    "deepseek": FormatRow(
        "I add.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1, "text": "x"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I add.",
        _CALLS,
        [
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add",
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n[1]\n```",
        ],
    ),
    "glm": FormatRow(
        "I add.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n</tool_call>\n"
        "<tool_call>stop</tool_call>",
        "I add.",
        _CALLS,
        [
            "<tool_call>",
            "<tool_call>stop",
            "<tool_call>add<arg_key>a</arg_key><arg_value>1<arg_key>b</arg_key>"
            "<arg_value>2</arg_value></tool_call>",
            "<tool_call>add\n<arg_key>a</arg_key>1</tool_call>",
            '<tool_call>{"name": "add"}\n{}</tool_call>',
        ],
    ),
    "mistral": FormatRow(
        'I add.[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "text": "x"}}, '
        '{"name": "stop", "arguments": {}}]',
        "I add.",
        _CALLS,
        ["[TOOL_CALLS]", "[TOOL_CALLS] [1]", "[TOOL_CALLS]add[ARGS]{", "[TOOL_CALLS] []"],
    ),
    "qwen3_coder": FormatRow(
        "I add.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=stop>\n</function>\n</tool_call>",
        "I add.",
        _CALLS,
        [
            "<tool_call>",
            "<tool_call>\n<function=add>",
            "<function=add>\n<parameter=a>\n1\n</parameter>",
            "<function=add>\n<parameter=a>\n1\n<parameter=b>\n2\n</parameter>\n</function>",
            '<tool_call>{"name": "add", "arguments": {}}</tool_call>',
        ],
    ),
    "granite": FormatRow(
        'I add.<|tool_call|>[{"name": "add", "arguments": {"a": 1, "text": "x"}}, '
        '{"name": "stop", "arguments": {}}]',
        "I add.",
        _CALLS,
        ["<|tool_call|>", '<|tool_call|>[{"name": "add"', "<|tool_call|>[]", "<tool_call> {}"],
    ),
    "minimax": FormatRow(
        'I add.\n<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        '<parameter name="text">x</parameter>\n</invoke>\n<invoke name="stop">\n</invoke>\n'
        "</minimax:tool_call>",
        "I add.",
        _CALLS,
        [
            "<minimax:tool_call>",
            '<minimax:tool_call>\n<invoke name="add">',
            '<invoke name="add"><parameter name="a">1<parameter name="b">2</parameter></invoke>',
            "<tool_calls>",
            '<tool_calls>\n{"name": "add", "arguments": {',
        ],
    ),
    "kimi_k2": FormatRow(
        "I add.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
        '<|tool_call_argument_begin|>{"a": 1, "text": "x"}<|tool_call_end|><|tool_call_begin|>'
        "functions.stop:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "I add.",
        [call._replace(id=f"functions.{call.name}:{n}") for n, call in enumerate(_CALLS)],
        [
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>functions.add:0",
            "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>",
            "<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>[1]<|tool_call_end|>",
        ],
    ),
    "llama4_pythonic": FormatRow(
        '[add(a=1, text="x"), stop()]',
        "",
        _CALLS,
        ["[add(a=1", "[add(1)]", "[add(a=open('x'))]", "[add(a=1)] and more"],
    ),
    "gpt_oss": FormatRow(
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1, "text": "x"}<|call|><|start|>assistant '
        "to=functions.stop<|channel|>commentary json<|message|>{}<|call|>",
        "I add.",
        _CALLS,
        [
            "<|channel|>commentary to=functions.add",
            '<|channel|>commentary to=functions.add<|message|>{"a": 1',
            "<|channel|>commentary to=functions.add<|message|>add<|call|>",
        ],
    ),
}
