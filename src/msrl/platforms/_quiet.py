"""Main module of vLLM's processes for several devices: silences what they print at their start.

multiprocessing imports it in each new process before vLLM, which then has not configured its logs
yet. Python's own warnings come from vLLM and torch, about their own functions.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Generator
from multiprocessing import spawn
from typing import Any

# Option of new processes. The resource tracker warns about what a killed process has left.
_LEAKS = "ignore::UserWarning:multiprocessing.resource_tracker"


def _is_own_failure(record: logging.LogRecord) -> bool:
    """Return False for the failure of a call because another process of the engine has ended."""
    error = record.exc_info[1] if record.exc_info else None
    return "closed by peer" not in str(error) and "reset by peer" not in str(error)


if __name__ == "__mp_main__":
    warnings.simplefilter("ignore")
    logging.getLogger("vllm").setLevel(logging.ERROR)
    logging.getLogger("vllm.v1.executor.multiproc_executor").addFilter(_is_own_failure)


@contextlib.contextmanager
def quiet_processes() -> Generator[None]:
    """Let processes that start within this context import this module as their main module.

    Otherwise they import the module of the command (`get_preparation_data` in
    multiprocessing/spawn.py), which no function of vLLM needs. The resource tracker starts with the
    first of them.
    """
    prepare = spawn.get_preparation_data

    def prepare_quietly(name: str) -> dict[str, Any]:
        data: dict[str, Any] = dict(prepare(name))
        data.pop("init_main_from_path", None)
        return {**data, "init_main_from_name": __name__}

    spawn.get_preparation_data = prepare_quietly
    sys.warnoptions.append(_LEAKS)
    try:
        yield
    finally:
        sys.warnoptions.remove(_LEAKS)
        spawn.get_preparation_data = prepare
