"""Resumed trainings keep the update count, equal copies and the offloaded optimizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from msrl.trainer.launch import run_ranks
from msrl.trainer.settings import Layout
from support import python_path
from training_cases import DROPOUT, FROZEN, make_model, randomize
from training_ranks import Case, Result

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    from msrl.platforms import get

    root = tmp_path_factory.mktemp("resumed")
    model, frozen, dropout = root / "model", root / "frozen", root / "dropout"
    randomize(make_model("qwen2 tied")).save_pretrained(model)
    pp2, lora = Layout(pp=2), {"lora": DROPOUT}
    cases = [
        Case("frozen", model, pp2, freeze=FROZEN, steps=4, save_at=2, save_to=frozen),
        Case(
            "frozen resumed",
            model,
            pp2,
            freeze=FROZEN,
            steps=4,
            first_step=2,
            resume_from=frozen,
        ),
        Case("dropout", model, steps=2, save_at=2, save_to=dropout, more=lora),
        Case(
            "dropout resumed tp2",
            model,
            Layout(tp=2),
            steps=4,
            first_step=2,
            resume_from=dropout,
            more=lora,
        ),
    ]
    reports = run_ranks(
        "training_ranks:main",
        cases,
        num_ranks=2,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    return {result.name: result for result in reports}


@pytest.mark.full
def test_a_first_stage_without_trained_parameters_keeps_the_update_count(
    results: dict[str, Result],
):
    uninterrupted, resumed = results["frozen"], results["frozen resumed"]
    assert resumed.reports == uninterrupted.reports[2:]
    for name, weight in uninterrupted.weights.items():
        np.testing.assert_array_equal(resumed.weights[name], weight, err_msg=name)


@pytest.mark.full
def test_adapter_dropout_resumed_at_another_tensor_parallel_size_keeps_copies_equal(
    results: dict[str, Result],
):
    """The ranks themselves compare the copies, which different random numbers would change."""
    assert [np.isfinite(report["loss"]) for report in results["dropout resumed tp2"].reports] == [
        True,
        True,
    ]


@pytest.mark.full
def test_an_offloaded_optimizer_is_absent_during_forward_and_backward(tmp_path: Path):
    """This includes the steps after a save or a load, which onload the optimizer for a moment."""
    from msrl.platforms import get

    randomize(make_model("qwen2 tied")).save_pretrained(tmp_path / "model")
    (num_bytes,) = run_ranks(
        "offload_ranks:main",
        (tmp_path / "model", tmp_path / "saves"),
        num_ranks=1,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    assert num_bytes == [0, 0, 0, 0]
