"""Learning curves: GRPO improves on held-out problems, flipped signs do not.

`nox -s learning` checks the other presets and the asynchronous modes on three seeds.
"""

from __future__ import annotations

import pytest
from benchmarks.learning import FLIPPED, Runner, accuracy, evaluations, has_learned, sft_accuracy

pytestmark = [pytest.mark.slow, pytest.mark.full]
STEPS = 10


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    return Runner(tmp_path_factory.mktemp("learning") / "runs", seed=0)


@pytest.fixture(scope="module")
def start(runner: Runner) -> float:
    """Held-out accuracy of the fine-tuned model, measured by `msrl generate`."""
    return sft_accuracy(runner)


@pytest.mark.timeout(1800)
def test_grpo_improves_held_out_accuracy_by_ten_points(runner: Runner, start: float):
    reached = accuracy(runner, "grpo", 0, STEPS)
    assert evaluations(runner, f"grpo-0-{STEPS}")[0] == pytest.approx(start), (
        "evaluations agree with `msrl generate`"
    )
    assert has_learned(start, [reached])


@pytest.mark.timeout(1800)
def test_flipped_signs_are_not_learning(runner: Runner, start: float):
    assert not has_learned(start, [accuracy(runner, FLIPPED, 0, STEPS)])
