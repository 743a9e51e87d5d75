"""Score of the response's program on the tests of its row: 1.0 if all pass, else 0.0.

With `partial`, the score is the share of passed tests. The program is the last fenced block that is
labeled Python, or that has no label and looks like Python, or else the last block without a label.
It runs in a sandbox (`sandbox.py`), or with `url` in a remote sandbox (`fusion.py`). The ground
truth is JSON in the forms of published datasets, or plain text:

- `{"inputs": [...], "outputs": [...]}`: each input is passed on standard input, and the output must
  have the same words. The items of a list are lines.
- The same with `"fn_name": "f"`: each input is the list of arguments of `f` (or `Solution().f`),
  and each output is the expected return value, which may be the only item of a list if that holds
  for all tests. Both may be text: one JSON value per line.
- `[{"input": ..., "output": ...}, ...]`: the same with one object per test. Tests of a function
  have `fn_name` in an object.
- `["assert f(1) == 2", ...]`, `{"tests": ...}` with such a list or text, or the text itself: Python
  code that runs after the program.

Expected outputs never enter the sandbox. Assertions run in a separate process of the sandbox
(`code_tester.py`) that calls the program, so tests cannot patch names of the program. A row without
a test, or with tests that every program passes, is rejected before the run.
"""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
from collections.abc import Sequence
from typing import Any, TypeGuard

from msrl.rewards import fusion, sandbox
from msrl.rewards.code_harness import harness
from msrl.rewards.code_tests import CodeTests, as_text, read_tests
from msrl.rewards.sandbox import Case, Limits

WRONG = 0.0
NEEDS_ANSWER = True
# Inline code, or a block with the label of its language.
_FENCED = re.compile(r"```(?:[^\n`]+```|([^\n`]*)\n(.*?)```)", re.DOTALL)
_LANGUAGES = ("python", "python3", "py")
_INTEGER = re.compile(r"[+-]?\d+")
_STATEMENTS = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Import,
    ast.ImportFrom,
    ast.For,
    ast.While,
)
# Names that programs on platforms such as LeetCode use without an import.
_IMPORTS = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from typing import *
from math import ceil, comb, floor, gcd, inf, isqrt, lcm, log, sqrt
"""
# The program runs between the two parts, of which only standard error can be written by it. A name
# of `_IMPORTS` that it did not define again is the function to call only without a method.
_BEFORE_CALL = """
import builtins as _python, json as _json, os as _os, sys as _sys
_line = _sys.stdin.readline()
_result = _os.fdopen(_os.dup(1), "w"); _os.dup2(2, 1)
"""
_BEFORE_PROGRAM = """
_imported = _python.dict(_python.globals())
"""
_CALL = """
_name, _arguments = _json.loads(_line)
_names = _python.globals()
_target = _names.get(_name)
if _target is _imported.get(_name) and "Solution" in _names:
    _target = _python.getattr(Solution(), _name, _target)
_value = _target(*_arguments)
_result.write(_json.dumps(_value)); _result.flush()
"""


def score(
    response: str,
    answer: str,
    *,
    partial: bool = False,
    case_s: float = 4.0,
    total_s: float = 8.0,
    memory_mb: int = 512,
    processes: int = 16,
    max_cases: int = 0,
    tolerance: float = 0.0,
    python: str = "",
    url: str = "",
) -> float:
    """Return a score from 0.0 to 1.0.

    Args:
        response: Response with a fenced program.
        answer: Ground truth with the tests.
        partial: Return the share of passed tests instead of 1.0 or 0.0.
        case_s: Wall-clock limit of one test.
        total_s: Wall-clock limit of all tests.
        memory_mb: Memory limit in MiB.
        processes: Maximum number of processes.
        max_cases: Maximum number of tests; 0 runs all.
        tolerance: Accepted relative error of non-integers in outputs.
        python: Interpreter of the programs; empty for this one.
        url: Remote sandbox; empty for the local one.
    """
    tests = read_tests(answer, can_parse=not (python or url))
    program = last_program(response)
    if program is None:
        return WRONG
    limits = Limits(
        case_s=case_s,
        total_s=total_s,
        memory_bytes=memory_mb << 20,
        processes=processes + (tests.form == "asserts"),  # one more for the tests
    )
    run = _TestRun(tests, program, max_cases, tolerance)
    if url:
        cases = fusion.run(url, run.program, run.inputs, limits, stop=not partial)
    else:
        cases = sandbox.run(
            run.program, run.inputs, limits, stop=not partial, python=python or None
        )
    num_passed = sum(map(run.is_passed, range(len(cases)), cases))
    return num_passed / len(run.inputs) if partial else float(num_passed == len(run.inputs))


def answer_refusal(answer: str, *, python: str = "", url: str = "", **_: Any) -> str | None:
    """Return the reason why a ground truth tests nothing, or None."""
    try:
        read_tests(answer, can_parse=not (python or url))
    except ValueError as error:
        return f"tests nothing: {error}"
    return None


def refusal(
    *,
    python: str = "",
    url: str = "",
    case_s: float = 4.0,
    total_s: float = 8.0,
    memory_mb: int = 512,
    **_: Any,
) -> str | None:
    """Return the reason why no local or remote sandbox can be used with these options, or None."""
    if min(case_s, total_s, memory_mb) <= 0:
        return "options.case_s, total_s and memory_mb must be positive"
    if url.startswith(("http://", "https://")):
        return None
    if url:
        return f"options.url={url}: must begin with http:// or https://"
    reason = sandbox.refusal(python or None)
    return f"{reason}; set options.url to a remote sandbox" if reason else None


def last_program(response: str) -> str | None:
    """Return the last fenced block that is labeled Python or looks like it.

    Without one, return the last unlabeled block. An unlabeled block after the program is often its
    output.
    """
    blocks = _fenced_blocks(response)
    unlabeled = [text for language, text in blocks if not language]
    programs = [text for language, text in blocks if _is_python(language, text)] or unlabeled
    return programs[-1] if programs else None


def _fenced_blocks(response: str) -> list[tuple[str, str]]:
    """Return (label, text) of the fenced blocks; the label is lower-case and may be empty."""
    blocks: list[tuple[str, str]] = []
    for match in _FENCED.finditer(response):
        if match[2] is not None:
            labels = match[1].lower().split()
            blocks.append((labels[0] if labels else "", match[2]))
    return blocks


def _is_python(language: str, text: str) -> bool:
    return language in _LANGUAGES or (not language and _looks_like_python(text))


def _looks_like_python(text: str) -> bool:
    """Return True if a text has definitions, imports, loops or print calls, unlike most outputs."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, _STATEMENTS) or _is_print(node) for node in nodes)


