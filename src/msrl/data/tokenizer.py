"""Tokenizers from a local folder, without access to the hub and without remote code.

`load_tokenizer` returns the tokenizer of transformers. `open_tokenizer` returns only what
preprocessing needs. For common classes, `msrl.data.backends` builds it without the import of
transformers (about two seconds). For the other known ones, `load_tokenizer` avoids the import of
AutoTokenizer, which imports torch (another four seconds).
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msrl.data.backends import build as build_backend
from msrl.data.tokenizer_limits import growth_problem
from msrl.errors import MsrlError
from msrl.files import read_text_within
from msrl.limits import printable
from msrl.models.paths import OVERSIZED, oversized_file
from msrl.packages import missing_package

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_BACKEND = "TokenizersBackend"
_PLAIN_CLASSES = ("PreTrainedTokenizer", _BACKEND)  # without the suffix Fast
# Classes that AutoTokenizer (transformers 5.19) selects, by the model type in config.json (None:
# there is no config.json) and the class in tokenizer_config.json.
_CLASSES = {
    (None, "Qwen2Tokenizer"): "Qwen2Tokenizer",
    ("qwen2", "Qwen2Tokenizer"): "Qwen2Tokenizer",
    ("qwen2", "LlamaTokenizer"): "Qwen2Tokenizer",
    **{("qwen2", name): "Qwen2Tokenizer" for name in _PLAIN_CLASSES},
    ("qwen3", "Qwen2Tokenizer"): "Qwen2Tokenizer",
    ("qwen2_moe", "Qwen2Tokenizer"): "Qwen2Tokenizer",
    ("qwen3_moe", "Qwen2Tokenizer"): "Qwen2Tokenizer",
    (None, "GPT2Tokenizer"): "GPT2Tokenizer",
    ("gpt2", "GPT2Tokenizer"): "GPT2Tokenizer",
    (None, "LlamaTokenizer"): "LlamaTokenizer",
}
# Model types for which it selects TokenizersBackend, whatever tokenizer_config.json names.
_BACKEND_TYPES = {"granite", "granitemoe", "deepseek_v2", "deepseek_v3", "glm4", "internlm2"}
# Model types with a separate class, even if tokenizer_config.json names a plain class.
_OWN_CLASS_TYPES = {
    "qwen2",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen4_exp",
    "hyperclovax_vision_v2",
}
_MODULES = {
    _BACKEND: "tokenization_utils_tokenizers",
    "GPT2Tokenizer": "models.gpt2.tokenization_gpt2",
    "LlamaTokenizer": "models.llama.tokenization_llama",
    "Qwen2Tokenizer": "models.qwen2.tokenization_qwen2",
}
_DEFINING_FILES = {"tokenizer.json", "tokenizer_config.json", "config.json"}
_GPT2_FILES = {"vocab.json", "merges.txt"}


class HasVocab(Protocol):
    """Object with a vocabulary: tokens and their ids."""

    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class TextTokenizer:
    """A back end of the `tokenizers` library with its control tokens, read from `folder`.

    `date` is the day that its chat template writes (YYYY-MM-DD); None for the current date.
    """

    backend: Tokenizer
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    folder: str
    date: str | None = None

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens, including added ones, and their ids."""
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """The largest id plus one: the number of rows that the embedding needs."""
        return max(self.get_vocab().values()) + 1

    def token_id(self, token: str) -> int | None:
        """Return the id of a token, or None if it is not in the vocabulary."""
        return self.backend.token_to_id(token)

    def special_tokens(self) -> tuple[str, ...]:
        """Return the added tokens that are declared as special, in order of their ids."""
        added = self.backend.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special)

    @property
    def pad_token_id(self) -> int:
        """The id of the padding token, else of the end-of-text token, else 0.

        The value does not matter for training: padding is masked in the loss and in the attention.
        """
        for token in (self.pad_token, self.eos_token):
            if token is not None and (number := self.token_id(token)) is not None:
                return number
        return 0


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Return the Hugging Face tokenizer of a local folder.

    A folder with vocab.json and merges.txt but neither tokenizer.json nor a configuration is read
    as a byte-level BPE tokenizer like GPT-2's.

    Raises:
        MsrlError: the folder does not contain a tokenizer.
    """
    folder = _folder(path)
    files = {file.name for file in folder.iterdir()}
    if not files & {*_DEFINING_FILES, "vocab.json"}:
        raise MsrlError(f"tokenizer={folder}: {_no_tokenizer(folder)}")
    try:
        if _is_gpt2_vocabulary(files):
            from transformers import GPT2Tokenizer

            return GPT2Tokenizer(
                vocab=str(folder / "vocab.json"),
                merges=str(folder / "merges.txt"),
                name_or_path=str(folder),
            )
        tokenizer = _tokenizer_class(folder).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except (KeyboardInterrupt, SystemExit):
        raise
    except ModuleNotFoundError as error:
        if missing_package(error) is not None:
            raise
        raise MsrlError(
            f"tokenizer={folder}: needs the package {error.name}, which is not installed. "
            f"Install it with `pip install {error.name}`."
        ) from error
    except BaseException as error:  # tokenizers raises bare Exception; a panic is not even one
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise MsrlError(
            f"tokenizer={folder}: cannot be loaded: {printable(reason)}. Restore its files."
        ) from error
    # transformers creates a tokenizer without a vocabulary from the class in config.json alone.
    if tokenizer.get_vocab().keys() <= tokenizer.added_tokens_encoder.keys():
        raise MsrlError(
            f"tokenizer={folder}: contains no vocabulary such as tokenizer.json. "
            "Copy it to this folder, or name a folder that contains it."
        )
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        _check_growth(backend, folder)
    return tokenizer


def _check_growth(backend: Tokenizer, folder: Path) -> None:
    """Raise MsrlError for a tokenizer whose rules make texts too long."""
    problem = growth_problem(backend)
    if problem is not None:
        raise MsrlError(f"tokenizer={folder}: {problem}. Restore its tokenizer.json.")


def _tokenizer_class(folder: Path) -> Any:
    """Return AutoTokenizer, or the class that it would select if that is known."""
    name = _class_name(folder)
    if name is not None:
        return getattr(importlib.import_module(f"transformers.{_MODULES[name]}"), name)
    from transformers import AutoTokenizer

    return AutoTokenizer


def _class_name(folder: Path) -> str | None:
    """Return the class that AutoTokenizer selects, or None if it is not known."""
    config = _read_object(folder / "tokenizer_config.json")
    model = _read_object(folder / "config.json")
    if "auto_map" in config | model:
        return None
    model_type = str(model["model_type"]) if "model_type" in model else None
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    is_plain = name in _PLAIN_CLASSES and model_type not in _OWN_CLASS_TYPES
    selected = _CLASSES.get((model_type, name))
    if model_type in _BACKEND_TYPES or is_plain:
        selected = _BACKEND
    if (folder / "tokenizer.json").is_file():
        return selected
    has_vocabulary = all((folder / file).is_file() for file in _GPT2_FILES)
    return selected if has_vocabulary and selected in ("GPT2Tokenizer", "Qwen2Tokenizer") else None


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if there is none."""
    if not path.is_file():
        return {}
    contents = json.loads(read_text_within(path))
    return contents if isinstance(contents, dict) else {}


