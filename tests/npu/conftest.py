"""Tests on simulated NPUs, which `nox -s npu` runs. They are skipped everywhere else."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulator import is_enabled

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not is_enabled():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="needs the simulator: run nox -s npu"))
