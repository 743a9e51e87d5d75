"""Conversion commands of examples/convert, checked on the real configurations of their models."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from config_inputs import make_mcore
from support import assert_mentions, shared_data
from test_cli import msrl
from test_examples import EXAMPLES, readme_commands

CONFIGS = {
    "Qwen2.5-0.5B": "Qwen2.5-0.5B-Instruct.config.json",
    "Qwen2.5-7B": "Qwen2.5-7B-Instruct.config.json",
    "Qwen2.5-32B": "Qwen2.5-32B.transcribed.config.json",
}


def make_models(folder: Path) -> None:
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        shutil.copyfile(shared_data("configs", config), folder / name / "config.json")


def test_the_commands_for_reward_models_are_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = json.loads(shared_data("configs", "Llama-3.2-3B-Instruct.config.json").read_text())
    reward = config | {
        "architectures": ["LlamaForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
    }
    (tmp_path / "Llama-3.2-3B-reward").mkdir()
    (tmp_path / "Llama-3.2-3B-reward" / "config.json").write_text(json.dumps(reward))
    for line in readme_commands(EXAMPLES / "convert" / "README.md", "Reward models"):
        assert msrl(*shlex.split(line)[1:], "--dry-run") == 0, f"{line}\n{capsys.readouterr().err}"
        if "hf2mcore" in line:  # the next command reads its output
            (make_mcore(tmp_path / "mcore" / "llama32-orm") / "hf" / "config.json").write_text(
                json.dumps(reward)
            )


@pytest.mark.parametrize(
    "heading",
    [
        "Hugging Face to Megatron",
        "Megatron to Hugging Face, and to another parallel layout",
        "LoRA",
    ],
)
def test_the_guides_conversions_are_valid(
    heading: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_models(tmp_path)
    for name in () if heading == "Hugging Face to Megatron" else ("qwen2.5_7b", "qwen2.5_7b_lora"):
        folder = make_mcore(tmp_path / "mcore" / name)
        shutil.copyfile(tmp_path / "Qwen2.5-7B" / "config.json", folder / "hf" / "config.json")
    (tmp_path / "qwen2.5_7b_peft").mkdir()
    lines = [
        shlex.split(line) for line in readme_commands(EXAMPLES / "convert" / "README.md", heading)
    ]
    for line in lines:
        if "lora2hf" in line:
            (tmp_path / "qwen2.5_7b_peft").rmdir()  # a later line reads what this one writes
        assert msrl(*line[1:], "--dry-run") == 0, f"{shlex.join(line)}\n{capsys.readouterr().err}"
        if "lora2hf" in line:
            (tmp_path / "qwen2.5_7b_peft").mkdir()
    assert_mentions(capsys.readouterr().out, "convert-ckpt", "configuration")
