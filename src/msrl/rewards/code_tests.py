"""Parser of the tests of a `code` row: JSON in the forms of published datasets, or Python text.

A row without a test would reward every program that runs, so `read_tests` rejects it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

Form = Literal["words", "call", "asserts"]
_Definition = ast.FunctionDef | ast.AsyncFunctionDef
_CHECKING_NAME = re.compile(r"assert|check|test|verify|main|exit|fail|run", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CodeTests:
    """Tests of one row.

    `cases` are inputs or texts with assertions. `expected` has one output per input and is empty
    for assertions.
    """

    form: Form
    cases: Sequence[Any]
    expected: Sequence[Any] = ()
    function: str = ""


def read_tests(answer: str, *, can_parse: bool = True) -> CodeTests:
    """Return the tests of a ground truth.

    Args:
        answer: The ground truth.
        can_parse: True if this interpreter also runs the tests and can check their syntax.

    Raises:
        ValueError: The ground truth holds no test, or a test that every program passes.
    """
    data = _decode(answer)
    if isinstance(data, dict):
        return _read_outputs(cast("dict[str, Any]", data))
    texts = cast("list[Any]", data) if isinstance(data, list) else [data]
    if texts and all(isinstance(text, dict) for text in texts):
        return _read_outputs(_columns(texts))
    if not texts:
        raise ValueError("the list of tests is empty")
    for number, text in enumerate(texts):
        reason = _check_text(text, can_parse=can_parse)
        if reason:
            raise ValueError(f"test {number + 1} of {len(texts)} {reason}")
    return CodeTests("asserts", texts)


def as_text(value: Any) -> str:
    """Return an input or output as text; the items of a list are lines."""
    if isinstance(value, list):
        return "\n".join(map(str, cast("list[Any]", value)))
    return str(value)


def _decode(answer: str) -> Any:
    """Return the JSON value with the tests, or the ground truth if it is not JSON."""
    try:
        data: Any = json.loads(answer)
    except (ValueError, RecursionError):
        return answer
    if isinstance(data, dict) and "tests" in data:
        data = cast("dict[str, Any]", data)["tests"]
    return data if isinstance(data, dict | list | str) else answer


def _read_outputs(data: dict[str, Any]) -> CodeTests:
    inputs, outputs = data.get("inputs"), data.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError('the object has neither "tests" nor lists of "inputs" and "outputs"')
    inputs, outputs = cast("list[Any]", inputs), cast("list[Any]", outputs)
    if len(inputs) != len(outputs) or not inputs:
        counts = f"{len(inputs)} inputs and {len(outputs)} outputs"
        raise ValueError(f"each test needs one input and one output, but there are {counts}")
    name = data.get("fn_name") or ""
    if name:
        inputs, outputs = _call_values(inputs, outputs)
    if _are_empty(outputs, returned=bool(name)):
        raise ValueError("all outputs are empty, so a program that does nothing would pass")
    return CodeTests("call" if name else "words", inputs, outputs, str(name))


def _columns(tests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return tests with one object per test (LiveCodeBench) as lists of inputs and outputs."""
    for number, test in enumerate(tests, 1):
        missing = [key for key in ("input", "output") if test.get(key) is None]
        if missing:
            raise ValueError(f"test {number} of {len(tests)} has no {missing[0]}")
    names = {str(test["fn_name"]) for test in tests if test.get("fn_name")}
    kinds = {str(test.get("testtype") or test.get("type") or "stdin") for test in tests}
    if len(names) > 1 or (kinds & {"functional", "function_call"} and not names):
        raise ValueError("tests of a function must all name it as fn_name")
    return {
        "inputs": [test["input"] for test in tests],
        "outputs": [test["output"] for test in tests],
        "fn_name": next(iter(names), ""),
    }


def _call_values(inputs: list[Any], outputs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return arguments and return values; text has one JSON value per line."""
    if inputs and all(isinstance(text, str) for text in (*inputs, *outputs)):
        try:
            arguments = [list(map(json.loads, text.splitlines())) for text in inputs]
            return arguments, list(map(json.loads, outputs))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"with fn_name, each line must be JSON: {error}") from None
    if not all(isinstance(arguments, list) for arguments in inputs):
        raise ValueError("with fn_name, every input must be a list of arguments")
    return inputs, outputs


def _are_empty(outputs: Sequence[Any], *, returned: bool) -> bool:
    """Return True if a program passes without output; `returned` means return values."""
    if all(output is None for output in outputs):
        return True
    return not returned and not any(as_text(output).strip() for output in outputs)


def _check_text(text: Any, *, can_parse: bool) -> str | None:
    """Return the reason why a text tests nothing, or None if it tests something."""
    if not isinstance(text, str):
        return "is not text"
    if not text.strip():
        return "is empty"
    if not can_parse:
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"is not Python: {error}"
    return None if _tests_something(tree) else "asserts nothing when it runs"


def _tests_something(tree: ast.Module) -> bool:
    """Return True if running the text can fail.

    It can if its top level asserts, raises, or calls a function that may do so: one that the text
    defines with an assertion inside, or one with a name such as `check`.
    """
    executed = list(_executed_nodes(tree.body))
    if any(map(_can_fail, executed)):
        return True
    functions = [node for node in ast.walk(tree) if isinstance(node, _Definition)]
    checking = {function.name for function in functions if any(map(_can_fail, ast.walk(function)))}
    called = {_called_name(node) for node in executed if isinstance(node, ast.Call)}
    return any(name in checking or _CHECKING_NAME.search(name) for name in called)


def _executed_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes that run with the module: all except the bodies of functions."""
    for node in nodes:
        yield node
        if not isinstance(node, _Definition | ast.Lambda):
            yield from _executed_nodes(ast.iter_child_nodes(node))


def _can_fail(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return not isinstance(node.test, ast.Constant)
    return isinstance(node, ast.Raise)


def _called_name(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""
