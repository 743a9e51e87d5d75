"""Commands that continue, as trainings, conversions and preprocessing print them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from msrl.config.schema import Config
from msrl.workflows import preprocess
from msrl.workflows.training.run_log import next_command
from support import assert_mentions
from test_cli import msrl
from tiny_qwen2 import save_model
from training_runs import write_rows

ROWS = [{"instruction": f"{i}+{i}=", "output": f"{2 * i}"} for i in range(8)]


def next_words(output: str) -> list[str]:
    """Return the words of the printed command without `msrl`."""
    (line,) = [line for line in output.splitlines() if line.startswith("next: msrl ")]
    return shlex.split(line)[2:]


def test_the_command_after_preprocessing_trains_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "my model", tied=False)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    settings = ["--handler", "alpaca", "--template", "qwen", "--output-prefix", "data/sft"]
    assert msrl("preprocess", "--input", "rows.jsonl", "--tokenizer", "my model", *settings) == 0
    words = next_words(capsys.readouterr().out)
    assert msrl(*words, "--platform", "cpu", "--dry-run") == 0


def test_the_command_after_a_conversion_reads_the_result_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "hf", tied=False)
    assert msrl("convert-ckpt", "hf2mcore", "--load", "hf", "--save", "mcore", "--no-verify") == 0
    words = next_words(capsys.readouterr().out)
    assert words == ["chat", "--model", "mcore"]
    assert msrl(*words, "--platform", "cpu", "--dry-run") == 0
    for command, load in (("hf2mcore", "mcore"), ("hf2hf", "mcore")):
        assert msrl("convert-ckpt", command, "--load", load, "--save", "new") == 2
        assert_mentions(capsys.readouterr().err, "load=mcore", "Megatron", "mcore2hf")
    for command in ("mcore2hf", "reshard", "lora2hf"):
        assert msrl("convert-ckpt", command, "--load", "hf", "--save", "new") == 2
        assert_mentions(capsys.readouterr().err, "load=hf", "Hugging Face", "hf2mcore")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("adapter_config.json", ("adapter", "--lora folder")),
        ("model-q4.gguf", ("GGUF", "gguf2hf --load folder/model-q4.gguf")),
    ],
)
@pytest.mark.parametrize("command", ["hf2mcore", "mcore2hf", "hf2hf"])
def test_a_folder_of_another_kind_is_named(
    command: str,
    file: str,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / file).write_text("{}")
    assert msrl("convert-ckpt", command, "--load", "folder", "--save", "new") == 2
    assert_mentions(capsys.readouterr().err, "load=folder", *words)
    assert msrl("convert-ckpt", command, "--load", f"folder/{file}", "--save", "new") == 2
    shown = capsys.readouterr().err
    assert_mentions(shown, *(words if file.endswith("gguf") else ("is a file", "folder")))


@pytest.mark.parametrize("path", ["folder", "folder/model.gguf"])
def test_a_model_in_a_gguf_file_is_answered_with_its_conversion(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.gguf").write_text("{}")
    assert msrl("generate", "--model", path, "--prompt", "a") == 2
    assert_mentions(capsys.readouterr().err, path, "gguf2hf --load folder/model.gguf")


def test_adapters_are_used_with_their_base_model_after_training(tmp_path: Path) -> None:
    values = {"model": {"path": "Qwen/Qwen2.5-0.5B"}, "train": {"lora": {"rank": 8}}}
    results = {"checkpoint": "x"}
    config = Config.model_validate(values)
    command = next_command(config, tmp_path, results, is_completed=True)
    assert_mentions(command, "chat --model Qwen/Qwen2.5-0.5B", "chat.lora=", "checkpoints")


def test_data_whose_training_needs_further_settings_has_no_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "hf", tied=False)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    settings = {
        "input": ["rows.jsonl"],
        "tokenizer": "hf",
        "handler": "alpaca",
        "template": "qwen",
        "kind": "prompts",
        "output_prefix": "prompts",
    }
    preprocess.run(Config.model_validate({"preprocess": settings}))
    assert "next:" not in capsys.readouterr().out
