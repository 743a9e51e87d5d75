"""Hugging Face folder of a model in a GGUF file: its config, tokenizer and weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msrl.checkpoint.gguf.file import GgufFile, read_gguf
from msrl.checkpoint.gguf.model import config_values, hf_tensors
from msrl.checkpoint.source import HfSource
from msrl.errors import MsrlError
from msrl.models.families import shape_from_config
from msrl.models.hf_config import HfConfig

_TOKENIZER = "tokenizer.ggml."
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace("{1,3}", "")
_SINGLE_DIGITS = ""  # single digits, and the words of GPT-2, which `tokenizers` provides
# Expressions by which byte-level tokenizers split text, by `tokenizer.ggml.pre`. Source:
# llama-vocab.cpp of llama.cpp.
_SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "smollm": _SINGLE_DIGITS,
}


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
    _write_tokenizer(file, folder)
    ends = [file.metadata.get(f"{_TOKENIZER}{name}_token_id") for name in ("eos", "eot")]
    ids = list(dict.fromkeys(token for token in ends if isinstance(token, int)))
    if ids:
        _write_json(folder / "generation_config.json", {"eos_token_id": ids})
    return HfSource(folder, hf_tensors(file, config))


def _write_json(file: Path, values: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Build the tokenizer with transformers, with the splits of text that the file names."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split
    from transformers import AutoTokenizer

    pre = file.metadata.get(f"{_TOKENIZER}pre")
    is_byte_level = file.metadata.get(f"{_TOKENIZER}model") == "gpt2"
    if is_byte_level and pre not in _SPLITS:
        raise MsrlError(
            f"{file.path}: {_TOKENIZER}pre={pre}: not supported. Supported: {', '.join(_SPLITS)}"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(file.path.parent),
            gguf_file=file.path.name,
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # whatever transformers raises for entries that it cannot read
        raise MsrlError(f"{file.path}: transformers cannot read its tokenizer: {error}") from error
    if is_byte_level:
        split = _SPLITS[str(pre)]
        first = Split(Regex(split), "isolated") if split else Digits(individual_digits=True)
        words = ByteLevel(add_prefix_space=False, use_regex=not split)
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([first, words])
    tokenizer.save_pretrained(folder)
