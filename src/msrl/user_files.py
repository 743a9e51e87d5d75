"""Python files of users: execution of those that a configuration names, and of no others."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

# Option of Python (3.11) that excludes the working folder from the search path.
_ONLY_GIVEN_PATH = ("-P",) if sys.version_info >= (3, 11) else ()


def python_command(*words: str) -> list[str]:
    """Return the command of this Python with these words.

    A file in the working folder, such as `inspect.py`, does not replace the module of that name.
    """
    return [sys.executable, *_ONLY_GIVEN_PATH, *words]


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
