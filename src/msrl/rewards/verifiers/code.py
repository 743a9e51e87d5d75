"""The program of the response passes the tests of its row: 1.0, else 0.0; with `partial`, the share of tests that it passes.

The program is the last block between ``` marks that says Python, or says nothing and is a program by its looks; where there is none, the
last that says nothing. It runs in a sandbox (`sandbox.py`), or where `url` says, in a remote one (`fusion.py`).
The ground truth is JSON, in the forms in which such data is published, or plain text:

- `{"inputs": [...], "outputs": [...]}`: each input is given on standard input; the output has to have the same words; a list is one of
  lines;
- the same with `"fn_name": "f"`: each input is the list of arguments of `f` (or of `Solution().f`), each output what it returns;
- `["assert f(1) == 2", ...]`, `{"tests": ...}` of such a list or text, or the text itself: Python to run behind the program.

Expected outputs never enter the sandbox. Asserts do (`code_harness.py`): a program that searches its own process may find the word that
says they were passed. A row without a test, or with tests that every program passes, is refused before the run.
"""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
from collections.abc import Sequence
from typing import Any

from msrl.rewards import fusion, sandbox
from msrl.rewards.code_harness import harness
from msrl.rewards.code_tests import CodeTests, as_text, read_tests
from msrl.rewards.sandbox import Case, Limits

WRONG = 0.0
NEEDS_ANSWER = True
_FENCED = re.compile(r"```(?:[^\n`]+```|([^\n`]*)\n(.*?)```)", re.DOTALL)  # within a line, or a block behind the name of its language
_LANGUAGES = ("python", "python3", "py")
_STATEMENTS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.For, ast.While)
# What follows the program takes no name that the program may have given to something else.
_CALL = """
import builtins as _python, json as _json, os as _os, sys as _sys
_line = _sys.stdin.readline()
_told = _os.fdopen(_os.dup(1), "w"); _os.dup2(2, 1)
_name, _arguments = _json.loads(_line)
_target = _python.globals()[_name] if _name in _python.globals() else _python.getattr(Solution(), _name)
_value = _target(*_arguments)
_told.write(_json.dumps(_value)); _told.flush()
"""


def score(
    response: str, answer: str, *, partial: bool = False, case_s: float = 4.0, total_s: float = 8.0, memory_mb: int = 512,
    processes: int = 16, max_cases: int = 0, tolerance: float = 0.0, python: str = "", url: str = "",
) -> float:  # fmt: skip
    """0.0 to 1.0. `case_s`, `total_s`: wall-clock limits of one test and of all. `max_cases`: no more tests than that; 0: all.

    `tolerance`: relative error of numbers in outputs. `python`: interpreter of the programs; empty: this one.
    """
    tests = read_tests(answer, can_parse=not (python or url))
    program = last_program(response)
    if program is None:
        return WRONG
    limits = Limits(case_s=case_s, total_s=total_s, memory_bytes=memory_mb << 20, processes=processes)
    run = _Run(tests, program, max_cases, tolerance)
    if url:
        cases = fusion.run(url, run.program, run.inputs, limits, stop=not partial)
    else:
        cases = sandbox.run(run.program, run.inputs, limits, stop=not partial, python=python or None)
    passed = sum(map(run.is_passed, range(len(cases)), cases))
    return passed / len(run.inputs) if partial else float(passed == len(run.inputs))


def answer_refusal(answer: str, *, python: str = "", url: str = "", **_: Any) -> str | None:
    """A ground truth has to test something."""
    try:
        read_tests(answer, can_parse=not (python or url))
    except ValueError as error:
        return f"tests nothing: {error}"
    return None


def refusal(*, python: str = "", url: str = "", case_s: float = 4.0, total_s: float = 8.0, memory_mb: int = 512, **_: Any) -> str | None:
    """Without a sandbox, here or remote, no program is run."""
    if min(case_s, total_s, memory_mb) <= 0:
        return "options.case_s, total_s and memory_mb have to be positive"
    if url:
        return None if url.startswith(("http://", "https://")) else f"options.url={url}: must begin with http:// or https://"
    reason = sandbox.refusal(python or None)
    return f"{reason}; set options.url to a remote sandbox" if reason else None


def last_program(response: str) -> str | None:
    """Return the content of the last block between ``` marks that says Python or looks like it, else of the last without a language.

    A block without a language behind the program is often its output.
    """
    blocks = [((found[1].split() or [""])[0].lower(), found[2]) for found in _FENCED.finditer(response) if found[2] is not None]
    python = [text for language, text in blocks if language in _LANGUAGES or (not language and _looks_like_python(text))]
    programs = python or [text for language, text in blocks if not language]
    return programs[-1] if programs else None


def _looks_like_python(text: str) -> bool:
    """Whether a text defines, imports, repeats or prints something; the output of a program hardly does."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    prints = any(isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print" for node in nodes)
    return prints or any(isinstance(node, _STATEMENTS) for node in nodes)


class _Run:
    """What to run for the tests of a row, with which inputs, and whether a case is passed."""

    def __init__(self, tests: CodeTests, program: str, max_cases: int, tolerance: float) -> None:
        self._form, self._tolerance = tests.form, tolerance
        cases = tests.cases[: max_cases or None]
        if tests.form == "asserts":
            self._expected: Sequence[Any] = [secrets.token_hex(16) for _ in cases]
            self.program = harness(program)
            self.inputs = [f"{word}\n{text}" for word, text in zip(self._expected, cases, strict=True)]
            return
        self._expected = tests.expected[: len(cases)]
        is_call = tests.form == "call"
        self.program = program + _CALL if is_call else program
        self.inputs = [json.dumps([tests.function, case]) if is_call else as_text(case) for case in cases]

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
        return value == json.loads(json.dumps(expected))

    def _same_words(self, expected: str, given: str) -> bool:
        true, claimed = expected.split(), given.split()
        return len(true) == len(claimed) and all(self._same(t, c) for t, c in zip(true, claimed, strict=True))

    def _same(self, true: str, claimed: str) -> bool:
        if true == claimed or not self._tolerance:
            return true == claimed
        try:
            return math.isclose(float(true), float(claimed), rel_tol=self._tolerance)
        except ValueError:
            return False
