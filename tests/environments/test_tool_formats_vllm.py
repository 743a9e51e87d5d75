"""Tool formats read the same calls as vLLM's parsers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from msrl.data.rows.turns import ToolCall
from msrl.data.tokenizer import load_tokenizer
from msrl.environments.tools import tool_format
from support import shared_data

pytestmark = pytest.mark.slow
PARSERS = {
    "hermes": "hermes",
    "glm": "glm45",
    "qwen3_coder": "qwen3_coder",
    "minimax": "minimax_m2",
    "kimi_k2": "kimi_k2",
    "granite": "granite",
    "deepseek": "deepseek_v3",
    "llama3": "llama3_json",
    "llama4_pythonic": "llama4_pythonic",
}
TOKENS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<minimax:tool_call>",
    "</minimax:tool_call>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>", "<|tool_call|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>",
    "<｜DSML｜function_calls>", "</｜DSML｜function_calls>",
]  # fmt: skip
TYPES = {"a": "integer", "text": "string", "o": "object", "l": "array", "b": "boolean",
         "n": ["string", "null"], "x": "number"}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {key: {"type": types[key]} for key in types}}}}
    for name, types in (("add", TYPES), ("stop", {}))
]  # fmt: skip
RENDERED = [
    [ToolCall("add", {"a": 1, "text": "x"}), ToolCall("stop", {})],
    [ToolCall("add", {"a": -3, "text": '日本 "q" \\n \\', "o": {"k": [1, {"z": None}], "s": "<b>"},
                      "l": [1, "2", [3]], "b": True, "n": None, "x": 2.5})],
    [ToolCall("add", {"text": "5", "n": "null?", "a": 12345678901234567890})],
    [ToolCall("add", {"text": "line1\nline2\n", "b": False}), ToolCall("add", {"text": ""})],
    [ToolCall("add", {"text": '{"a": 1}'}), ToolCall("add", {"text": " true "})],
]  # fmt: skip
TEXTS = [
    ("deepseek_v31", "deepseek", "hi<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
     '{"a": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜>'
     "<｜tool▁calls▁end｜>"),
    ("deepseek_v32", "deepseek", 'hi<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
     '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n<｜DSML｜parameter '
     'name="text" string="true">5</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     "</｜DSML｜function_calls>"),
    ("mistral", "mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "text": "x"}[TOOL_CALLS]stop[ARGS]{}'),
    ("mistral", "mistral", '[TOOL_CALLS]add{"a": 1, "text": "x"}'),
    ("glm45", "glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"),
    ("qwen3_coder", "qwen3_coder", "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>"),
    ("granite", "granite", '<tool_call> [{"name": "add", "arguments": {"a": 1}}] after'),
    ("llama3_json", "llama3", '{"name": "Bob", "age": 3}'),
    ("llama4_pythonic", "llama4_pythonic",
     '<|python_start|>[add(a=-1, n=None, o={"k": (1, 2)})]<|python_end|>'),
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    tokenizer = load_tokenizer(shared_data("tokenizers", "qwen3-4b"))
    tokenizer.add_tokens(TOKENS, special_tokens=True)
    return tokenizer


def calls_of_vllm(parser: str, tokenizer: Any, text: str) -> list[tuple[str, Any]]:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    options = {"enable_thinking": False, "thinking": False}
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "q"}], model="m", tools=TOOLS,
        chat_template_kwargs=options,
    )  # fmt: skip
    kind = ToolParserManager.get_tool_parser(parser)
    try:
        reader = kind(tokenizer, request.tools, chat_template_kwargs=options)
    except TypeError:  # parsers without the options of thoughts
        reader = kind(tokenizer, request.tools)
    calls = [call.function for call in reader.extract_tool_calls(text, request).tool_calls]
    return [(call.name, json.loads(call.arguments.strip() or "{}")) for call in calls]


def assert_equal_calls(parser: str, name: str, tokenizer: Any, text: str) -> None:
    calls = [(call.name, call.arguments) for call in tool_format(name).parse(text, TOOLS).calls]
    assert calls == calls_of_vllm(parser, tokenizer, text)


@pytest.mark.sample(12)
@pytest.mark.parametrize("calls", RENDERED, ids=range(len(RENDERED)))
@pytest.mark.parametrize("name", PARSERS)
def test_rendered_calls_are_read_as_by_vllm(name: str, calls: list[ToolCall], tokenizer: Any):
    assert_equal_calls(PARSERS[name], name, tokenizer, tool_format(name).render(calls))


@pytest.mark.parametrize(("parser", "name", "text"), TEXTS)
def test_texts_of_models_are_read_as_by_vllm(parser: str, name: str, text: str, tokenizer: Any):
    assert_equal_calls(parser, name, tokenizer, text)
