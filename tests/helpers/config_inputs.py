"""Small inputs for configuration checks: config.json, preprocessed data, an mcore checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import pytest

from msrl.data.manifest import manifest_path, manifest_text
from msrl.types import DatasetManifest
from msrl.workflows import preflight

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 1001,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "hidden_act": "silu",
}

GENERATING = {"hidden_size": 256}  # vLLM has no attention kernel for the head size of QWEN2


def make_model(folder: Path, **changes: object) -> Path:
    """Write a Hugging Face folder without weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**QWEN2, **changes}), encoding="utf-8")
    return folder


def make_configs(folder: Path, configs: Mapping[str, Mapping[str, object]]) -> Path:
    """Write a config.json in a folder per model, data and sft.yaml, which names no such model."""
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    make_data(folder / "data")
    (folder / "sft.yaml").write_text(TRAINING, encoding="utf-8")
    return folder


def make_mcore(folder: Path) -> Path:
    """Write an mcore folder without weights, with its Hugging Face files."""
    make_model(folder / "hf")
    (folder / "latest_checkpointed_iteration.txt").write_text("1", encoding="utf-8")
    return folder


def make_data(prefix: Path) -> Path:
    """Write empty files with the names of preprocessed data."""
    for suffix in ("bin", "idx"):
        prefix.with_name(f"{prefix.name}_packed_input_ids_document.{suffix}").write_bytes(b"")
    return prefix


def skip_input_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `--dry-run` check the configuration only: these inputs have neither weights nor rows."""

    def check(plan: object) -> preflight.Inputs:
        return preflight.Inputs("not checked")

    monkeypatch.setattr("msrl.workflows.preflight.check", check)


def make_manifest(prefix: Path, kind: Literal["pretrain", "sft", "prompts"]) -> None:
    """Write the manifest of data without rows."""
    counts = dict.fromkeys(
        ("num_rows", "num_examples", "num_tokens", "num_loss_tokens", "max_tokens"), 0
    )
    manifest = DatasetManifest(
        kind=kind,
        template="qwen",
        handler="alpaca",
        tokenizer_hash="",
        vocab_size=0,
        seq_length=0,
        pack=False,
        dropped={},
        keys=(),
        **counts,
    )
    manifest_path(str(prefix)).write_text(manifest_text(manifest), encoding="utf-8")


TRAINING = """\
model: {path: model, dtype: float32}
data: {train: data}
train: {steps: 10}
"""
GRPO = (
    TRAINING
    + """\
rollout:
  {prompts_per_step: 4, samples_per_prompt: 8, max_prompt_tokens: 64, max_response_tokens: 64}
reward:
  sources:
    - {verifier: acc}
"""
)


def make_working_folder(folder: Path, **changes: object) -> Path:
    """Write a weightless model (4 query groups, 512 positions), data, sft.yaml and grpo.yaml.

    `changes` replace values of the model's config.json.
    """
    make_model(folder / "model", **changes)
    make_data(folder / "data")
    (folder / "sft.yaml").write_text(TRAINING, encoding="utf-8")
    (folder / "grpo.yaml").write_text(GRPO, encoding="utf-8")
    return folder
