"""What several tests share: where the real inputs are, and where processes that they start find modules."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def python_path() -> str:
    """PYTHONPATH for processes that import test modules: this folder, then what this process itself was given."""
    return os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def shared_data(*parts: str) -> Path:
    """A file or folder of the real inputs (`../shared/data`, or MSRL_TEST_DATA); skips the test where it is absent."""
    root = Path(os.environ.get("MSRL_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
    path = root.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"real inputs are not here: {path} (set MSRL_TEST_DATA)")
    return path
