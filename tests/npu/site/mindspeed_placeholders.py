"""Placeholders of packages that MindSpeed imports but that its patches do not need here."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

_PACKAGES = {"torchair", "torchvision", "torchaudio"}


class _Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finder and loader of modules whose attributes accept every call."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a spec for the packages and all of their modules."""
        if fullname.partition(".")[0] not in _PACKAGES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Create a module with all attributes."""
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock(name=name)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it is."""


def _unchanged(*_: object, **__: object) -> Callable[[Any], Any]:
    return lambda function: function


def install() -> None:
    """Use placeholders where the packages are missing, and keep Triton from looking for a GPU."""
    sys.meta_path.append(_Placeholders())
    try:
        import triton
    except ImportError:
        return
    triton.autotune = _unchanged
