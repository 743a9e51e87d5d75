"""What a training that goes on must not lose: the count of updates where a rank has nothing to train, copies that are alike, memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from msrl.trainer.launch import run_ranks
from msrl.trainer.settings import Layout
from support import python_path
from training_cases import DROPOUT, FROZEN, models, randomised
from training_ranks import Case, Result

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    from msrl.platforms import get

    root = tmp_path_factory.mktemp("resumed")
    model, frozen, dropped = root / "model", root / "frozen", root / "dropped"
    randomised(models()["qwen2 tied"]).save_pretrained(model)
    halves, lora = Layout(pp=2), {"lora": DROPOUT}
    cases = [
        Case("frozen", model, halves, freeze=FROZEN, steps=4, save_at=2, save_to=frozen),
        Case(
            "frozen resumed",
            model,
            halves,
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
    found = run_ranks(
        "training_ranks:main",
        cases,
        num_ranks=2,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    return {result.name: result for result in found}


def test_a_first_stage_without_trained_parameters_does_not_forget_how_many_updates_there_were(
    results: dict[str, Result],
):
    whole, resumed = results["frozen"], results["frozen resumed"]
    assert resumed.reports == whole.reports[2:]
    for name, weight in whole.weights.items():
        np.testing.assert_array_equal(resumed.weights[name], weight, err_msg=name)


def test_dropout_of_adapters_goes_on_at_another_tensor_parallel_size_with_copies_alike(
    results: dict[str, Result],
):
    """`training_ranks` looks at the copies of every case: ranks that drew different numbers would have parted them."""
    assert [np.isfinite(report["loss"]) for report in results["dropout resumed tp2"].reports] == [
        True,
        True,
    ]


def test_an_offloaded_optimizer_is_never_there_while_gradients_are_made(tmp_path: Path):
    """Not in the first step, and not in those after a checkpoint was saved or loaded, which need it for a moment."""
    from msrl.platforms import get

    randomised(models()["qwen2 tied"]).save_pretrained(tmp_path / "model")
    job = (tmp_path / "model", tmp_path / "saves")
    (found,) = run_ranks(
        "resting_ranks:main",
        job,
        num_ranks=1,
        platform=get("cpu"),
        env={"PYTHONPATH": python_path()},
    )
    assert found == [0, 0, 0, 0]
