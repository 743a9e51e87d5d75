"""`msrl eval`: intervals, checkpoints, results that are kept, refusals, and real evaluations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config_inputs import make_data, make_manifest, make_mcore, make_model
from msrl.algorithms.intervals import mean_interval
from msrl.algorithms.pass_at_k import pass_at_k
from msrl.checkpoint.convert import McoreTarget, write_mcore
from msrl.checkpoint.source import open_weights
from msrl.cli.configuration import load_configuration as load
from msrl.config.schema import Config
from msrl.errors import ManyErrors, MsrlError
from msrl.models.parallel_layout import ParallelLayout
from msrl.tracking.curves import Point, plot_curves
from msrl.workflows import preprocess
from msrl.workflows.evaluate import run as evaluation
from msrl.workflows.evaluate.checkpoints import find_checkpoints, with_unique_labels
from msrl.workflows.evaluate.results import Result, ResultFolder, result_table
from msrl.workflows.evaluate.run import intervals
from support import assert_each_mentions, assert_mentions, checked_plan, mentions
from tiny_qwen2 import save_model
from training_runs import write_rows

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("right", "count", "expected"),
    [
        (8, 10, (0.4902, 0.9433)),  # Brown, Cai and DasGupta (2001), and by hand
        (0, 10, (0.0, 0.2775)),
        (10, 10, (0.7225, 1.0)),
        (1, 1, (0.2065, 1.0)),
    ],
)
def test_the_interval_of_right_and_wrong_answers_is_wilsons(
    right: int, count: int, expected: tuple[float, float]
):
    values = np.array([1.0] * right + [0.0] * (count - right))
    assert mean_interval(values, 1) == pytest.approx(expected, abs=1e-4)


def test_samples_narrow_an_interval_down_to_that_of_independent_prompts():
    def width(values: list[float], samples: int) -> float:
        low, high = mean_interval(np.array(values), samples)
        assert 0.0 <= low <= np.mean(values) <= high <= 1.0
        return high - low

    same, mixed = width([1.0] * 5 + [0.0] * 5, 8), width([0.75, 0.25] * 5, 8)
    equal = width([0.5] * 10, 8)
    assert same == pytest.approx(width([1.0] * 5 + [0.0] * 5, 1))
    assert same > mixed > equal
    assert equal == pytest.approx(width([1.0, 0.0] * 40, 1))
    assert width([0.5] * 10, 8) < mean_interval(np.array([0.5] * 10), 8, 0.99)[1]


def test_intervals_are_over_the_prompts_that_a_source_decides():
    verdicts = [[True, False, False, False], None, [True, True, True, True]]
    computed = intervals(verdicts, 0.95)
    assert [*computed] == ["pass@1", "pass@2", "pass@4", "mean@4"]
    per_prompt = pass_at_k(np.array([1, 4]), 4, 2)
    assert (
        computed["pass@2"] == mean_interval(per_prompt, 4)
        and computed["pass@1"] == computed["mean@4"]
    )
    assert intervals([None], 0.95) == {}


def make_run(folder: Path, *steps: int) -> Path:
    """Write the folders of a run with checkpoints of these steps, without weights."""
    checkpoints = make_mcore(folder / "checkpoints")
    for step in steps:
        (checkpoints / f"iter_{step:07d}").mkdir()
        (checkpoints / "training" / f"iter_{step:07d}").mkdir(parents=True)
    tracker = checkpoints / "latest_checkpointed_iteration.txt"
    tracker.write_text(str(steps[-1] if steps else 1))
    return folder


def test_a_run_stands_for_all_its_checkpoints_and_every_model_has_another_label(tmp_path: Path):
    run, other = make_run(tmp_path / "a" / "grpo", 10, 20), make_run(tmp_path / "b" / "grpo", 20)
    model, twin = make_model(tmp_path / "base"), make_model(tmp_path / "b" / "base")
    iteration = run / "checkpoints" / "iter_0000010"
    paths = [run, run / "checkpoints", iteration, other, model, twin, model]
    evaluated = find_checkpoints(map(str, paths))
    assert [(c.label, c.step, c.version) for c in evaluated] == [
        ("grpo step 10", 10, 10),
        ("grpo step 20", 20, 20),
        ("b-grpo step 20", 20, 20),
        ("base", None, 0),
        ("b-base", None, 0),
    ]
    assert len({(c.series, c.root) for c in evaluated}) == len({c.series for c in evaluated}) == 4
    latest = find_checkpoints([str(run / "checkpoints")])
    assert [(c.label, c.iteration) for c in latest] == [("grpo step 20", 20)]
    (exported,) = find_checkpoints([str(make_model(run / "hf"))])
    assert exported.label == "grpo hf"
    converted = make_mcore(tmp_path / "mcore")
    (only,) = find_checkpoints([str(converted)])
    assert (only.label, only.step, only.iteration, only.version) == ("mcore", None, 1, 0)


def result(label: str, step: int | None = None, **changes: Any) -> Result:
    values: dict[str, Any] = {
        "label": label,
        "series": "run",
        "path": "/x",
        "step": step,
        "digest": "d",
        "num_prompts": 4,
        "num_samples": 2,
        "metrics": {"pass@1": 0.5, "reward": 0.25, "response_length": 7.0, "truncated": 0.0},
        "intervals": {"pass@1": (0.25, 0.75)},
        "seconds": 1.0,
        "samples": f"samples/{label}.jsonl",
    }
    return Result(**{**values, **changes})


def test_finished_checkpoints_stay_until_weights_or_settings_change(tmp_path: Path):
    settings = {"sampling.seed": 1, "sampling.stop": ("x",)}
    folder = ResultFolder(tmp_path / "out", settings, overwrite=False)
    assert not folder.is_finished("b", "d") and folder.plot() is None
    folder.add(result("b", 2), [{"response": "é"}])
    folder.add(result("a", 1), [])
    assert json.loads((tmp_path / "out/samples/b.jsonl").read_text())["response"] == "é"
    again = ResultFolder(tmp_path / "out", settings, overwrite=False)
    assert again.is_finished("a", "d") and not again.is_finished("a", "other")
    assert again.results == [result("a", 1), result("b", 2)]
    assert not ResultFolder(tmp_path / "out", settings, overwrite=True).is_finished("a", "d")
    path = again.plot()
    assert path is not None and path.read_bytes().startswith(PNG)
    with pytest.raises(MsrlError, match=mentions("evaluate.output", "sampling.seed", "overwrite")):
        ResultFolder(tmp_path / "out", {**settings, "sampling.seed": 2}, overwrite=False)
    assert not ResultFolder(tmp_path / "out", {"other": 1}, overwrite=True).results
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    content["checkpoints"][0]["step"] = "x"
    for value in ([], content):
        (tmp_path / "out" / "results.json").write_text(json.dumps(value))
        with pytest.raises(MsrlError, match=mentions("results.json", "msrl eval")):
            ResultFolder(tmp_path / "out", settings, overwrite=False)


def test_names_and_texts_that_are_not_utf8_are_written_with_escapes(tmp_path: Path):
    """Python reads the bytes of such a name as halves of characters, which JSON may hold, too."""
    root = make_run(tmp_path / "r\udcffn", 10, 20)
    names = [checkpoint.label for checkpoint in find_checkpoints([str(root)])]
    assert names == ["r\udcffn step 10", "r\udcffn step 20"]
    folder = ResultFolder(tmp_path / "out", {}, overwrite=False)
    for label in names:
        samples = folder.samples_file(label)
        folder.add(result(label, 10, path=str(root), samples=samples), [{"answer": "\ud83d é"}])
        row = json.loads((tmp_path / "out" / samples).read_text(encoding="utf-8"))
        assert row["answer"] == "\ud83d é"
    again = ResultFolder(tmp_path / "out", {}, overwrite=False)
    assert [entry.label for entry in again.results] == names and again.plot() is not None


def test_models_with_similar_names_have_different_files_of_samples(tmp_path: Path):
    folder = ResultFolder(tmp_path / "out", {}, overwrite=False)
    labels = ["grpo hf", "grpo_hf", "GRPO_hf"]
    for label in labels:
        folder.add(result(label, samples=folder.samples_file(label)), [{"response": label}])
    again = ResultFolder(tmp_path / "out", {}, overwrite=False)
    for entry in again.results:
        assert again.samples_file(entry.label) == entry.samples
        row = json.loads((tmp_path / "out" / entry.samples).read_text())
        assert row["response"] == entry.label
    assert len(again.results) == 3


def test_a_model_of_another_folder_does_not_replace_results(tmp_path: Path):
    first, second = make_run(tmp_path / "a" / "grpo", 10, 20), make_run(tmp_path / "b" / "grpo", 20)
    root = str(first / "checkpoints")
    folder = ResultFolder(tmp_path / "out", {}, overwrite=False)
    for step in (10, 20):
        stored = result(f"grpo step {step}", step, series="grpo", path=root, digest=str(step))
        folder.add(stored, [])

    def labels(run: Path, digest: str) -> list[str]:
        checkpoints = find_checkpoints([str(run)])
        digests = dict.fromkeys((checkpoint.label for checkpoint in checkpoints), digest)
        named = with_unique_labels(checkpoints, folder.folders(digests))
        return [checkpoint.label for checkpoint in named]

    assert labels(first, "new") == ["grpo step 10", "grpo step 20"]
    assert labels(second, "new") == ["b-grpo step 20"]
    assert labels(second, "20") == ["grpo step 20"]  # the folder was moved


def test_results_depend_on_the_files_of_own_rewards_and_environments(tmp_path: Path):
    files = {name: tmp_path / f"{name}.py" for name in ("score", "room", "other")}
    for file in files.values():
        file.write_text("a = 1")
    sources = [{"verifier": "acc"}, {"function": f"{files['score']}:score"}]
    mixture = {name: {"path": f"{files[name]}:Room"} for name in ("room", "other")}
    values = {"reward": {"sources": sources}, "environment": {"mixture": mixture}}
    config = Config.model_validate(values)
    before = evaluation.scoring_files(config)
    assert len(before) == 3
    for file in files.values():
        file.write_text("a = 2")
        changed = evaluation.scoring_files(config)
        assert [key for key in before if changed[key] != before[key]] == [
            key for key in before if str(file) in key
        ]
        file.write_text("a = 1")


def test_the_table_has_a_column_per_accuracy():
    lines = result_table([result("run step 1", 1), result("base", intervals={})])
    assert lines[0].split() == ["checkpoint", "pass@1", "reward", "length", "truncated"]
    assert "50.0% [25.0%, 75.0%]" in lines[1] and " - " in lines[2]
    assert all(line == line.rstrip() for line in lines)


def test_the_table_has_the_means_of_episodes_if_there_are_any():
    means = {"success": 0.25, "turns": 2.5, "tool_errors": 0.125, "faults": 0.0}
    episodes = result("a", metrics={**result("a").metrics, **means})
    lines = result_table([episodes, result("b")])
    text = " ".join(" ".join(lines).split())
    assert "success: 25.0% turns: 2.50 tool errors: 12.5%" in text
    assert text.count(": -") == 4  # the means that the other checkpoint does not have


def test_curves_are_drawn_by_step_or_by_model(tmp_path: Path):
    metrics, bands = {"pass@1": 0.5, "pass@2": 0.6}, {"pass@1": (0.4, 0.6), "pass@2": (0.5, 0.7)}
    steps = [Point("a", f"a {step}", step, metrics, bands) for step in (1, 2, 9)]
    assert plot_curves(steps, tmp_path / "steps.png")
    assert plot_curves([*steps, Point("b", "b", None, metrics, bands)], tmp_path / "models.png")
    for name in ("steps.png", "models.png"):
        assert (tmp_path / name).read_bytes().startswith(PNG)
    assert not plot_curves([Point("b", "b", None, {}, {})], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def mistakes(*sets: str) -> list[str]:
    try:
        checked_plan(load(sets=[*sets]), "eval")
    except ManyErrors as error:
        return [line.removeprefix("--set: ") for line in error.messages]
    return []


def test_settings_of_an_evaluation_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    make_run(tmp_path / "run", 1)
    (tmp_path / "empty").mkdir()
    make_manifest(make_data(tmp_path / "held"), "prompts")
    make_manifest(make_data(tmp_path / "sft"), "sft")
    good = ("evaluate.models=[model, run]", "data.eval=held", "reward.sources=[{verifier: acc}]")
    assert not mistakes(*good)
    assert_each_mentions(
        mistakes(), ("evaluate.models",), ("data.eval", "--data"), ("reward.sources", "missing")
    )
    (tmp_path / "run" / "config.yaml").write_text("{}")
    hint = "-c run/config.yaml"
    assert_each_mentions(
        mistakes("evaluate.models=[run]"), ("data.eval", hint), ("reward.sources", hint)
    )
    assert_each_mentions(
        mistakes(*good, "evaluate.models=[gone, empty]"),
        ("evaluate.models.0=gone", "not found"),
        ("evaluate.models.1=empty", "config.json"),
    )
    assert_each_mentions(mistakes(*good, "data.eval=sft"), ("data.eval=sft", "prompts"))
    assert_each_mentions(mistakes(*good, "data.eval=gone"), ("data.eval=gone", "preprocess"))
    assert_each_mentions(
        mistakes(*good, "eval.samples_per_prompt=4"), ("eval.samples_per_prompt=4", "greedy")
    )
    assert_each_mentions(mistakes(*good, "eval.source=other"), ("eval.source=other", "acc"))
    lake = "environment.name=frozen_lake"
    assert not mistakes(*good, lake) and not mistakes(*good[:2], lake)
    assert_each_mentions(
        mistakes(*good[:2], "environment.name=single_turn"), ("reward.sources", "missing")
    )
    assert_each_mentions(
        mistakes(*good, lake, "environment.options={sizes: 3}"), ("options.sizes", "size")
    )
    ranks = "reward.sources=[{model: model, engine: megatron}]"
    assert any("training ranks" in line for line in mistakes(*good, ranks))


ROWS = [{"instruction": f"{i}+{i}=", "output": f"{2 * i}"} for i in range(6)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with prompts, a model in both formats, and another model."""
    folder = tmp_path_factory.mktemp("inputs")
    save_model(folder / "base", tied=False)
    save_model(folder / "other", tied=False, seed=3)
    layout = ParallelLayout(2, 2)
    write_mcore(open_weights(folder / "base"), folder / "mcore", McoreTarget(layout))
    settings = {
        "input": [str(write_rows(folder / "rows.jsonl", ROWS))],
        "tokenizer": str(folder / "base"),
        "handler": "alpaca",
        "template": "qwen",
        "kind": "prompts",
        "output_prefix": str(folder / "held"),
    }
    preprocess.run(Config.model_validate({"preprocess": settings}))
    return folder


