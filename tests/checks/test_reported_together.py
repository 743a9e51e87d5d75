"""What checks refuse is reported together with values that the schema refuses."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from support import assert_mentions
from test_cli import msrl

SFT = """
model: {path: nomodel, tokenizer: notokenizer}
data: {train: norows, eval: noeval}
train: {steps: ten, lora: {rank: 4, load: noadapter}, foo: 3}
checkpoint: {load: nocheckpoint}
modle: [1, {a: 2}]
7: 3
"""
GRPO = """
model: {path: nomodel}
data: {train: norows}
rollout: {samples_per_prompt: x}
reward: {sources: [{function: "nofile.py:score"}, {verifier: exact_match, foo: 1}]}
environment: {path: "noroom.py:Room"}
"""
# Words of a command, and what its one message names: paths, and what the schema refuses.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "train-sft -c sft.yaml": (
        "train.steps=ten", "train.foo=3", "modle=", "7=3", "nomodel", "notokenizer", "norows",
        "noeval", "noadapter", "nocheckpoint",
    ),
    "train-grpo -c grpo.yaml": (
        "samples_per_prompt=x", "sources.1.foo=1", "nomodel", "norows", "nofile.py", "noroom.py",
    ),
    "config validate -c grpo.yaml": ("samples_per_prompt=x", "nomodel", "norows", "nofile.py"),
    "config validate --for train-sft -c sft.yaml": ("train.steps=ten", "nomodel", "norows"),
    "convert-ckpt mcore2hf --load nope --save out --lora nolora --set convert.tp=x": (
        "convert.tp=x", "nope", "nolora",
    ),
    "preprocess --input no.jsonl --tokenizer notok --handler no.py:f --template no.yaml"
    " --output-prefix p --workers 0": ("workers=0", "no.jsonl", "notok", "no.py", "no.yaml"),
    "generate --model nomodel --input norows --template no.yaml --max-tokens 0": (
        "max_tokens=0", "nomodel", "norows", "no.yaml",
    ),
    "serve nomodel --lora a=nolora --api-key-file nokey --port -5": (
        "port=-5", "nomodel", "nolora", "nokey",
    ),
    "eval nomodel --data nodata --num-samples 0": ("samples_per_prompt=0", "nomodel", "nodata"),
}  # fmt: skip


@pytest.mark.sample(5)
@pytest.mark.parametrize("line", COMMANDS)
def test_missing_paths_are_reported_with_invalid_values(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.yaml").write_text(SFT)
    (tmp_path / "grpo.yaml").write_text(GRPO)
    assert msrl(*line.split()) == 2
    assert_mentions(capsys.readouterr().err, *COMMANDS[line])
    assert {path.name for path in tmp_path.iterdir()} == {"sft.yaml", "grpo.yaml"}


def test_a_value_that_is_left_out_causes_no_further_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The estimator of a critic is misspelt: the critic's checkpoint is not called superfluous."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo.yaml").write_text(
        "algo: {advantage: {estimator: gaee}}\ncluster: {roles: {critic: {load: critic}}}\n"
    )
    assert msrl("train-grpo", "-c", "grpo.yaml") == 2
    assert "no effect" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "is_reported"),
    [
        ("train: {steps: ten}", True),
        ("log: {foo: 1}", True),
        ("algo: {advantage: {estimator: gaee}}", False),
        ("algo: {foo: 1}", False),  # it may be a misspelled key
        ("train: {steps: '${gone}'}", False),
    ],
)
def test_checks_between_keys_are_reported_unless_they_read_an_invalid_value(
    text: str,
    is_reported: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo.yaml").write_text(f"{text}\nrollout: {{samples_per_prompt: 1}}\n")
    assert msrl("train-grpo", "-c", "grpo.yaml") == 2
    assert ("samples_per_prompt=1" in capsys.readouterr().err) is is_reported


def test_libraries_can_read_attributes_of_all_objects_of_modules() -> None:
    """As vLLM does when an engine starts."""
    modules = [module for name, module in sys.modules.items() if name.startswith("msrl.")]
    assert "msrl.config.unknown" in sys.modules
    assert all(isinstance(hasattr(v, "__dict__"), bool) for m in modules for v in vars(m).values())
