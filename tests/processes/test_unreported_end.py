"""Ends of a process that its own code cannot report."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support import HANG_S

PROGRAM = """
import os, signal
from msrl.processes.unreported_end import UnreportedEnd
with UnreportedEnd("msrl ended") as end:
    {}
"""


@pytest.mark.parametrize(
    ("body", "is_printed"),
    [
        ("os._exit(1)", True),
        ("os.kill(os.getpid(), signal.SIGKILL)", True),
        ("pass", False),
        ("raise SystemExit(1)", False),
        ("end.cancel(); os._exit(1)", False),
    ],
)
def test_only_an_end_without_own_code_is_reported(body: str, is_printed: bool) -> None:
    command = [sys.executable, "-c", PROGRAM.format(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert done.stderr == ("msrl ended\n" if is_printed else "")
