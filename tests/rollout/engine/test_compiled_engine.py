"""vLLM engines that compile the model on a CPU (`rollout.engine.eager: false`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import families
import tiny_qwen2
from mixture_families import QWEN3_MOE
from support import locate, python_path


def _save(folder: Path, name: str) -> None:
    """Save a model and its tokenizer."""
    if name == "mixture":
        config = {**QWEN3_MOE, "hidden_size": 128, "vocab_size": tiny_qwen2.VOCAB_SIZE}
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        metadata = {"format": "pt"}
        save_file(families.weights(config), folder / "model.safetensors", metadata=metadata)
        tiny_qwen2.make_tokenizer().save_pretrained(folder)
    else:
        tiny_qwen2.save_model(folder, tied=name == "tied")


def _save_other_weights(folder: Path, source: Path) -> None:
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    scaled = {name: 1.2 * tensor for name, tensor in weights.items()}
    save_file(scaled, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tp"), [("untied", 1), ("tied", 1), ("mixture", 1), ("untied", 2)]
)
def test_a_compiled_engine_generates_with_the_weights_that_were_loaded_last(
    tmp_path: Path, name: str, tp: int
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    _save(first, name)
    _save_other_weights(second, first)
    program = locate("compiled_engine.py")
    environment = {**os.environ, "PYTHONPATH": python_path()}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    environment.pop("TORCHDYNAMO_DISABLE", None)
    done = subprocess.run(
        [sys.executable, program, str(tp), first, second, first],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    differences = [float(line) for line in done.stdout.splitlines()]
    assert len(differences) == 3 and max(differences) < 1e-4
    compiled = list((tmp_path / "cache").rglob("*.so"))
    assert compiled, "nothing was compiled"
