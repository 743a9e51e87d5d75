"""Python files of users: execution of those that a configuration names, and of no others."""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

_MAX_TRACEBACK = 4000  # characters


_MAX_BYTES = 2 << 20  # of a Python file that people write


def parse(file: str | Path) -> ast.Module:
    """Return the syntax tree of a Python file.

    Raises:
        SyntaxError: It is not Python.
        ValueError: It is too large or nested too deeply, or has null characters.
        OSError: It cannot be read.
    """
    with Path(file).open("rb") as source:
        content = source.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ValueError(f"it is larger than {_MAX_BYTES >> 20} MiB")
    try:
        return ast.parse(content, str(file))
    except (RecursionError, MemoryError):  # of the parser
        raise ValueError("it is nested too deeply") from None


class NotLoadedError(Exception):
    """A user's function cannot be loaded."""


class _Loader(SourceFileLoader):
    """Loader that writes no bytecode file beside the user's file."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Write nothing."""


def execute(file: str, module_name: str) -> ModuleType:
    """Execute a file, such as a reward function's, as a module and return the module."""
    spec = importlib.util.spec_from_file_location(
        module_name, file, loader=_Loader(module_name, file)
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def load_function(file: str, module_name: str, attribute: str) -> Callable[..., Any]:
    """Execute a file, which may import its neighbors, and return one of its functions.

    Raises:
        NotLoadedError: The file cannot be executed or does not define the function.
    """
    try:
        sys.path.insert(0, str(Path(file).resolve().parent))
        return getattr(execute(file, module_name), attribute)
    except BaseException as error:
        detail = traceback.format_exc(limit=-2)[-_MAX_TRACEBACK:]
        raise NotLoadedError(f"{file}:{attribute}: cannot be loaded: {detail}") from error
