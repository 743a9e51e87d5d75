"""The program of the response passes the tests of its row: 1.0, else 0.0; with `partial`, the share of tests that it passes.

The program is the last block between ``` marks. It runs in a sandbox (`sandbox.py`), or where `url` says, in a remote one (`fusion.py`).
The ground truth is JSON, in the forms in which such data is published, or plain text:

- `{"inputs": [...], "outputs": [...]}`: each input is given on standard input; the output has to have the same words;
- the same with `"fn_name": "f"`: each input is the list of arguments of `f` (or of `Solution().f`), each output what it returns;
- `["assert f(1) == 2", ...]`, `{"tests": ...}` of such a list or text, or the text itself: Python to run behind the program.

Expected outputs never enter the sandbox. Asserts do: a program that is out to may read them and the word that says they were passed.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Sequence
from typing import Any, cast

from msrl.rewards import fusion, sandbox
from msrl.rewards.sandbox import Case, Limits

WRONG = 0.0
NEEDS_ANSWER = True
_FENCED = re.compile(r"```(?:[^\n`]+```|([^\n`]*)\n(.*?)```)", re.DOTALL)  # within a line, or a block behind the name of its language
_LANGUAGES = ("", "python", "python3", "py")
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
_ASSERTS = """
import builtins as _python, os as _os, sys as _sys
_word, _tests = _sys.stdin.read().split("\\n", 1)
_python.exec(_python.compile(_tests, "tests", "exec"), _python.globals())
_sys.stdout.flush(); _os.write(1, _word.encode())
"""


def score(
    response: str, answer: str, *, partial: bool = False, case_s: float = 4.0, total_s: float = 8.0, memory_mb: int = 512,
    processes: int = 16, max_cases: int = 0, tolerance: float = 0.0, python: str = "", url: str = "",
) -> float:  # fmt: skip
    """0.0 to 1.0. `case_s`, `total_s`: wall-clock limits of one test and of all. `max_cases`: no more tests than that; 0: all.

    `tolerance`: relative error of numbers in outputs. `python`: interpreter of the programs; empty: this one.
    """
    program = last_program(response)
    if program is None:
        return WRONG
    limits = Limits(case_s=case_s, total_s=total_s, memory_bytes=memory_mb << 20, processes=processes)
    tests = _Tests(answer, program, max_cases, tolerance)
    if url:
        cases = fusion.run(url, tests.program, tests.inputs, limits, stop=not partial)
    else:
        cases = sandbox.run(tests.program, tests.inputs, limits, stop=not partial, python=python or None)
    passed = sum(map(tests.is_passed, range(len(cases)), cases))
    return passed / len(tests.inputs) if partial else float(passed == len(tests.inputs))


def refusal(*, python: str = "", url: str = "", case_s: float = 4.0, total_s: float = 8.0, memory_mb: int = 512, **_: Any) -> str | None:
    """Without a sandbox, here or remote, no program is run."""
    if min(case_s, total_s, memory_mb) <= 0:
        return "options.case_s, total_s and memory_mb have to be positive"
    if url:
        return None if url.startswith(("http://", "https://")) else f"options.url={url}: must begin with http:// or https://"
    reason = sandbox.refusal(python or None)
    return f"{reason}; set options.url to a remote sandbox" if reason else None


def last_program(response: str) -> str | None:
    """The content of the last block between ``` marks that says Python or no language."""
    blocks = [found for found in _FENCED.finditer(response) if found[2] is not None]
    programs = [block[2] for block in blocks if (block[1].split() or [""])[0].lower() in _LANGUAGES]
    return programs[-1] if programs else None


class _Tests:
    """The tests of a row: what to run, with which inputs, and whether a case is passed."""

    def __init__(self, answer: str, program: str, max_cases: int, tolerance: float) -> None:
        self._tolerance = tolerance
        told = _parsed(answer)
        limit = max_cases or None
        if isinstance(told, dict) and "inputs" in told:
            self._form = "call" if told.get("fn_name") else "words"
            self._expected: Sequence[Any] = told["outputs"][:limit]
            inputs = told["inputs"][:limit]
            if len(told["inputs"]) != len(told["outputs"]) or not inputs:
                raise ValueError(f"{len(told['inputs'])} inputs and {len(told['outputs'])} outputs: there has to be one of each for a test")
            is_call = self._form == "call"
            self.program = program + _CALL if is_call else program
            self.inputs = [json.dumps([told["fn_name"], list(given)]) if is_call else str(given) for given in inputs]
            return
        texts = told if isinstance(told, list) else [told]
        self._form, self._expected = "asserts", [secrets.token_hex(16) for _ in texts[:limit]]
        self.program = program + _ASSERTS
        self.inputs = [f"{word}\n{text}" for word, text in zip(self._expected, texts, strict=False)]

    def is_passed(self, number: int, case: Case) -> bool:
        if case.status != "ok":
            return False
        expected = self._expected[number]
        if self._form == "asserts":
            return case.stdout.endswith(expected)
        if self._form == "words":
            return self._same_words(str(expected), case.stdout)
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


def _parsed(answer: str) -> Any:
    """The ground truth as JSON: inputs and outputs, a list of texts, or one text."""
    try:
        told: Any = json.loads(answer)
    except ValueError:
        return answer
    if isinstance(told, dict) and "tests" in told:
        told = cast("dict[str, Any]", told)["tests"]
    if isinstance(told, dict) and {"inputs", "outputs"} <= set(cast("dict[str, Any]", told)):
        return cast("dict[str, Any]", told)
    if isinstance(told, list) and all(isinstance(text, str) for text in cast("list[Any]", told)) and told:
        return cast("list[str]", told)
    return told if isinstance(told, str) else answer
