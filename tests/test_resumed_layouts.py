"""Resumed trainings: update counts of frozen stages, equal replicas and offloaded memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from msrl.trainer.launch import run_ranks
from msrl.trainer.settings import Layout
from support import python_path
from training_cases import DROPOUT, FROZEN, models, randomize
from training_ranks import Case, Result

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    from msrl.platforms import get

    root = tmp_path_factory.mktemp("resumed")
    model, frozen, dropped = root / "model", root / "frozen", root / "dropped"
    randomize(models()["qwen2 tied"]).save_pretrained(model)
    two_stages, lora = Layout(pp=2), {"lora": DROPOUT}
    cases = [
        Case("frozen", model, two_stages, freeze=FROZEN, steps=4, save_at=2, save_to=frozen),
        Case(
            "frozen resumed",
            model,
            two_stages,
            freeze=FROZEN,
            steps=4,
            first_step=2,
            resume_from=frozen,
        ),
        Case("dropout", model, steps=2, save_at=2, save_to=dropped, more=lora),
        Case(
            "dropout resumed tp2",
            model,
            Layout(tp=2),
            steps=4,
            first_step=2,
            resume_from=dropped,
            more=lora,
        ),
    ]
    messages = run_ranks(
        "training_ranks:main",
        cases,
        num_ranks=2,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    return {result.name: result for result in messages}


def test_a_frozen_first_stage_keeps_its_update_count_across_a_resume(
    results: dict[str, Result],
):
    uninterrupted, resumed = results["frozen"], results["frozen resumed"]
    assert resumed.reports == uninterrupted.reports[2:]
    for name, weight in uninterrupted.weights.items():
        np.testing.assert_array_equal(resumed.weights[name], weight, err_msg=name)


def test_lora_dropout_resumed_with_another_tp_size_keeps_replicas_equal(
    results: dict[str, Result],
):
    """`training_ranks` checks the replicas; different random numbers would change them."""
    assert [np.isfinite(report["loss"]) for report in results["dropout resumed tp2"].reports] == [
        True,
        True,
    ]


def test_an_offloaded_optimizer_has_no_device_memory_during_the_backward_pass(tmp_path: Path):
    """This includes the first step and the steps after saving or loading a checkpoint."""
    from msrl.platforms import get

    randomize(models()["qwen2 tied"]).save_pretrained(tmp_path / "model")
    job = (tmp_path / "model", tmp_path / "saves")
    (state_bytes,) = run_ranks(
        "resting_ranks:main",
        job,
        num_ranks=1,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    assert state_bytes == [0, 0, 0, 0]