def config(inputs: Path, output: Path, *models: str, **sections: Any) -> Config:
    values: dict[str, Any] = {
        "model": {"dtype": "float32"},
        "data": {"eval": str(inputs / "held")},
        "rollout": {"max_prompt_tokens": 100, "max_response_tokens": 12},
        "eval": {"samples_per_prompt": 4, "sampling": {"temperature": 1.0, "seed": 5}},
        "reward": {
            "sources": [{"verifier": "regex_match", "options": {"pattern": "[a-zA-Z]"}}],
        },
        "evaluate": {"models": [str(inputs / name) for name in models], "output": str(output)},
    }
    return Config.model_validate({**values, **sections})


@pytest.mark.full
@pytest.mark.slow
def test_equal_weights_get_equal_answers_and_only_new_checkpoints_are_evaluated(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    evaluation.run(config(inputs, out, "base", "mcore", "other"))
    table = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in table if not line.startswith(" ")]
    assert names == ["base", "mcore", "other"]  # the values do not fit beside them

    def samples(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (out / f"samples/{name}.jsonl").open()]

    answers = samples("base")
    assert len(answers) == len(ROWS) * 4
    assert [row["response_ids"] for row in answers] == [
        row["response_ids"] for row in samples("mcore")
    ]
    assert [row["response"] for row in answers] != [row["response"] for row in samples("other")]
    content = json.loads((out / "results.json").read_text())
    first, second, _ = content["checkpoints"]
    assert first["metrics"] == second["metrics"] and first["intervals"] == second["intervals"]
    right = np.array([row["is_right"] for row in answers], dtype=float).reshape(len(ROWS), 4)
    assert first["metrics"]["mean@4"] == pytest.approx(right.mean())
    assert first["metrics"]["pass@4"] == pytest.approx(right.max(axis=1).mean())
    assert all(len(row["response_ids"]) <= 12 for row in answers)
    assert (out / "curve.png").read_bytes().startswith(PNG)
    before = (out / "results.json").stat().st_mtime_ns
    evaluation.run(config(inputs, out, "base", "mcore"))
    printed = capsys.readouterr()
    assert printed.out.splitlines() == table
    assert_mentions(printed.err, "not evaluated again", "base, mcore")
    assert (out / "results.json").stat().st_mtime_ns == before


