"""Quicker starts and ends of Python processes that import torch, Megatron or vLLM.

Such imports create a million objects. Garbage collections visit them again and again while they are
imported, and the interpreter deletes them one by one at its end. Both take a second of CPU time.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Collect no garbage during the block, which imports."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def quick_end() -> Iterator[None]:
    """Let the process, whose last work is the block, end without deleting all objects.

    Threads are joined, functions of `atexit` called and streams flushed as at every end. Files that
    are still open would lose what they have not written. An error with a traceback changes nothing.
    """
    try:
        yield
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            atexit.register(_end, end.code or 0)
        raise
    atexit.register(_end, 0)


def _end(code: int) -> None:
    """Do the rest of the interpreter's end, as its first function of `atexit`."""
    atexit.unregister(_end)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            return  # the interpreter reports it
    os._exit(code)
