"""Tasks of the laptop example: worked answers, held-out questions and rewards."""

import importlib.util
import json
import sys

import pytest
import yaml

from msrl.rewards.verifiers.regex_answer import score
from support import ROOT

LAPTOP = ROOT / "examples" / "laptop"
SPEC = importlib.util.spec_from_file_location("laptop_tasks", LAPTOP / "tasks.py")
tasks = importlib.util.module_from_spec(SPEC)
sys.modules["laptop_tasks"] = tasks
SPEC.loader.exec_module(tasks)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("laptop")
    tasks.write_tasks(folder, 0)
    return {name: rows(folder / f"{name}.jsonl") for name in ("sft", "rl", "heldout")}


def options(task):
    """Return the options of the verifier that scores the rows of a task."""
    sources = yaml.safe_load((LAPTOP / "grpo.yaml").read_text())["reward"]["sources"]
    (own,) = [source for source in sources if task in source["tags"]]
    return own["options"]


@pytest.mark.sample(1)
@pytest.mark.parametrize("task", tasks.TASKS)
def test_worked_answers_are_right_for_the_reward(task):
    for _, problem in tasks.problems({task: 80}, "test"):
        assert score(problem.solution, problem.result, **options(task)) == 1.0
        for step in problem.steps:
            calculation, is_one, value = step.partition(" = ")
            if is_one:
                assert eval(calculation) == int(value)


def test_held_out_questions_are_neither_trained_nor_changed_by_the_seed(files, tmp_path):
    held_out = {row["question"] for row in files["heldout"]}
    assert len(held_out) == sum(tasks.NUM_HELDOUT.values())
    assert not held_out & {row["question"] for row in files["rl"]}
    assert not held_out & {row["messages"][0]["content"] for row in files["sft"]}
    tasks.write_tasks(tmp_path, 1)
    assert rows(tmp_path / "heldout.jsonl") == files["heldout"]
    assert rows(tmp_path / "sft.jsonl") != files["sft"]
