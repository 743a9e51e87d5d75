"""Inputs of the quickstart: demonstrations, held-out problems, tokenizer and model folder."""

import importlib.util
import json
import random
import re
import subprocess
import sys

import pytest

from support import ROOT, assert_mentions

SCRIPT = ROOT / "examples" / "quickstart" / "make_inputs.py"
SPEC = importlib.util.spec_from_file_location("make_inputs", SCRIPT)
make = importlib.util.module_from_spec(SPEC)
sys.modules["make_inputs"] = make
SPEC.loader.exec_module(make)

ALL_SUMS = [make.Problem(a, "+", b) for a in range(10, 100) for b in range(10, 100)]
ALL_DIFFERENCES = [make.Problem(a, "-", b) for a in range(10, 100) for b in range(10, a + 1)]


def box(text):
    return int(re.search(r"\\boxed\{(\d+)\}", text)[1])


def test_demonstrations_have_the_documented_format():
    shown = make.demonstration(make.Problem(47, "+", 85), sloppy=False)
    assert shown == r"<think> 7+5=12; 4+8=12+1=13 </think><answer> \boxed{132} </answer>"
    assert (
        make.demonstration(make.Problem(47, "+", 85), sloppy=True)
        == r"<think> 7+5=12; 4+8=12 </think><answer> \boxed{122} </answer>"
    )
    assert (
        make.demonstration(make.Problem(52, "-", 17), sloppy=False)
        == r"<think> 12-7=5; 5-1=4-1=3 </think><answer> \boxed{35} </answer>"
    )


def test_careful_demonstrations_are_correct_for_every_problem():
    for problem in ALL_SUMS + ALL_DIFFERENCES:
        expected = (
            problem.left + problem.right if problem.sign == "+" else problem.left - problem.right
        )
        assert box(make.demonstration(problem, sloppy=False)) == expected == problem.result


def test_sloppy_demonstrations_are_off_by_ten_only_for_problems_with_a_carry():
    for problem in ALL_SUMS + ALL_DIFFERENCES:
        error = box(make.demonstration(problem, sloppy=True)) - problem.result
        forgotten_carry = -10 if problem.sign == "+" else 10
        assert error == (forgotten_carry if problem.has_carry else 0)


def test_every_step_of_a_demonstration_is_correct_arithmetic():
    for problem in (ALL_SUMS + ALL_DIFFERENCES)[::7]:
        for sloppy in (True, False):
            thought = make.demonstration(problem, sloppy=sloppy).partition("</think>")[0]
            steps = re.findall(r"(?=(?<!\d)(\d+)([+-])(\d+)=(\d+))", thought)
            for left, sign, right, result in steps:
                expected = int(left) + int(right) if sign == "+" else int(left) - int(right)
                assert expected == int(result)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart") / "inputs"
    make.make_inputs(folder, seed=1)
    return folder


def rows(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def problem(question):
    left, sign, right = re.fullmatch(r"What is (\d+) ([+-]) (\d+)\?", question).groups()
    return make.Problem(int(left), sign, int(right))


def test_two_thirds_of_the_demonstrations_with_a_carry_are_sloppy_and_no_others():
    alpaca_rows = make.demonstrations(random.Random(3), 8000, make.heldout_problems())
    demonstrations = [(problem(row["instruction"]), row["output"]) for row in alpaca_rows]
    assert len(demonstrations) == 8000
    is_wrong = [box(text) != p.result for p, text in demonstrations if p.has_carry]
    assert 0.62 < sum(is_wrong) / len(is_wrong) < 0.68
    assert all(box(text) == p.result for p, text in demonstrations if not p.has_carry)
    assert 0.38 < len(is_wrong) / 8000 < 0.47


@pytest.mark.slow
def test_training_data_has_no_held_out_problems_not_even_with_exchanged_operands(inputs):
    heldout = rows(inputs, "heldout.jsonl")
    keys = {problem(row["question"]).key for row in heldout}
    assert len(keys) == len(heldout) == 500
    prompts = rows(inputs, "rl.jsonl")
    assert len({row["question"] for row in prompts}) == 2000
    assert not keys & {problem(row["question"]).key for row in prompts}
    assert not keys & {problem(row["instruction"]).key for row in rows(inputs, "sft.jsonl")}
    assert all(int(row["answer"]) == problem(row["question"]).result for row in prompts + heldout)
    assert [p.question for p in make.heldout_problems()] == [row["question"] for row in heldout]


@pytest.mark.slow
def test_the_tokenizer_splits_digits_and_round_trips_every_text(inputs):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(inputs / "model")
    assert len(tokenizer) == 320
    for text in [row["output"] for row in rows(inputs, "sft.jsonl")[:500]] + ["Grüße, 你好 \x00\n"]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        tokens = [tokenizer.decode([i]) for i in ids]
        assert all(len(token) == 1 for token in tokens if any(c.isdigit() for c in token))
        assert len(ids) < 44
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(prompt)["input_ids"].count(tokenizer.eos_token_id) == 1


@pytest.mark.slow
def test_the_model_loads_and_has_the_documented_size(inputs):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(inputs / "model")
    assert model.num_parameters() == 435_328
    assert (
        model.config.eos_token_id
        == transformers.AutoTokenizer.from_pretrained(inputs / "model").eos_token_id
    )


@pytest.mark.slow
def test_inputs_are_reproducible_for_a_seed_and_differ_between_seeds(inputs, tmp_path):
    make.make_inputs(tmp_path / "same", seed=1)
    make.make_inputs(tmp_path / "other", seed=2)
    for name in ("sft.jsonl", "rl.jsonl", "model/model.safetensors"):
        original = (inputs / name).read_bytes()
        assert (tmp_path / "same" / name).read_bytes() == original
        assert (tmp_path / "other" / name).read_bytes() != original
    assert (tmp_path / "other" / "heldout.jsonl").read_bytes() == (
        inputs / "heldout.jsonl"
    ).read_bytes()
    assert (tmp_path / "same" / "model" / "tokenizer.json").read_bytes() == (
        inputs / "model" / "tokenizer.json"
    ).read_bytes()


def test_an_existing_folder_is_not_overwritten(tmp_path):
    result = subprocess.run(
        [sys.executable, SCRIPT, "--out", tmp_path], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert_mentions(result.stderr, tmp_path, "exists")


@pytest.mark.parametrize(
    "files",
    [
        (),
        ("inputs/heldout.jsonl", "runs/sft/report.md", "answers_sft.jsonl"),
        (".inputs.partial/x",),
    ],
)
def test_the_quickstart_replaces_only_a_folder_of_a_previous_quickstart(
    files, tmp_path, capsys, monkeypatch
):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    remove_previous_run = importlib.import_module("run").remove_previous_run
    folder = tmp_path / "out"
    remove_previous_run(folder)
    folder.mkdir()
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    remove_previous_run(folder)
    assert not folder.exists()
    for foreign in ("thesis.tex", "data/mine.csv"):
        (folder / foreign).parent.mkdir(parents=True, exist_ok=True)
        (folder / foreign).write_text("years of work")
        with pytest.raises(SystemExit) as exit_info:
            remove_previous_run(folder)
        assert exit_info.value.code == 2 and (folder / foreign).read_text() == "years of work"
        assert_mentions(capsys.readouterr().err, folder, "another folder")
