"""Tokenizers from a local folder: no hub, no remote code.

`load_tokenizer` is transformers' object. `open_tokenizer` is the little that preprocessing needs, and spares the import of transformers
(about two seconds) where tokenizer.json is by definition the whole tokenizer (class PreTrainedTokenizerFast or TokenizersBackend).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msrl.errors import MsrlError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")


class HasVocab(Protocol):
    """Anything that knows its tokens and their ids."""

    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizers back end with the names of its control tokens. `folder` is where it came from."""

    backend: Tokenizer
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    folder: str

    def get_vocab(self) -> dict[str, int]:
        """All tokens, added ones included, and their ids."""
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """The largest id plus one: the rows that an embedding needs."""
        return max(self.get_vocab().values()) + 1

    def token_id(self, token: str) -> int | None:
        """The id of one token, None when it is not in the vocabulary."""
        return self.backend.token_to_id(token)

    @property
    def pad_token_id(self) -> int:
        """The padding token's id, else that of the end of text, else 0. Padding is never learnt nor attended to."""
        for token in (self.pad_token, self.eos_token):
            if token is not None and (number := self.token_id(token)) is not None:
                return number
        return 0


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The Hugging Face tokenizer of a local folder. Raises MsrlError when the folder holds none.

    A folder with vocab.json and merges.txt but neither tokenizer.json nor a configuration is read as a byte-level BPE of GPT-2's kind.
    """
    folder = _folder(path)
    from transformers import AutoTokenizer, GPT2Tokenizer

    files = {file.name for file in folder.iterdir()}
    try:
        if {"vocab.json", "merges.txt"} <= files and not files & {"tokenizer.json", "tokenizer_config.json", "config.json"}:
            return GPT2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"), name_or_path=str(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise MsrlError(f"tokenizer={folder}: cannot be loaded: {reason}") from error
    if tokenizer.get_vocab().keys() <= tokenizer.added_tokens_encoder.keys():  # made from config.json's class alone
        raise MsrlError(f"tokenizer={folder}: holds no vocabulary, as tokenizer.json is; copy it there, or name a folder that has it")
    return tokenizer


def open_tokenizer(path: str | Path) -> TextTokenizer:
    """The tokenizer of a local folder for encoding only; the same ids as `load_tokenizer`'s. Raises MsrlError when there is none."""
    folder = _folder(path)
    return _read_plain(folder) or text_tokenizer(load_tokenizer(folder))


def text_tokenizer(tokenizer: PreTrainedTokenizerBase) -> TextTokenizer:
    """The encoding part of a Hugging Face tokenizer. Raises MsrlError when it has no fast back end."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise MsrlError(f"tokenizer={tokenizer.name_or_path}: has no fast form (tokenizer.json); convert it with transformers first")
    return TextTokenizer(
        backend, *(_name(getattr(tokenizer, f"{n}_token")) for n in ("bos", "eos", "pad")), folder=str(tokenizer.name_or_path)
    )


def tokenizer_hash(tokenizer: HasVocab) -> str:
    """SHA-256 over (token, id) in order of id: equal when every id means the same, whatever files the tokenizer was read from."""
    items = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(items, ensure_ascii=True, separators=(",", ":")).encode()).hexdigest()


def _folder(path: str | Path) -> Path:
    """The folder, proven to exist and to be one."""
    folder = Path(path)
    if not folder.is_dir():
        raise MsrlError(
            f"tokenizer={folder}: there is no such folder; give a local folder with tokenizer.json, or vocab.json and merges.txt"
        )
    return folder


def _read_plain(folder: Path) -> TextTokenizer | None:
    """The tokenizer straight from tokenizer.json, or None where transformers would make more of it than stands there."""
    config_file, tokenizer_file = folder / "tokenizer_config.json", folder / "tokenizer.json"
    if not (config_file.is_file() and tokenizer_file.is_file()):
        return None
    from tokenizers import Tokenizer

    try:
        config = json.loads(config_file.read_text(encoding="utf-8"))
        if config.get("tokenizer_class") not in _PLAIN_CLASSES or (folder / "special_tokens_map.json").exists():
            return None
        backend: Any = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise MsrlError(f"tokenizer={folder}: cannot be read: {error}") from error
    added = {str(number): token.content for number, token in backend.get_added_tokens_decoder().items()}
    declared = {number: token["content"] for number, token in config.get("added_tokens_decoder", {}).items()}
    names = [_name(config.get(f"{name}_token")) for name in ("bos", "eos", "pad")]
    further = [name for key in ("additional_special_tokens", "extra_special_tokens") for name in config.get(key) or ()]
    known = set(added.values())
    if any(added.get(number) != content for number, content in declared.items()):
        return None
    if not all(token in known for token in (*filter(None, names), *further)):
        return None
    backend.no_truncation()
    backend.no_padding()
    return TextTokenizer(backend, *names, folder=str(folder))


def _name(token: Any) -> str | None:
    """The text of a control token, which configurations write as text or as an object with `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return None if token is None else str(token)
