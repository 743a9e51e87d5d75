"""Tasks of reasoning-gym: rows from a name, mixtures, and scores from the records of rows."""

from __future__ import annotations

import inspect
import json
import os
import random
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msrl import reasoning_tasks
from msrl.config.schema import Config
from msrl.data.dataset import PromptDataset
from msrl.data.files.location import mistake, names_rows
from msrl.data.tasks import reasoning_gym as tasks
from msrl.data.tasks._rows import open_rows
from msrl.errors import MsrlError
from msrl.reasoning_tasks import decode, encode
from msrl.rewards.rows import RowSources
from msrl.rewards.score import Scorer
from msrl.rewards.sources import Source
from msrl.rewards.verifiers import reasoning_gym as verifier
from msrl.types import Completion, Prompt, RolloutGroup
from msrl.workflows import preprocess
from support import assert_mentions, mentions
from test_train_from_rows import plan, prefix_of
from tiny_qwen2 import make_tokenizer, save_model
from training_runs import children

# An input of each package of tasks, and how its first question begins.
TASKS = {
    "reasoning_gym": ("reasoning_gym:leg_counting?size=2&seed=3&max_animals=4", "Your task is to")
}
# Tasks whose generators evaluate own texts, and whose scorers do not.
GENERATE_BY_EVALUATION = {"basic_arithmetic", "codeio"}
SLOW = {"knight_swap"}  # half a second for each row


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def package() -> Any:
    pytest.importorskip("reasoning_gym")
    return reasoning_tasks


def settings(tokenizer: str, *inputs: str, **more: object) -> Config:
    values = {"input": list(inputs), "tokenizer": tokenizer, "template": "qwen", **more}
    return Config.model_validate({"preprocess": values}, strict=False)


def rows(name: str) -> list[Any]:
    return list(open_rows(name).generate())


def test_values_that_json_lacks_survive_a_record() -> None:
    value = {"a": (1, (2.5, "x")), "b": {1: [None, True]}, "!tuple": [3], "c": {}}
    assert decode(json.loads(json.dumps(encode(value)))) == value
    with pytest.raises(MsrlError, match=mentions("set")):
        encode({"a": {1, 2}})


@pytest.mark.parametrize(
    ("text", "is_formula", "is_literal"),
    [
        ("(3 + 4) * 6 - 1/2", True, False),
        ("x**2/2 + sin(x) + C", True, False),
        ("[[1, -2], ['a', 'b']]", False, True),
        ("a plain answer", False, True),
        ("ABCD", False, True),
        ("(1 + 2", True, True),  # neither can be parsed
        ("__import__('os').system('true')", False, False),
        ("__import__('os').system('true')!", False, True),  # sympy reads a factorial
        ("().__class__.__base__", False, False),
        ("[entry['answer']]", False, False),
        ("[x for x in ().__class__.__mro__]", False, False),
        ("f'{exit()}'", False, False),
        ("eval(x)", False, False),
        ("ｅval(x)", False, False),
        ("lambda: x", False, False),
        ("0x12 << 1", True, False),
    ],
)
def test_answers_with_code_are_neither_literals_nor_formulas(
    text: str, is_formula: bool, is_literal: bool
) -> None:
    assert (verifier.is_formula(text), verifier.is_literal(text)) == (is_formula, is_literal)


def test_a_missing_package_is_one_line_with_its_extra(
    tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(
        MsrlError, match=mentions("reasoning_gym:chain_sum", "msrl[reasoning]")
    ) as e:
        preprocess.check(settings(tokenizer, "reasoning_gym:chain_sum", show=1))
    assert "\n" not in str(e.value)
    assert_mentions(verifier.refusal(), "msrl[reasoning]")
    assert names_rows("reasoning_gym:chain_sum")
    assert_mentions(mistake("reasoning_gym:chain_sum"), "not installed")


@pytest.mark.parametrize("answer", ["7", "{}", '{"task": 1}', "[" * 100_000, '{"task": "a"}'])
def test_a_ground_truth_that_is_no_record_is_refused_before_the_run(answer: str) -> None:
    sources = RowSources([Source(verifier="reasoning_gym")])
    with pytest.raises(MsrlError, match=mentions("row 4", "record of reasoning-gym")) as error:
        sources.check([Prompt(4, np.zeros(1, np.int64), answer)])
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("chain_sums", ("chain_sums", "did you mean 'chain_sum'")),
        ("chain_sum?sise=3", ("sise", "'size'")),
        ("chain_sum?size=0", ("size=0", "from 1")),
        ("chain_sum?seed=-1", ("seed=-1", "from 0")),
        ("chain_sum?size=3&size=4", ("size", "twice")),
        ("chain_sum?min_terms", ("min_terms", "no value")),
        ("chain_sum?min_terms=many", ("min_terms=many", "integer")),
        ("chain_sum?min_terms=9&max_terms=3", ("min_terms=9", "max_terms")),
        ("composite", ("composite", "data.blend")),
        ("", ("names no task",)),
    ],
)
def test_a_wrong_name_is_one_line(
    name: str, fragments: tuple[str, ...], tokenizer: str, package: Any
) -> None:
    text = f"reasoning_gym:{name}"
    with pytest.raises(MsrlError, match=mentions(f"preprocess.input={text}", *fragments)) as error:
        preprocess.check(settings(tokenizer, text, show=1))
    assert "\n" not in str(error.value)
    assert_mentions(mistake(text), *fragments)


