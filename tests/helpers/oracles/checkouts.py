"""Checkouts of other systems, which are not part of this project."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path

import pytest

from support import ROOT


def checkout(name: str, file: str | Path) -> Path:
    """Return the folder of a checkout that contains a file; skip the test if there is none.

    The variable `MSRL_<NAME>` names it, by default it is `../<name>`.
    """
    variable = f"MSRL_{name.replace('-', '_').replace('.', '').upper()}"
    root = Path(os.environ.get(variable, ROOT.parent / name))
    if not (root / file).is_file():
        pytest.skip(f"no checkout of {name} with {file} at {root} (set {variable})")
    return root


def import_from(folder: Path, *packages: str) -> None:
    """Let modules of packages in a folder be imported without the packages' `__init__.py`."""
    for name in packages:
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
