"""Execution of Python files of users, which define reward functions, environments and handlers."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any


class _Loader(SourceFileLoader):
    """Loader that writes no bytecode file beside the user's file."""

    def set_data(self, path: str, data: Any, *, _mode: int = 0o666) -> None:
        """Write nothing."""


def execute(file: str, module_name: str) -> ModuleType:
    """Execute a file as a module and return the module."""
    spec = importlib.util.spec_from_file_location(
        module_name, file, loader=_Loader(module_name, file)
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module
