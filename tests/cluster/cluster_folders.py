"""Folders of a Ray cluster that a test starts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from msrl.cluster import launch


@contextmanager
def cluster_folders(state: Path) -> Iterator[None]:
    """Use a separate state and a short temporary path, and no token of the environment.

    The cluster of the state is stopped at the end.
    """
    patch = pytest.MonkeyPatch()
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    patch.setenv("RAY_TMPDIR", folder)
    patch.setenv("MSRL_STATE_DIR", str(state))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        patch.delenv(name, raising=False)
    yield
    launch.down()
    patch.undo()
    shutil.rmtree(folder)
