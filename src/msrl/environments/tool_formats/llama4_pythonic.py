"""Tool calls of Llama 4 as a Python list of function calls, `[add(a=1), stop()]`.

The list is parsed, never run: arguments are literals. The tokens `<|python_start|>` and
`<|python_end|>` may enclose it.
Format: https://github.com/meta-llama/llama-models/blob/main/models/llama4/prompt_format.md
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from msrl.data.rows.turns import ToolCall
from msrl.environments.tool_call import MalformedCall, ParsedAnswer
from msrl.types import JsonObject

MARKS = (("func_name1(params_name1=",),)
VLLM_PARSERS = {"llama4_pythonic": ""}
_START, _END = "<|python_start|>", "<|python_end|>"
_LIST = re.compile(r"\[\s*([A-Za-z_][\w.]*)\s*\(")
_NAMES = {"null": None, "true": True, "false": False}


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer that is a list of calls; any other answer is text."""
    body = text.strip()
    is_marked = body.startswith(_START)
    if is_marked:
        body = body.removeprefix(_START).removesuffix(_END).strip()
    names = {tool["function"]["name"] for tool in tools}
    opened = _LIST.match(body)
    if opened is None or (names and not is_marked and opened[1] not in names):
        return ParsedAnswer(text.strip())
    try:
        return ParsedAnswer("", tuple(_read_list(body)))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        problem = str(error) or type(error).__name__
        return ParsedAnswer("", (MalformedCall(body, f"not a list of calls: {problem}"),))


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as a model writes them."""
    return f"[{', '.join(map(_render_call, calls))}]"


def _render_call(call: ToolCall) -> str:
    arguments = ", ".join(f"{key}={value!r}" for key, value in call.arguments.items())
    return f"{call.name}({arguments})"


def _read_list(text: str) -> list[ToolCall]:
    node = ast.parse(text, mode="eval").body
    if not isinstance(node, ast.List):
        raise ValueError("the answer must be one list")
    return [_read_call(element) for element in node.elts]


def _read_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call):
        raise ValueError("each element must be a call")
    if node.args:
        raise ValueError("arguments need names")
    arguments: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise ValueError("each argument needs its own name")
        arguments[keyword.arg] = _literal(keyword.value)
    return ToolCall(_dotted_name(node.func), arguments)


def _dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted_name(node.value)}.{node.attr}"
    if not isinstance(node, ast.Name):
        raise ValueError("a call needs the name of a tool")
    return node.id


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal that JSON can hold."""
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(element) for element in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key) for key in node.keys]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("keys must be strings")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _literal(node.operand)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.Constant):
        value = node.value
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if value is None or (isinstance(value, str | int | float) and is_finite):
            return value
    raise ValueError("arguments must be literals")
