"""Functions of verl and TRL as oracles, imported from a folder outside this project.

MSRL_PEERS_PATH names folders (separated by `:`) that have `verl` 0.9.1, `trl` 1.16.0 and the
modules they import, for example made by `pip install --no-deps --target FOLDER verl==0.9.1
trl==1.16.0 omegaconf hydra-core tensordict codetiming antlr4-python3-runtime==4.9.3 ...`.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import pytest

PATHS = [path for path in os.environ.get("MSRL_PEERS_PATH", "").split(os.pathsep) if path]


def peer_module(name: str) -> Any:
    """Return a module of a peer, or skip the test."""
    if not PATHS:
        pytest.skip(f"{name} is not here (set MSRL_PEERS_PATH)")
    sys.path.extend(path for path in PATHS if path not in sys.path)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} cannot be imported from MSRL_PEERS_PATH: {error}")
