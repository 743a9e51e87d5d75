"""Ranks on simulated NPUs: collectives over `hccl`, and training equal to that on the CPU.

The ranks of a platform start once and run all cases.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import families
import npu_ranks
from mixture_families import QWEN3_MOE
from msrl.config.sections.train import OffloadConfig
from msrl.platforms import get
from msrl.trainer.launch import run_ranks
from msrl.trainer.settings import Layout
from support import python_path
from training_cases import FULL, LORA, make_model, randomize
from training_ranks import Case, Result

TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}
TP2_PP2 = Layout(tp=2, pp=2)
OFFLOAD = OffloadConfig(optimizer=True, grads=True, params=True)
# Cases that must give the same losses on both platforms. A low learning rate leaves margin to the
# tolerance, since AdamW turns rounding errors of nearly zero gradients into whole steps.
CASES = {
    "ten SFT steps at TP 2 x PP 2": Case("", Path(), TP2_PP2, steps=10, lr=3e-4),
    "three policy updates at TP 2 x PP 2": Case(
        "", Path(), TP2_PP2, steps=3, lr=3e-4, loss="policy"
    ),
    "DP 2, offload and recomputation": Case(
        "", Path(), dp=2, steps=2, lr=3e-4, more={"offload": OFFLOAD, "recompute": FULL}
    ),
    "CP 2 and chunked logits": Case(
        "", Path(), Layout(cp=2), steps=2, lr=3e-4, loss="policy", more={"logit_chunk": 5}
    ),
    "LoRA at TP 2": Case("", Path(), Layout(tp=2), steps=2, lr=3e-4, more=LORA),
    "experts at EP 2": Case("", Path(), Layout(ep=2), steps=2, lr=3e-4),
    "experts in bfloat16": Case("", Path(), Layout(ep=2), steps=2, lr=3e-4, dtype="bfloat16"),
    "bfloat16 at TP 2": Case("", Path(), Layout(tp=2), steps=2, lr=3e-4, dtype="bfloat16"),
}
# Cases of two ranks with copies, gradients and sums whose readers must wait for the device.
DEFERRED = ("DP 2, offload and recomputation", "CP 2 and chunked logits")
# The module starts ranks. Ranks of the CPU must not load torch_npu, as on a machine without NPUs.
pytestmark = pytest.mark.slow
ENVIRONMENTS = {
    "npu": {"HCCL_CONNECT_TIMEOUT": "1200"},
    "cpu": {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
}


def _environment(platform: str, **variables: str) -> dict[str, str]:
    path = os.pathsep.join((str(Path(__file__).parent), python_path()))
    return {"PYTHONPATH": path, **ENVIRONMENTS[platform], **variables}


def _run(platform: str, cases: list[Case], **variables: str) -> dict[str, Result]:
    on_platform = [dataclasses.replace(case, platform=platform) for case in cases]
    results: list[Any] = run_ranks(
        "training_ranks:main",
        on_platform,
        num_ranks=max(case.world for case in cases),
        platform=get(platform),
        env=_environment(platform, **variables),
    )
    return {result.name: result for result in results}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return folders of small random models: a dense one and a mixture of experts."""
    root = tmp_path_factory.mktemp("models")
    randomize(make_model("qwen3")).save_pretrained(root / "dense")
    return {
        "dense": root / "dense",
        "experts": families.save_model(root / "experts", QWEN3_MOE),
    }


def _cases(folders: dict[str, Path]) -> Iterator[Case]:
    for name, case in CASES.items():
        model = folders["experts" if case.layout.ep > 1 else "dense"]
        reference = model if case.loss == "policy" else None
        yield dataclasses.replace(case, name=name, model=model, reference=reference)


@pytest.fixture(scope="module")
def npu(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Return the results of all cases on simulated NPUs, with a training that is resumed."""
    saves, model = tmp_path_factory.mktemp("saves"), folders["dense"]
    whole = Case("whole", model, TP2_PP2, steps=4, save_at=2, save_to=saves)
    resumed = Case("rest", model, TP2_PP2, steps=4, first_step=2, resume_from=saves)
    # Ranks that a case does not need wait for the next one, so cases of all ranks come first.
    return _run("npu", [whole, resumed, *_cases(folders)])


@pytest.fixture(scope="module")
def cpu(folders: dict[str, Path]) -> dict[str, Result]:
    """Return the results of all cases on the CPU."""
    return _run("cpu", list(_cases(folders)))


@pytest.mark.parametrize("name", CASES)
def test_losses_gradients_and_weights_equal_those_of_the_cpu(
    npu: dict[str, Result], cpu: dict[str, Result], name: str
):
    ours, theirs, tolerance = npu[name], cpu[name], TOLERANCES[CASES[name].dtype]
    assert len(ours.reports) == CASES[name].steps
    for report, expected in zip(ours.reports, theirs.reports, strict=True):
        assert report["loss"] == pytest.approx(expected["loss"], abs=tolerance)
        assert report["grad_norm"] == pytest.approx(expected["grad_norm"], rel=10 * tolerance)
    assert ours.weights.keys() == theirs.weights.keys()
    for key, weight in theirs.weights.items():
        np.testing.assert_allclose(ours.weights[key], weight, atol=10 * tolerance)


def test_a_resumed_training_repeats_every_bit(npu: dict[str, Result]):
    complete, resumed = npu["whole"], npu["rest"]
    assert resumed.reports == complete.reports[2:]
    _assert_same_bits(resumed, complete)


def _assert_same_bits(ours: Result, theirs: Result) -> None:
    for name, weight in theirs.weights.items():
        assert ours.weights[name].tobytes() == weight.tobytes(), name


@pytest.fixture(scope="module")
def deferred(folders: dict[str, Path]) -> dict[str, Result]:
    """Return the results of ranks whose kernels and copies run only when something waits."""
    cases = [case for case in _cases(folders) if case.name in DEFERRED]
    return _run("npu", cases, NPU_SIM_DEFER="1")


@pytest.mark.parametrize("name", DEFERRED)
def test_no_training_reads_results_before_the_device_has_written_them(
    npu: dict[str, Result], deferred: dict[str, Result], name: str
):
    assert deferred[name].reports == npu[name].reports
    _assert_same_bits(deferred[name], npu[name])


def test_collectives_exchange_and_reduce_the_right_values():
    dtypes = ("float32", "bfloat16", "int64")
    reports = run_ranks(
        "npu_ranks:main", dtypes, num_ranks=4, platform=get("npu"), env=_environment("npu")
    )
    assert sorted(rank for rank, _ in reports) == [0, 1, 2, 3]
    failed = {(rank, name) for rank, checks in reports for name, ok in checks.items() if not ok}
    assert not failed
    assert {len(checks) for _, checks in reports} == {len(dtypes) * len(npu_ranks.ALL) + 1}