def _is_print(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return False
    return node.func.id == "print"


def _call_program(program: str) -> str:
    """Return a program that calls a function of `program` and prints its value as JSON."""
    run = f'exec(compile({program!r}, "program.py", "exec"))'
    return f"{_BEFORE_CALL}{_IMPORTS}{_BEFORE_PROGRAM}{run}{_CALL}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(text: str) -> float:
    """Return the number that a text is. Raises ValueError for other texts."""
    return int(text) if _INTEGER.fullmatch(text) else float(text)


def _is_close(true: float, value: float, tolerance: float) -> bool:
    """Return True if two numbers are close. Two integers, which are not rounded, must be equal."""
    if isinstance(true, int) and isinstance(value, int):
        return true == value
    try:
        return math.isclose(true, value, rel_tol=tolerance)
    except OverflowError:  # an integer beyond the range of float
        return False


class _TestRun:
    """Program and inputs for the tests of a row, and evaluation of their results."""

    def __init__(self, tests: CodeTests, program: str, max_cases: int, tolerance: float) -> None:
        self._form, self._tolerance = tests.form, tolerance
        cases = tests.cases[: max_cases or None]
        if tests.form == "asserts":
            self._expected: Sequence[Any] = [secrets.token_hex(16) for _ in cases]
            self.program = harness(program)
            pairs = zip(self._expected, cases, strict=True)
            self.inputs = [f"{word}\n{text}" for word, text in pairs]
            return
        self._expected = tests.expected[: len(cases)]
        if tests.form == "call":
            self.program = _call_program(program)
            self.inputs = [json.dumps([tests.function, case]) for case in cases]
        else:
            self.program = program
            self.inputs = [as_text(case) for case in cases]

    def is_passed(self, number: int, case: Case) -> bool:
        if case.status != "ok":
            return False
        expected = self._expected[number]
        if self._form == "asserts":
            return case.stdout.endswith(expected)
        if self._form == "words":
            return self._same_words(as_text(expected), case.stdout)
        try:
            value = json.loads(case.stdout)
        except (ValueError, RecursionError):
            return False
        return any(self._same_value(true, value) for true in self._return_values(expected))

    def _return_values(self, expected: Any) -> list[Any]:
        """Return the values that a call may return.

        APPS and TACO write some expected values as the only item of a list.
        """
        true = json.loads(json.dumps(expected))
        is_wrapped = all(isinstance(item, list) and len(item) == 1 for item in self._expected)
        return [true, true[0]] if is_wrapped else [true]

    def _same_value(self, true: Any, value: Any) -> bool:
        if isinstance(true, list) and isinstance(value, list):
            pairs = zip(true, value, strict=False)
            return len(true) == len(value) and all(self._same_value(*pair) for pair in pairs)
        if self._tolerance and _is_number(true) and _is_number(value):
            return _is_close(true, value, self._tolerance)
        return true == value

    def _same_words(self, expected: str, output: str) -> bool:
        true, printed = expected.split(), output.split()
        if len(true) != len(printed):
            return False
        return all(self._same_word(*pair) for pair in zip(true, printed, strict=True))

    def _same_word(self, true: str, printed: str) -> bool:
        if true == printed or not self._tolerance:
            return true == printed
        try:
            return _is_close(_number(true), _number(printed), self._tolerance)
        except ValueError:
            return False