def open_tokenizer(path: str | Path) -> TextTokenizer:
    """Return the tokenizer of a local folder for encoding, with the same ids as `load_tokenizer`.

    Raises:
        MsrlError: the folder does not contain a tokenizer.
    """
    folder = _folder(path)
    tokenizer = _build(folder)
    if tokenizer is None:
        return text_tokenizer(load_tokenizer(folder))
    _check_growth(tokenizer.backend, folder)
    return tokenizer


def text_tokenizer(tokenizer: PreTrainedTokenizerBase) -> TextTokenizer:
    """Return the back end of a Hugging Face tokenizer. Raises MsrlError if it is not a fast one."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise MsrlError(
            f"tokenizer={tokenizer.name_or_path}: not a fast tokenizer (tokenizer.json). "
            "Convert it with transformers first."
        )
    # transformers sets both for each of its calls. Here they would shorten or extend every text.
    backend.no_truncation()
    backend.no_padding()
    names = [_name(getattr(tokenizer, f"{name}_token")) for name in ("bos", "eos", "pad")]
    return TextTokenizer(backend, *names, folder=str(tokenizer.name_or_path))


def tokenizer_hash(tokenizer: HasVocab) -> str:
    """Return the SHA-256 of all (token, id) pairs in order of id.

    It is equal for tokenizers in which every id has the same meaning, independent of their files.
    """
    return vocab_hash(tokenizer.get_vocab())


def vocab_hash(vocab: Mapping[str, int]) -> str:
    """Return the `tokenizer_hash` of a vocabulary: tokens and their ids."""
    items = sorted((number, token) for token, number in vocab.items())
    text = json.dumps(items, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _folder(path: str | Path) -> Path:
    """Return the folder. Raises MsrlError if it does not exist, or a file of it is too large."""
    folder = Path(path)
    if not folder.is_dir():
        raise MsrlError(
            f"tokenizer={folder}: no such folder. "
            "Name a local folder with tokenizer.json, or with vocab.json and merges.txt."
        )
    if file := oversized_file(folder):
        raise MsrlError(f"tokenizer={folder}: {file.name} {OVERSIZED}")
    return folder


def _no_tokenizer(folder: Path) -> str:
    """Return problem and remedy for a folder without the files of a tokenizer."""
    inner = folder / "hf"  # where checkpoints of msrl have config.json and tokenizer
    hint = f"; did you mean {inner}?" if inner.is_dir() else ". Name the folder of the model."
    return f"contains no tokenizer such as tokenizer.json{hint}"


def _build(folder: Path) -> TextTokenizer | None:
    """Return the tokenizer built without transformers, or None if that is not possible."""
    files = {file.name for file in folder.iterdir()}
    try:
        name = "GPT2Tokenizer" if _is_gpt2_vocabulary(files) else _class_name(folder)
        config = _read_object(folder / "tokenizer_config.json")
    except (ValueError, RecursionError):
        return None  # not JSON, which `load_tokenizer` reports
    if name not in (_BACKEND, "GPT2Tokenizer", "Qwen2Tokenizer"):
        return None
    backend = build_backend(folder, name, config)
    if backend is None:
        return None
    names = [backend.tokens[f"{name}_token"] for name in ("bos", "eos", "pad")]
    return TextTokenizer(backend.tokenizer, *names, folder=str(folder))


def _is_gpt2_vocabulary(files: set[str]) -> bool:
    """Return True if the names of files mean a vocabulary without any configuration."""
    return files >= _GPT2_FILES and not files & _DEFINING_FILES


def _name(token: Any) -> str | None:
    """Return the text of a control token.

    Configurations write it as a string or as an object with `content`.
    """
    if isinstance(token, dict):
        token = token.get("content")
    return None if token is None else str(token)
