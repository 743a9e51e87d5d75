"""`msrl eval --benchmark`: rows, refusals, sandboxed programs, and real runs beside the harness."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmark_rows import CHOICE, ROWS, write_rows, write_sentence_rules
from config_inputs import make_model
from msrl import registry
from msrl.cli.configuration import load_configuration as load
from msrl.config.schema import Config
from msrl.errors import ManyErrors, MsrlError
from msrl.packages import missing_package
from msrl.rewards import sandbox
from msrl.workflows.evaluate import benchmark_run
from msrl.workflows.evaluate.harness import outcome, tasks
from msrl.workflows.evaluate.harness.benchmark import Benchmark
from msrl.workflows.evaluate.harness.programs import passes
from msrl.workflows.evaluate.harness.rows import BenchmarkFolder
from msrl.workflows.evaluate.results import (
    BenchmarkRecord,
    Result,
    ResultFolder,
    benchmark_setting,
    result_table,
)
from support import assert_each_mentions, assert_mentions, checked_plan, mentions, shared_data
from test_cli import msrl
from tiny_qwen2 import save_model

NAMES = registry.names(registry.BENCHMARKS)


def mistakes(*sets: str) -> list[str]:
    try:
        checked_plan(load(sets=[*sets]), "eval")
    except ManyErrors as error:
        return [line.removeprefix("--set: ") for line in error.messages]
    return []


def test_settings_of_benchmarks_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    good = ("evaluate.models=[model]", "evaluate.benchmarks=[gsm8k, mmlu]")
    assert not mistakes(*good)
    assert_each_mentions(
        mistakes(*good, "evaluate.benchmark_data=gone", "eval.samples_per_prompt=2"),
        ("evaluate.benchmark_data=gone", "not found"),
        ("eval.samples_per_prompt=2", "one answer"),
    )
    assert_each_mentions(mistakes(*good, "eval.sampling.stop=[x]"), ("eval.sampling.stop", "suite"))
    lines = mistakes("evaluate.models=[model]", "evaluate.num_fewshot=2")
    assert any("evaluate.num_fewshot=2" in line and "benchmarks" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "near"), [("human_eval", "humaneval"), ("math_500", "math500"), ("arc", "arc_easy")]
)
def test_an_unknown_benchmark_is_answered_with_the_nearest_name(
    name: str, near: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = str(make_model(tmp_path / "model"))
    assert msrl("eval", model, "--benchmark", f"gsm8k,{name}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert_mentions(line, f"evaluate.benchmarks.1={name}", near)
    assert msrl("eval", model, "--benchmark", "gsm8k", "--data", "x") == 2
    assert_mentions(capsys.readouterr().err, "--data", "data.eval=x", "evaluate.benchmarks")


def test_a_missing_package_is_one_line_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ModuleNotFoundError) as caught:
        benchmark_run.prepare(config(tmp_path, make_model(tmp_path / "model"), "gsm8k"))
    assert_mentions(str(missing_package(caught.value)), "lm_eval", "msrl[benchmarks]")


def test_rows_are_found_by_benchmark_subject_and_split(tmp_path: Path):
    flat = BenchmarkFolder(tmp_path, "gsm8k", ("question", "answer"))
    write_rows(tmp_path, "gsm8k")
    assert flat.read("main", "test", has_subjects=False) == ROWS["gsm8k"]["test"]
    downloaded = BenchmarkFolder(tmp_path / "hub", "gsm8k", ("question",))
    for number in range(2):
        shard = tmp_path / f"hub/gsm8k/main/data/test-0000{number}-of-00002.jsonl"
        shard.parent.mkdir(parents=True, exist_ok=True)
        shard.write_text(json.dumps({"question": number}) + "\n")
    (shard.parent / "tests.jsonl").write_text("not a split")
    rows = downloaded.read("main", "test", has_subjects=False)
    assert [row["question"] for row in rows] == [0, 1]
    subjects = BenchmarkFolder(tmp_path, "mmlu", Benchmark.read("mmlu").columns)
    with pytest.raises(
        MsrlError, match=mentions(f"evaluate.benchmark_data={tmp_path}", "mmlu/law/dev", "choices")
    ):
        subjects.read("law", "dev", has_subjects=True)
    file = tmp_path / "mmlu/law/dev.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(CHOICE) + '\n{"question": "?", "answer": 0}\n')
    with pytest.raises(MsrlError, match=mentions(f"{file}:2", "choices", "mmlu")):
        subjects.read("law", "dev", has_subjects=True)


@pytest.mark.slow
@pytest.mark.skipif(sandbox.refusal() is not None, reason="this machine has no sandbox")
def test_programs_run_in_the_sandbox_and_cannot_claim_success(tmp_path: Path):
    tests = ROWS["humaneval"]["test"][0]["test"] + "\ncheck(double)"
    assert passes("def double(x):\n    return 2 * x", tests)
    assert not passes("def double(x):\n    return x", tests)
    assert not passes("import os\nos._exit(0)", tests)
    reads = f"import os\ndef double(x):\n    assert not os.path.exists({str(tmp_path)!r})\n"
    assert passes(f"{reads}    return 2 * x", tests)


def test_results_of_benchmarks_share_a_row_and_are_resumed_one_by_one(tmp_path: Path):
    def result(label: str, name: str, accuracy: float) -> Result:
        record = BenchmarkRecord(name, "0.4.13", {name: "1.0"}, 5, chat_template=False)
        metrics, intervals = {name: accuracy, f"{name}/x": 0.0}, {name: (0.0, 1.0)}
        file = folder.samples_file(label, name)
        return Result(
            label, label, "/x", None, "d", 4, 1, metrics, intervals, 1.0, file, benchmark=record
        )

    both = {benchmark_setting("gsm8k"): "rows", "lm_eval": "0.4.13"}
    folder = ResultFolder(tmp_path, both, overwrite=False)
    folder.add(result("a", "gsm8k", 0.5), [{"row": 0}])
    other = {benchmark_setting("mmlu"): "rows", "lm_eval": "0.4.13"}
    folder = ResultFolder(tmp_path, other, overwrite=False)
    assert not folder.is_finished("a", "d", "mmlu") and folder.is_finished("a", "d", "gsm8k")
    folder.add(result("a", "mmlu", 0.25), [{"row": 0}])
    folder.add(result("b", "mmlu", 0.75), [{"row": 0}])
    table = result_table(folder.results)
    assert table[0].split() == ["checkpoint", "gsm8k", "mmlu"]
    assert [line.split()[0] for line in table[1:]] == ["a", "b"]
    assert "50.0%" in table[1] and "25.0%" in table[1] and "75.0%" in table[2]
    assert len(list((tmp_path / "samples").iterdir())) == 3 and folder.plot() is not None
    changed = {benchmark_setting("gsm8k"): "others", "lm_eval": "0.4.13"}
    with pytest.raises(MsrlError, match=mentions("evaluate.output", "benchmark gsm8k")):
        ResultFolder(tmp_path, changed, overwrite=False)


# The tests below need the extra benchmarks: `nox -s benchmarks`.


@pytest.fixture(scope="module")
def harness() -> None:
    pytest.importorskip("lm_eval")
    os.environ["HF_DATASETS_OFFLINE"] = "1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model whose tokens are bytes, so that questions are long."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(folder, tied=False, positions=16384)
    return folder


def config(folder: Path, model: Path, *names: str, **evaluate: Any) -> Config:
    values = {
        "models": [str(model)],
        "benchmarks": names,
        "benchmark_data": str(folder / "rows"),
        "output": str(folder / "out"),
        **evaluate,
    }
    return Config.model_validate(
        {"model": {"dtype": "float32"}, "eval": {"max_response_tokens": 12}, "evaluate": values}
    )


def refusal(folder: Path, model: Path, *names: str, **evaluate: Any) -> str:
    with pytest.raises(MsrlError) as caught:
        benchmark_run.prepare(config(folder, model, *names, **evaluate))
    return str(caught.value)


@pytest.mark.slow
def test_bad_rows_and_impossible_settings_are_one_line_each(
    harness: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    for name in ("gsm8k", "ifeval", "math500", "arc_easy", "boolq"):
        write_rows(tmp_path / "rows", name)
    assert_mentions(refusal(tmp_path, model, "ifeval"), "ifeval", "punkt_tab", "NLTK_DATA")
    write_sentence_rules(tmp_path)
    for name, shots, word in (("ifeval", 1, "no examples"), ("math500", 5, "4")):
        line = refusal(tmp_path, model, name, num_fewshot=shots)
        assert_mentions(line, f"evaluate.num_fewshot={shots}", name, word)
    line = refusal(tmp_path, model, "gsm8k", num_fewshot=60)
    assert_mentions(line, "gsm8k")
    save_model(tmp_path / "short", tied=False, positions=128, chat_template=False)
    line = refusal(tmp_path, tmp_path / "short", "gsm8k")
    assert_mentions(line, "eval.max_response_tokens=12", "gsm8k", "128", "evaluate.num_fewshot")
    line = refusal(tmp_path, tmp_path / "short", "gsm8k", chat_template=True)
    assert_mentions(line, "evaluate.chat_template", "short", "no chat template")
    (tmp_path / "rows/boolq/validation.jsonl").unlink()
    assert_mentions(refusal(tmp_path, model, "boolq"), "boolq/validation.jsonl", "passage")
    file = tmp_path / "rows/arc_easy/test.jsonl"
    row = ROWS["arc_easy"]["test"][0]
    file.write_text(json.dumps(row) + "\n" + json.dumps({**row, "answerKey": "E"}) + "\n")
    assert_mentions(refusal(tmp_path, model, "arc_easy"), "arc_easy, row 2", "benchmark_data")
    write_rows(tmp_path / "rows", "boolq")
    file = tmp_path / "rows/boolq/validation.jsonl"
    row = ROWS["boolq"]["validation"][0]
    file.write_text(json.dumps(row) + "\n" + json.dumps({**row, "label": 2}) + "\n")
    assert_mentions(refusal(tmp_path, model, "boolq"), "boolq, row 2", "2 of 2")
    settings = config(tmp_path, model, "gsm8k", benchmark_data=None)
    with pytest.raises(MsrlError, match=mentions("gsm8k", "hub", "evaluate.benchmark_data")):
        benchmark_run.prepare(settings)
    assert not (tmp_path / "out").exists()


def run(folder: Path, model: Path, *names: str, **evaluate: Any) -> dict[str, Any]:
    """Evaluate, and return the results by benchmark."""
    benchmark_run.run(config(folder, model, *names, **evaluate))
    content = json.loads((folder / "out/results.json").read_text())
    return {entry["benchmark"]["name"]: entry for entry in content["checkpoints"]}


def samples(folder: Path, entry: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / entry["samples"]).open()]


# One benchmark of each kind: choices, the last word, answers, programs, instructions.
KINDS = ("arc_challenge", "gsm8k", "humaneval", "ifeval", "lambada", "math500")


def reference(model: Path, loaded: Any, *, is_chat: bool) -> dict[str, Any]:
    """Return the results of the harness with its own model, which transformers computes."""
    huggingface = import_module("lm_eval.models.huggingface")
    evaluator = import_module("lm_eval.evaluator")
    lm = huggingface.HFLM(pretrained=str(model), dtype="float32", batch_size=1, device="cpu")
    for task in loaded.tasks.values():
        if task.OUTPUT_TYPE == "generate_until":
            task.set_config("generation_kwargs", {"max_gen_toks": 12}, update=True)
    loaded.begin()
    return evaluator.evaluate(
        lm,
        loaded.loaded,
        limit=None,
        bootstrap_iters=0,
        apply_chat_template=is_chat,
        fewshot_as_multiturn=is_chat,
        confirm_run_unsafe_code=True,
    )


@pytest.mark.slow
def test_results_equal_those_of_the_harness_with_transformers(
    harness: None,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    write_sentence_rules(tmp_path)
    for name in KINDS:
        write_rows(tmp_path / "rows", name)
    results = run(tmp_path, model, *KINDS)
    table = capsys.readouterr().out
    assert all(name in table for name in KINDS)
    for name in KINDS:
        benchmark, entry = Benchmark.read(name), results[name]
        is_chat = entry["benchmark"]["chat_template"]
        assert is_chat == benchmark.generates
        loaded = tasks.load(benchmark, str(tmp_path / "rows"), shots=None, is_chat=is_chat)
        expected = reference(model, loaded, is_chat=is_chat)
        values = outcome.metrics(loaded, expected["results"])
        assert entry["benchmark"]["tasks"] == loaded.versions
        assert {key: entry["metrics"][key] for key in values} == pytest.approx(values, rel=1e-3)
        rows = outcome.rows(loaded, expected["samples"])
        for row, other in zip(samples(tmp_path, entry), rows, strict=True):
            assert row["prompt"] == other["prompt"] and row["target"] == other["target"]
            assert row.get("response") == other.get("response")
            if "logprobs" in row:
                assert row["logprobs"] == pytest.approx(other["logprobs"], rel=1e-4)
    before = (tmp_path / "out/results.json").stat().st_mtime_ns
    run(tmp_path, model, *KINDS[:2])
    printed = capsys.readouterr()
    assert printed.out == table and (tmp_path / "out/results.json").stat().st_mtime_ns == before
    assert_mentions(printed.err, "not evaluated again", "tiny on gsm8k")


@pytest.mark.slow
def test_published_rows_of_gsm8k_and_math500_are_evaluated(
    harness: None, model: Path, tmp_path: Path
):
    for name, splits in {
        "gsm8k": {"train": "gsm8k_train", "test": "gsm8k_test"},
        "math500": {"test": "math500"},
    }.items():
        (tmp_path / "rows" / name).mkdir(parents=True)
        for split, file in splits.items():
            text = shared_data("math", f"{file}.jsonl").read_text()
            (tmp_path / "rows" / name / f"{split}.jsonl").write_text(text)
    settings = config(tmp_path, model, "gsm8k", "math500")
    values = settings.model_dump()
    values["eval"]["prompts"] = 4
    benchmark_run.run(Config.model_validate(values))
    content = json.loads((tmp_path / "out/results.json").read_text())
    assert [entry["num_prompts"] for entry in content["checkpoints"]] == [4, 4]
    assert [entry["benchmark"]["num_fewshot"] for entry in content["checkpoints"]] == [5, 4]


@pytest.mark.full
@pytest.mark.slow
def test_every_benchmark_runs(
    harness: None, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    write_sentence_rules(tmp_path)
    for name in NAMES:
        write_rows(tmp_path / "rows", name)
    results = run(tmp_path, model, *NAMES)
    assert set(results) == set(NAMES)
    for name, entry in results.items():
        rows = samples(tmp_path, entry)
        assert entry["num_prompts"] == len(rows) and name in entry["intervals"]
        right = [row["is_right"] for row in rows]
        assert entry["metrics"][name] == pytest.approx(sum(right) / len(right))