# Two turns, of which the first has a tool call with an error; longer first answers succeed.
WALK = """
from msrl.environments.base import Environment, StepResult
from msrl.types import Message

class Walk(Environment):
    def reset(self, row):
        self.replies = []
        return [Message("user", "go " + row["answer"])]

    def step(self, answer):
        self.replies.append(answer)
        calls = [{"name": "f", "arguments": {}, "error": [None, "raised"][len(self.replies) % 2]}]
        info = {"tool_calls": calls}
        if len(self.replies) == 1:
            return StepResult([Message("user", "and")], 0.5, info=info)
        success = any(letter in "aeiou" for letter in answer.lower())
        return StepResult([], 1.0, done=True, info={**info, "success": success})
"""


@pytest.mark.full
@pytest.mark.slow
def test_episodes_are_evaluated_with_success_turns_and_tool_errors(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "walk.py").write_text(WALK)
    environment = {"path": f"{tmp_path / 'walk.py'}:Walk", "max_turn_tokens": 6}
    rollout = {"max_prompt_tokens": 100, "max_response_tokens": 60}
    out = tmp_path / "out"
    sections = {"environment": environment, "rollout": rollout, "reward": {}}
    evaluation.run(config(inputs, out, "base", **sections))
    output = capsys.readouterr().out
    assert all(name in output for name in ("base", "pass@1", "pass@2", "pass@4"))
    assert "tool errors" in output and "50.0%" in output
    rows = [json.loads(row) for row in (out / "samples/base.jsonl").open()]
    (checkpoint,) = json.loads((out / "results.json").read_text())["checkpoints"]
    right = np.array([row["success"] for row in rows], dtype=float).reshape(len(ROWS), 4)
    metrics = checkpoint["metrics"]
    assert metrics["mean@4"] == metrics["success"] == pytest.approx(right.mean())
    assert metrics["pass@4"] == pytest.approx(right.max(axis=1).mean()) and 0 < right.mean() < 1
    assert metrics["turns"] == 2.0 and metrics["tool_errors"] == 0.5 and metrics["reward"] == 1.5
    assert [row["is_right"] for row in rows] == [row["success"] for row in rows]
    assert all(len(row["turns"]) == 2 and row["messages"][0]["role"] == "user" for row in rows)
