"""What the trainer does where the device is not the CPU, as far as that can be told without one: what it asks of its parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from msrl.platforms import get
from msrl.trainer import learner
from msrl.trainer.learner import Learner


@pytest.mark.parametrize(("platform", "dtype"), [("cpu", torch.float64), ("cuda", torch.float64), ("npu", torch.float32)])
def test_sums_over_ranks_are_of_a_type_that_the_back_end_adds(platform: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr(learner.dist, "all_reduce", lambda totals, group: seen.append(totals.dtype))
    monkeypatch.setattr(learner.parallel_state, "get_data_parallel_group", lambda: None)
    worker: Any = SimpleNamespace(is_last_stage=True, platform=get(platform), layout=SimpleNamespace(pp=1))
    assert Learner.reduce(worker, [{"loss": torch.tensor(1.5)}, {"loss": torch.tensor(2.0)}], 7) == {"loss": 0.5}
    assert seen == [dtype]
