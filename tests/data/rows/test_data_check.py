"""Check that data was preprocessed with the tokenizer of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from config_inputs import GENERATING, make_model
from msrl.cli.configuration import load_configuration as load
from msrl.config.schema import Config
from msrl.data.dataset import SftDataset
from msrl.errors import MsrlError
from msrl.plan.run_plan import resolve
from msrl.workflows.preprocess import run
from msrl.workflows.rl.setup import prepare
from msrl.workflows.training.data_checks import check_data
from support import assert_each_mentions, mentions
from tiny_qwen2 import VOCAB_SIZE, make_tokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a model with a tokenizer, another tokenizer of the same size, and data of each."""
    monkeypatch.chdir(tmp_path)
    make_model(
        tmp_path / "model", vocab_size=VOCAB_SIZE, max_position_embeddings=2048, **GENERATING
    )
    for name in ("model", "other"):
        make_tokenizer().save_pretrained(tmp_path / name)
    swap(tmp_path / "other" / "tokenizer.json", "a", "b")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"instruction": "ab", "output": "ba"}) + "\n")
    for tokenizer, prefix in (("model", "own"), ("other", "foreign")):
        settings = {
            "input": ["rows.jsonl"],
            "tokenizer": tokenizer,
            "handler": "alpaca",
            "template": "qwen",
            "output_prefix": prefix,
        }
        run(Config.model_validate({"preprocess": settings}))
    return tmp_path


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("sources", "answers", "reason"),
    [
        (
            [{"verifier": "code"}],
            ["assert f(1) == 2", "42"],
            r"verifier=code: .*row 1 of the data tests nothing",
        ),
        (
            [{"verifier": "code", "options": {"partial": True}}],
            ['{"tests": ""}'],
            r"verifier=code: .*row 0 of the data tests nothing",
        ),
        (
            [{"verifier": "acc"}],
            ["#### 4", "#### "],
            r"verifier=acc: .*row 1 of the data holds no answer",
        ),
        (
            [{"verifier": "multiple_choice"}],
            ["A", "Paris"],
            r"verifier=multiple_choice: .*row 1 .*choice",
        ),
    ],
)
@pytest.mark.parametrize("key", ["train", "eval"])
def test_a_row_that_no_verifier_can_score_is_refused_before_anything_starts(
    folder: Path, sources, answers, reason, key
):
    rows = [{"instruction": "ab", "output": answer} for answer in answers]
    for name, samples in (
        ("rows", rows),
        ("fine", [{"instruction": "ab", "output": "A" if "choice" in reason else "assert f(1)"}]),
    ):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
        settings = {
            "input": [f"{name}.jsonl"],
            "tokenizer": "model",
            "handler": "r1",
            "template": "qwen",
            "output_prefix": name,
        }
        run(Config.model_validate({"preprocess": settings}))
    data = (
        {"train": "rows", "eval": "fine"} if key == "train" else {"train": "fine", "eval": "rows"}
    )
    config = {
        "model": {"path": "model"},
        "data": data,
        "reward": {"sources": sources},
        "cluster": {"platform": "cpu"},
    }
    with pytest.raises(MsrlError, match=rf"data.{key}=rows: reward.sources.*{reason}"):
        prepare(
            resolve(
                Config.model_validate(
                    {**config, "rollout": {"prompts_per_step": 1}, "train": {"steps": 1}}
                ),
                "train-grpo",
            )
        )


def swap(file: Path, first: str, second: str) -> None:
    """Swap two tokens of a tokenizer.json."""
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(content), encoding="utf-8")


def check(prefix: str, *sets: str) -> None:
    config = load(sets=("model.path=model", *sets)).config
    check_data(SftDataset(prefix).manifest, resolve(config, "train-sft"), prefix)


def test_data_of_another_tokenizer_of_the_same_size_is_refused(folder: Path):
    check("own")
    with pytest.raises(MsrlError, match=mentions("foreign", "tokenizer", "model")):
        check("foreign")


def test_an_explicit_tokenizer_has_precedence(folder: Path):
    check("foreign", "model.tokenizer=other")
    with pytest.raises(MsrlError, match=mentions("own", "tokenizer", "other")):
        check("own", "model.tokenizer=other")
    with pytest.raises(MsrlError, match=mentions("gone", "folder")):
        check("own", "model.tokenizer=gone")


def test_a_model_without_a_tokenizer_passes_the_check_with_a_warning(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    for file in (folder / "model").iterdir():
        if file.name != "config.json":
            file.unlink()
    capsys.readouterr()
    check("own")
    check("foreign")
    assert_each_mentions(
        capsys.readouterr().err.splitlines(),
        ("warning", "own", "model.tokenizer"),
        ("warning", "foreign", "model.tokenizer"),
    )


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_with_both_numbers(folder: Path):
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps({**config, "vocab_size": 100}))
    with pytest.raises(MsrlError, match=mentions("259 tokens", "100", "tokenizer")):
        check("own")


def test_rows_beyond_the_models_positions_are_refused_unless_the_training_shortens_them(
    folder: Path,
):
    config = json.loads((folder / "model/config.json").read_text())
    (folder / "model/config.json").write_text(json.dumps({**config, "max_position_embeddings": 8}))
    for policy in ("drop", "truncate"):
        check("own", "data.seq_length=8", f"data.too_long={policy}")
        with pytest.raises(MsrlError, match=mentions("own", "9 tokens", "8", "too_long")):
            check("own", "data.seq_length=9", f"data.too_long={policy}")
    for sets in ((), ("data.seq_length=8",), ("data.too_long=drop",)):
        with pytest.raises(MsrlError, match=mentions("own", "longest example", "too_long")):
            check("own", *sets)
