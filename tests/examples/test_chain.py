"""Inputs and goals of `examples/chain`. `nox -s chain` runs its trainings."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from msrl.rewards.verifiers.base_acc import score
from support import ROOT

FILE = ROOT / "examples" / "chain" / "run.py"


@pytest.fixture(scope="module")
def chain() -> ModuleType:
    spec = importlib.util.spec_from_file_location("chain_example", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chain_example"] = module
    spec.loader.exec_module(module)
    return module


def test_pairs_have_a_right_and_a_wrong_answer_to_problems_that_are_not_held_out(
    chain: ModuleType,
) -> None:
    pairs = chain.make_pairs(0)
    heldout = {problem.question for problem in chain.quickstart_inputs.heldout_problems()}
    assert len(pairs) == chain.NUM_PAIRS
    assert not heldout & {pair["prompt"] for pair in pairs}
    for pair in pairs[:300]:
        left, sign, right = pair["prompt"].removeprefix("What is ").removesuffix("?").split()
        result = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert score(pair["chosen"], str(result)) == 1.0
        assert score(pair["rejected"], str(result)) == 0.0


def test_a_folder_with_other_files_is_not_replaced(chain: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        chain.Chain(tmp_path, 0).run()
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_every_missed_goal_is_listed(chain: ModuleType) -> None:
    reached = chain.Results(sft=0.6, pairs=0.95, grpo=0.9, student=0.5, distilled=0.88)
    assert reached.failures() == []
    for changes in ({"pairs": 0.8}, {"grpo": 0.65, "sft": 0.6}, {"distilled": 0.55}):
        assert replace(reached, **changes).failures()