@pytest.mark.slow
def test_rows_follow_from_the_name_alone(package: Any) -> None:
    for task in ("list_functions", "word_ladder"):  # they draw from global states and from sets
        name = f"reasoning_gym:{task}?size=3&seed=5"
        first = rows(name)
        random.random()  # the state of this process has no effect
        assert first == rows(name) and len(first) == 3
        fewer = rows(f"reasoning_gym:{task}?size=2&seed=5")
        assert [row["record"]["entry"] for row in fewer] == [
            row["record"]["entry"] for row in first[:2]
        ]


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_mixed_and_scored_in_killable_processes(
    name: str, tokenizer: str, tmp_path: Path, package: Any
) -> None:
    text, question = TASKS[name]
    prefix = str(tmp_path / "data")
    second = f"{name}:countdown?size=1&min_numbers=2&max_numbers=2"
    manifest = preprocess.run(settings(tokenizer, text, second, output_prefix=prefix))
    assert manifest is not None and (manifest.kind, manifest.num_examples) == ("prompts", 3)
    prompts = list(PromptDataset(prefix))
    assert [prompt.extra["tag"] for prompt in prompts] == ["leg_counting"] * 2 + ["countdown"]
    records = [json.loads(prompt.answer) for prompt in prompts]
    assert records[0]["entry"]["question"].startswith(question)
    assert records[1]["index"] == 1 and records[1]["parameters"]["max_animals"] == 4
    right = [f"So <answer>{record['entry']['answer']}</answer>" for record in records]
    code = f"<answer>__import__('pathlib').Path('{tmp_path}/run').touch()</answer>"
    texts = [(answer, "<answer>zzz</answer>", "no tags", code) for answer in right]
    groups = [
        RolloutGroup(prompt, tuple(completion(t) for t in answers))
        for prompt, answers in zip(prompts, texts, strict=True)
    ]
    with Scorer([Source(verifier=name)], 1) as scorer:
        scorer.check(prompts)
        scores = scorer.score(groups)
    totals = [[reward.total for reward in group.rewards] for group in scores.groups]
    assert not scores.failures
    assert [row[0] for row in totals] == [1.0, 1.0, 1.0]
    assert max(score for row in totals for score in row[1:]) <= 0.01
    assert totals[2][3] == 0.0 and not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_training_generates_the_rows_of_a_task_once_for_a_version_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: Any
) -> None:
    monkeypatch.setenv("MSRL_DATA_CACHE", str(tmp_path / "cache"))
    save_model(tmp_path / "model", tied=True, positions=128)
    run = plan(tmp_path / "model", "reasoning_gym:chain_sum?size=2", "train-grpo")
    prefix = prefix_of(run)
    assert [prompt.extra["tag"] for prompt in PromptDataset(prefix)] == ["chain_sum"] * 2
    with monkeypatch.context() as patch:
        patch.setattr(preprocess, "write", None)
        assert prefix_of(run) == prefix
    monkeypatch.setattr(tasks, "package_version", lambda: "0.1.0")
    assert prefix_of(run) != prefix


@pytest.mark.slow
def test_a_row_that_cannot_be_generated_is_a_bad_row(
    tokenizer: str, tmp_path: Path, package: Any
) -> None:
    impossible = "min_numbers=2&max_numbers=2&min_target=99990&max_target=99999"
    name = f"reasoning_gym:countdown?size=2&{impossible}"
    inputs = (name, "reasoning_gym:chain_sum?size=1")
    prefix = str(tmp_path / "data")
    with pytest.raises(MsrlError, match=mentions(f"{name}: row 1", "generated")) as error:
        preprocess.run(settings(tokenizer, *inputs, output_prefix=prefix))
    assert "\n" not in str(error.value) and not list(tmp_path.iterdir())
    dropped = settings(tokenizer, *inputs, output_prefix=prefix, on_bad_row="drop")
    manifest = preprocess.run(dropped)
    assert manifest is not None and manifest.num_examples == 1
    assert list(manifest.dropped.values()) == [2]


