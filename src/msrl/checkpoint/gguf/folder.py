"""Hugging Face folder of a model in a GGUF file: its config, tokenizer and weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msrl.checkpoint.gguf.file import read_gguf
from msrl.checkpoint.gguf.model import config_values, hf_tensors
from msrl.checkpoint.gguf.tokenizer import stop_tokens, write_tokenizer
from msrl.checkpoint.source import HfSource
from msrl.models.families import shape_from_config
from msrl.models.hf_config import HfConfig


def open_gguf(path: Path, folder: Path) -> HfSource:
    """Write config and tokenizer of a GGUF file to an empty folder; return the model.

    Raises:
        MsrlError: The file is damaged, or contains what msrl does not support.
        ManyErrors: Several tensors are missing, unexpected or have another shape.
    """
    file = read_gguf(path)
    config = config_values(file)
    shape_from_config(HfConfig(config, str(path)))  # names the file in messages
    _write_json(folder / "config.json", config)
    write_tokenizer(file, folder)
    if ids := stop_tokens(file):
        _write_json(folder / "generation_config.json", {"eos_token_id": ids})
    return HfSource(folder, hf_tensors(file, config))


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
