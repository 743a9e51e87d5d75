"""Tokenizers of GGUF files: read into a Hugging Face folder, and described from one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msrl.checkpoint.gguf.file import GgufFile
from msrl.errors import MsrlError
from msrl.models.hf_config import end_tokens

_TOKENIZER, _TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
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


def write_tokenizer(file: GgufFile, folder: Path) -> None:
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


def stop_tokens(file: GgufFile) -> list[int]:
    """Return the tokens that end a response."""
    ends = [file.metadata.get(f"{_TOKENIZER}{name}_token_id") for name in ("eos", "eot")]
    return list(dict.fromkeys(token for token in ends if isinstance(token, int)))


def tokenizer_metadata(folder: Path, vocab_size: int) -> dict[str, Any]:
    """Return the metadata of the tokenizer in a Hugging Face folder.

    Raises:
        MsrlError: llama.cpp does not know its splits of text.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever transformers raises for files that it cannot read
        raise MsrlError(f"{folder}: transformers cannot read its tokenizer: {error}") from error
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    texts = {token: text for text, token in tokenizer.get_vocab().items()}
    added = tokenizer.added_tokens_decoder
    types = [_token_type(token in texts, added.get(token)) for token in range(vocab_size)]
    other_ends = [token for token in end_tokens(folder) if token != tokenizer.eos_token_id]
    ids = {
        "bos": tokenizer.bos_token_id,
        "eos": tokenizer.eos_token_id,
        "eot": other_ends[0] if other_ends else None,
        "padding": tokenizer.pad_token_id,
    }
    values: dict[str, Any] = {
        "model": "gpt2",
        "pre": _split_name(state, folder),
        "tokens": [texts.get(token, f"[PAD{token}]") for token in range(vocab_size)],
        "token_type": types,
        "merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "add_bos_token": tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id,
        **{f"{name}_token_id": token for name, token in ids.items() if token is not None},
    }
    entries = {f"{_TOKENIZER}{name}": value for name, value in values.items()}
    if isinstance(tokenizer.chat_template, str):
        entries[_TEMPLATE] = tokenizer.chat_template
    return entries


def _split_name(state: Mapping[str, Any], folder: Path) -> str:
    """Return the name by which llama.cpp knows how a tokenizer splits text."""
    pre = state["pre_tokenizer"] or {}
    steps = pre.get("pretokenizers", [pre])
    kinds = [step.get("type") for step in steps]
    if state["model"]["type"] == "BPE" and kinds == ["Split", "ByteLevel"]:
        pattern = steps[0]["pattern"].get("Regex")
    else:
        pattern = _SINGLE_DIGITS if kinds == ["Digits", "ByteLevel"] else None
    names = [name for name, split in _SPLITS.items() if split == pattern]
    if not names:
        raise MsrlError(
            f"{folder}: its tokenizer splits text in a way that GGUF files of msrl cannot name. "
            f"Supported: the splits of {', '.join(_SPLITS)}. Use the converter of llama.cpp."
        )
    return names[0]


def _token_type(is_known: bool, added: Any) -> int:
    """Return the type of a token: normal 1, control 3, user-defined 4, unused 5."""
    if added is not None:
        return 3 if added.special else 4
    return 1 if is_known else 5