@pytest.mark.slow
def test_the_end_of_the_generating_process_is_one_message(package: Any) -> None:
    name = "reasoning_gym:chain_sum?size=1000000"
    generated = open_rows(name).generate()
    next(generated)
    (pid,) = (pid for pid, line in children(os.getpid()).items() if "data.tasks._worker" in line)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(MsrlError, match=mentions(name, "ended after row", "-9")) as error:
        list(generated)
    assert "\n" not in str(error.value)


def own_score(dataset: Any, claimed: str, entry: dict[str, Any]) -> float:
    """Return the score of the package; an answer that it cannot read is wrong."""
    try:
        return dataset.score_answer(claimed, entry)
    except Exception:
        return 0.0


def completion(text: str) -> Completion:
    return Completion(np.zeros(0, np.int64), np.zeros(0, np.float32), "stop", 0, text)


@pytest.mark.slow
def test_the_record_of_every_task_scores_as_its_entry(package: Any) -> None:
    """The oracle is the package, on the entries that it generates."""
    factory = pytest.importorskip("reasoning_gym.factory")
    refused: dict[str, str] = {}
    for task in sorted(factory.DATASETS.keys() - {"composite"} - SLOW):
        parameters = {"size": 2, "seed": 1}
        dataset = reasoning_tasks.make_dataset(task, parameters)
        record = reasoning_tasks.make_record(dataset, task, parameters, 1)
        with reasoning_tasks._seeded("1 1"):
            entry = dataset[1]
        assert {**entry["metadata"]} == decode(record["entry"]["metadata"]), task
        truth = json.dumps(record)
        refused[task] = verifier.answer_refusal(truth) or ""
        for claimed in filter(None, (entry["answer"], "17")):
            got = verifier.score(f"<answer>{claimed}</answer>", truth)
            assert got == pytest.approx(own_score(dataset, claimed.strip(), entry)), (task, claimed)
        assert verifier.score("no tags", truth) == dataset.score_answer(None, entry), task
        assert verifier.explain("<answer>1</answer>", truth)
    assert not {task: reason for task, reason in refused.items() if reason}


@pytest.mark.slow
def test_every_task_that_evaluates_text_is_guarded(package: Any) -> None:
    factory = pytest.importorskip("reasoning_gym.factory")
    evaluation = re.compile(r"(?<![\w.])(eval|exec)\(|sympy\.parse_expr|sp\.parse_expr|sympify\(")
    imported = re.compile(r"from sympy.* import .*parse_expr")

    def evaluates(task: str) -> bool:
        source = inspect.getsource(sys.modules[factory.DATASETS[task][0].__module__])
        return bool(evaluation.search(source) or imported.search(source))

    found = {task for task in factory.DATASETS if evaluates(task)} - GENERATE_BY_EVALUATION
    assert found == verifier.LITERALS | verifier.FORMULAS | verifier.EVALUATED.keys()


def hostile_records() -> Iterator[tuple[str, dict[str, Any]]]:
    code = "__import__('os').getpid()"
    yield "number_sorting", {"answer": code, "metadata": {"direction": "ascending"}}
    yield "bitwise_arithmetic", {"answer": "0x1", "metadata": {"problem": code}}
    yield "simple_integration", {"answer": "x", "metadata": {"integrand": code, "variable": "x"}}
    yield "simple_integration", {"answer": "x", "metadata": {}}


@pytest.mark.slow
@pytest.mark.parametrize(("task", "entry"), hostile_records())
def test_a_row_whose_text_the_package_would_execute_is_refused(
    task: str, entry: dict[str, Any], package: Any
) -> None:
    record = {"task": task, "parameters": {}, "entry": {"question": "?", **entry}}
    assert_mentions(verifier.answer_refusal(json.dumps(record)), task, "no formula")
    with pytest.raises(MsrlError):
        verifier.score("<answer>1</answer>", json.dumps(record))


@pytest.mark.slow
def test_a_record_of_an_unknown_task_is_refused(package: Any) -> None:
    entry = {"question": "?", "answer": "1", "metadata": {}}
    record = {"task": "chain_sums", "parameters": {}, "entry": entry}
    assert_mentions(verifier.answer_refusal(json.dumps(record)), "chain_sums", "'chain_sum'")
