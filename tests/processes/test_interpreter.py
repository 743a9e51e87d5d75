"""The quick end of a process does what the end of an interpreter does, except deleting objects."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from msrl.processes.interpreter import no_collections
from support import assert_mentions

PROGRAM = """
import atexit, logging, sys, threading, time
from msrl.processes.interpreter import quick_end
class Object:
    def __del__(self):
        print("deleted")
kept = Object()
kept.cycle = kept
atexit.register(print, "first registered")
def work():
    time.sleep(0.2)
    print("thread")
with quick_end():
    atexit.register(print, "last registered")
    threading.Thread(target=work).start()
    print("no newline", end="")
    {end}
"""


def run(end: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.format(end=end)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("end", "code"), [("pass", 0), ("sys.exit()", 0), ("sys.exit(7)", 7), ("sys.exit(True)", 1)]
)
def test_threads_exit_functions_and_output_are_finished_and_objects_stay(end: str, code: int):
    done = run(end)
    assert done.returncode == code and not done.stderr
    assert done.stdout.splitlines() == ["no newlinethread", "last registered", "first registered"]


@pytest.mark.parametrize(("end", "text"), [("1 / 0", "ZeroDivisionError"), ("sys.exit('a')", "a")])
def test_an_error_is_reported_as_by_every_interpreter(end: str, text: str):
    done = run(end)
    assert done.returncode == 1 and "first registered" in done.stdout
    assert_mentions(done.stderr, text)


def test_output_that_cannot_be_written_is_an_error():
    command = [sys.executable, "-c", PROGRAM.format(end="pass")]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=environment, check=False
        )
    assert done.returncode == 120 and b"No space" in done.stderr  # as without the quick end


def test_collections_are_as_before_after_imports():
    with no_collections():
        assert not gc.isenabled()
        with no_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
