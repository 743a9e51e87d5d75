"""Helpers of several tests: paths, real inputs, PYTHONPATH of processes, waiting, messages."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
SHARED = ROOT.parent / "shared"
HANG_S = 900.0  # ends a test that hangs; no test waits for it, and a slow machine stays far below


@cache
def folders() -> tuple[str, ...]:
    """Return the folders of tests and helpers, which import each other by their names.

    Folders with another `conftest.py` are absent: `nox -s npu` and `nox -s browser` run them.
    """
    apart = {path.parent for path in TESTS.glob("*/conftest.py")}
    found = {path.parent for path in TESTS.rglob("*.py")}
    return tuple(
        str(folder) for folder in sorted(found) if apart.isdisjoint({folder, *folder.parents})
    )


def python_path() -> str:
    """Return a PYTHONPATH with the folders of the tests, followed by the one of this process."""
    return os.pathsep.join([*folders(), *filter(None, [os.environ.get("PYTHONPATH")])])


def locate(name: str) -> Path:
    """Return the only file of this name in the folders of the tests."""
    (path,) = (path for folder in folders() if (path := Path(folder, name)).exists())
    return path


def shared_data(*names: str) -> Path:
    """Return a file or folder of the real inputs; skip the test if it is absent.

    The inputs are in `../shared/data` or in MSRL_TEST_DATA.
    """
    root = Path(os.environ.get("MSRL_TEST_DATA", SHARED / "data"))
    path = root.joinpath(*names)
    if not path.exists():
        pytest.skip(f"real inputs are not here: {path} (set MSRL_TEST_DATA)")
    return path


def wait_until(condition: Callable[[], object], limit_s: float = HANG_S) -> None:
    """Wait until the condition is true. Fail after the limit, which no working test reaches."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not true after {limit_s:g} s"
        time.sleep(0.005)


def _pattern(fragment: object) -> str:
    """Return the regular expression of a fragment.

    A number at its edge must end there: `steps=3` does not match `steps=30`. A fragment of letters
    only must start a word: `folder` does not match `test_folder_...`, the name that pytest gives to
    the temporary folder of a test.
    """
    text = str(fragment)
    before = ""
    if re.fullmatch("[A-Za-z ]+", text):
        before = r"(?<![A-Za-z0-9_])"
    elif text[:1].isdigit():
        before = r"(?<![\d.])"
    after = r"(?!\d|\.\d)" if text[-1:].isdigit() else ""
    return before + re.escape(text) + after


def mentions(*fragments: object) -> str:
    """Return a regular expression for `pytest.raises(match=...)` that requires all fragments.

    Their order and case are ignored. A test of a message contains the key, the value and one
    keyword, so that the sentence can be reworded.
    """
    return r"(?is)\A" + "".join(f"(?=.*{_pattern(fragment)})" for fragment in fragments)


def assert_mentions(message: object, *fragments: object) -> None:
    """Assert that a text or exception contains all fragments, in any order and case."""
    text = str(message)
    absent = [
        str(fragment)
        for fragment in fragments
        if not re.search(_pattern(fragment), text, re.IGNORECASE)
    ]
    assert not absent, f"{absent} missing in: {text}"


def assert_each_mentions(messages: Iterable[object], *expected: Iterable[object]) -> None:
    """Assert that each message contains all of its expected fragments, and none is missing."""
    texts = [str(message) for message in messages]
    assert len(texts) == len(expected), "\n".join(texts)
    for text, fragments in zip(texts, expected, strict=True):
        assert_mentions(text, *fragments)


def labelled(rows: Mapping[str, Any], *keywords: str) -> Any:
    """Return the value of the only row whose label contains all keywords."""
    (value,) = [
        value for label, value in rows.items() if all(keyword in label for keyword in keywords)
    ]
    return value


def checked_plan(resolved: Any, command: str) -> Any:
    """Return the plan of a configuration after its checks."""
    from msrl.checks.validate import check
    from msrl.plan.run_plan import resolve

    plan = resolve(resolved.config, command)
    check(resolved, plan)
    return plan
