"""Collectives over `hccl` between ranks on simulated NPUs."""

from __future__ import annotations

import os
from pathlib import Path

import npu_ranks
import pytest

from msrl.platforms import get
from msrl.trainer.launch import run_ranks
from support import python_path

# The module starts ranks.
pytestmark = pytest.mark.slow


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join((str(Path(__file__).parent), python_path()))}


@pytest.mark.parametrize("dtype", ["float32"])
def test_collectives_exchange_and_reduce_the_right_values(dtype: str):
    reports = run_ranks(
        "npu_ranks:main", dtype, num_ranks=4, platform=get("npu"), env=_environment()
    )
    assert sorted(rank for rank, _ in reports) == [0, 1, 2, 3]
    failed = {(rank, name) for rank, checks in reports for name, ok in checks.items() if not ok}
    assert not failed and all(checks.keys() == npu_ranks.ALL.keys() for _, checks in reports)
