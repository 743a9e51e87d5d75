"""Ranks on simulated NPUs: collectives over `hccl`, and training equal to that on the CPU."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import npu_ranks
import numpy as np
import pytest

from msrl.platforms import get
from msrl.trainer.launch import run_ranks
from msrl.trainer.settings import Layout
from support import python_path
from training_cases import models, randomize
from training_ranks import Case, Result

TOLERANCE = 1e-5
TP2_PP2 = Layout(tp=2, pp=2)


# The module starts ranks. Those of the CPU must not load torch_npu, as on a machine without NPUs.
pytestmark = pytest.mark.slow
ENVIRONMENTS = {"npu": {}, "cpu": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}}


def _environment(platform: str) -> dict[str, str]:
    path = os.pathsep.join((str(Path(__file__).parent), python_path()))
    return {"PYTHONPATH": path, **ENVIRONMENTS[platform]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_collectives_exchange_and_reduce_the_right_values(dtype: str):
    reports = run_ranks(
        "npu_ranks:main", dtype, num_ranks=4, platform=get("npu"), env=_environment("npu")
    )
    assert sorted(rank for rank, _ in reports) == [0, 1, 2, 3]
    failed = {(rank, name) for rank, checks in reports for name, ok in checks.items() if not ok}
    assert not failed and all(checks.keys() == npu_ranks.ALL.keys() for _, checks in reports)


def _run(platform: str, cases: list[Case]) -> list[Result]:
    on_platform = [dataclasses.replace(case, platform=platform) for case in cases]
    return run_ranks(
        "training_ranks:main",
        on_platform,
        num_ranks=4,
        platform=get(platform),
        env=_environment(platform),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a small random model."""
    path = tmp_path_factory.mktemp("model")
    randomize(models()["qwen3"]).save_pretrained(path)
    return path


def _assert_equal(ours: Result, theirs: Result, tolerance: float) -> None:
    for report, expected in zip(ours.reports, theirs.reports, strict=True):
        assert report["loss"] == pytest.approx(expected["loss"], abs=tolerance)
        assert report["grad_norm"] == pytest.approx(expected["grad_norm"], abs=10 * tolerance)
    for name, weight in theirs.weights.items():
        np.testing.assert_allclose(ours.weights[name], weight, atol=10 * tolerance)


def test_ten_sft_steps_at_tp2_pp2_equal_those_on_the_cpu(folder: Path):
    cases = [Case("sft", folder, TP2_PP2, steps=10)]
    (ours,), (theirs,) = (_run(platform, cases) for platform in ("npu", "cpu"))
    _assert_equal(ours, theirs, TOLERANCE)


def test_three_policy_updates_at_tp2_pp2_equal_those_on_the_cpu(folder: Path):
    cases = [Case("grpo", folder, TP2_PP2, steps=3, loss="policy", reference=folder)]
    (ours,), (theirs,) = (_run(platform, cases) for platform in ("npu", "cpu"))
    _assert_equal(ours, theirs, TOLERANCE)


def test_a_resumed_training_repeats_every_bit(folder: Path, tmp_path: Path):
    whole = Case("whole", folder, TP2_PP2, steps=6, save_at=3, save_to=tmp_path)
    rest = Case("rest", folder, TP2_PP2, steps=6, first_step=3, resume_from=tmp_path)
    (complete,), (resumed,) = _run("npu", [whole]), _run("npu", [rest])
    assert resumed.reports == complete.reports[3:]
    assert all(
        resumed.weights[name].tobytes() == w.tobytes() for name, w in complete.weights.items()
    )
