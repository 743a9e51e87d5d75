"""Tests of programs as rows of data hold them: JSON in the forms in which such data is published, or Python text.

A row without a test would pay every program that runs, so `read_tests` refuses it.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

Form = Literal["words", "call", "asserts"]
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_CHECKING_NAME = re.compile(r"assert|check|test|verify|main|exit|fail|run", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class CodeTests:
    """Tests of one row: `cases` are inputs or texts with assertions; `expected` has an output for every input, nothing for assertions."""

    form: Form
    cases: Sequence[Any]
    expected: Sequence[Any] = ()
    function: str = ""


def read_tests(answer: str, *, can_parse: bool = True) -> CodeTests:
    """Return the tests of a ground truth. `can_parse`: whether this Python is the one that runs them, and can tell what is Python.

    Raises:
        ValueError: There is no test in it, or a test that every program passes.
    """
    data = _decode(answer)
    if isinstance(data, dict):
        return _read_outputs(cast("dict[str, Any]", data))
    texts = cast("list[Any]", data) if isinstance(data, list) else [data]
    if not texts:
        raise ValueError("the list of tests is empty")
    for number, text in enumerate(texts):
        reason = "is not text" if not isinstance(text, str) else _text_refusal(text, can_parse=can_parse)
        if reason:
            raise ValueError(f"test {number + 1} of {len(texts)} {reason}")
    return CodeTests("asserts", texts)


def as_text(value: Any) -> str:
    """Return an input or output as text; a list is one of lines."""
    return "\n".join(map(str, cast("list[Any]", value))) if isinstance(value, list) else str(value)


def _decode(answer: str) -> Any:
    """Return a JSON object, list or text of tests, or the ground truth itself where it is no JSON."""
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
        raise ValueError('it has neither "tests" nor lists of "inputs" and "outputs"')
    inputs, outputs = cast("list[Any]", inputs), cast("list[Any]", outputs)
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs: there has to be one of each for a test")
    name = data.get("fn_name") or ""
    if name and not all(isinstance(arguments, list) for arguments in inputs):
        raise ValueError("fn_name is given, but not every input is a list of arguments")
    if all(output is None for output in outputs) or (not name and not any(as_text(output).strip() for output in outputs)):
        raise ValueError("all outputs are empty, so that a program that does nothing would pass")
    return CodeTests("call" if name else "words", inputs, outputs, str(name))


def _text_refusal(text: str, *, can_parse: bool) -> str | None:
    """Return why a text tests nothing, None where it does."""
    if not text.strip():
        return "is empty"
    if not can_parse:
        return None
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"is no Python: {error}"
    return None if _tests_something(tree) else "asserts nothing when it is run"


def _tests_something(tree: ast.Module) -> bool:
    """Whether running the text asserts or raises, or calls what may: a function of it that does, or one that is named for it."""
    run = list(_run_nodes(tree.body))
    if any(map(_can_fail, run)):
        return True
    functions = [node for node in ast.walk(tree) if isinstance(node, _Function)]
    checking = {function.name for function in functions if any(map(_can_fail, ast.walk(function)))}
    called = {_called_name(node) for node in run if isinstance(node, ast.Call)}
    return any(name in checking or _CHECKING_NAME.search(name) for name in called)


def _run_nodes(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes that run with the module: all but the bodies of functions."""
    for node in nodes:
        yield node
        if not isinstance(node, _Function | ast.Lambda):
            yield from _run_nodes(ast.iter_child_nodes(node))


def _can_fail(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) or (isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant))


def _called_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""
