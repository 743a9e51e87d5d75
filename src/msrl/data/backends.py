"""Back ends of tokenizers, built as transformers builds them but without importing it.

The import of transformers takes longer than the tokenization of several megabytes. `build` returns
None for every setting whose effect it does not know: the caller then lets transformers load the
tokenizer. Source of the rules (transformers 5.19): tokenization_utils_base.py, `_from_pretrained`;
tokenization_utils_tokenizers.py, `convert_to_native_format` and `__init__`; and the constructors of
`GPT2Tokenizer` and `Qwen2Tokenizer`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ClassName = Literal["TokenizersBackend", "GPT2Tokenizer", "Qwen2Tokenizer"]
CONTROL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# Keys of tokenizer_config.json that do not change the token ids of a text.
_NEUTRAL_KEYS = {
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "added_tokens_decoder",
    "additional_special_tokens",
    "backend",
    "chat_template",
    "clean_up_tokenization_spaces",
    "errors",
    "extra_special_tokens",
    "is_local",
    "legacy",
    "local_files_only",
    "model_input_names",
    "model_max_length",
    "name_or_path",
    "padding_side",
    "processor_class",
    "sp_model_kwargs",
    "spaces_between_special_tokens",
    "split_special_tokens",
    "tokenizer_class",
    "transformers_version",
    "truncation_side",
    "use_default_system_prompt",
    "use_fast",
    "vocab_size",
}
_LEGACY_FILES = ("special_tokens_map.json", "added_tokens.json")
_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Backend:
    """A back end of the `tokenizers` library and the control tokens by their key."""

    tokenizer: Any
    tokens: Mapping[str, str | None]


@dataclass(frozen=True)
class _Rebuilt:
    """A class that takes only the vocabulary and the post-processor from tokenizer.json.

    `tokens` are its default control tokens, `set_up` sets the other components.
    """

    tokens: Mapping[str, str]
    set_up: Callable[[Any], None]
    marks_all_special: bool = field(default=False)


def build(folder: Path, name: ClassName, config: Mapping[str, Any]) -> Backend | None:
    """Return the back end of a transformers class, or None if only transformers can build it.

    Args:
        folder: folder with tokenizer.json, or with vocab.json and merges.txt.
        name: class of transformers that loads the folder.
        config: contents of tokenizer_config.json, empty if there is none.
    """
    try:
        return _build(folder, _REBUILT.get(name), config)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # tokenizers raises bare Exception and panics; transformers reports them
        return None


def _build(folder: Path, rebuilt: _Rebuilt | None, config: Mapping[str, Any]) -> Backend | None:
    source = _source(folder, config) if _has_known_keys(folder, config) else None
    if source is None or source.padding is not None:  # which may name the padding token
        return None
    tokenizer = source if rebuilt is None else _rebuild(source, rebuilt, config)
    if tokenizer is None or not tokenizer.get_vocab_size(with_added_tokens=False):
        return None
    defaults = {} if rebuilt is None else rebuilt.tokens
    tokens = {key: config.get(key, defaults.get(key)) for key in CONTROL_TOKENS}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if not all(isinstance(token, str) for token in (*extra, *filter(None, tokens.values()))):
        return None
    _add_tokens(tokenizer, _declared_tokens(source, config), tokens, extra)
    if rebuilt is not None and rebuilt.marks_all_special:
        _add_special(tokenizer, [*filter(None, tokens.values()), *extra])
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return Backend(tokenizer, tokens)


def _has_known_keys(folder: Path, config: Mapping[str, Any]) -> bool:
    """Return True if transformers reads nothing but the known keys and tokenizer files."""
    if not config.keys() <= {*_NEUTRAL_KEYS, *CONTROL_TOKENS} or config.get("split_special_tokens"):
        return False
    if not isinstance(config.get("extra_special_tokens") or [], list):
        return False  # names of further control tokens
    is_legacy = "added_tokens_decoder" not in config
    return not (is_legacy and any((folder / name).exists() for name in _LEGACY_FILES))


def _source(folder: Path, config: Mapping[str, Any]) -> Any:
    """Return the tokenizer in the files of a folder, or None if there are others."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    path = folder / "tokenizer.json"
    if path.is_file():
        return Tokenizer.from_file(str(path))
    files = [folder / "vocab.json", folder / "merges.txt"]
    adds_tokens = config.get("add_bos_token") or config.get("add_eos_token")
    if adds_tokens or not all(file.is_file() for file in files) or _has_other_files(folder):
        return None
    return Tokenizer(BPE.from_file(*map(str, files)))


def _rebuild(source: Any, rebuilt: _Rebuilt, config: Mapping[str, Any]) -> Any:
    """Return a tokenizer of a class with the vocabulary of another one, or None."""
    from tokenizers import Tokenizer

    if source is None or config.get("add_prefix_space") or not _is_plain_bpe(source.model):
        return None
    tokenizer: Any = Tokenizer(source.model)
    rebuilt.set_up(tokenizer)
    if source.post_processor is not None:
        tokenizer.post_processor = source.post_processor
    return tokenizer


def _is_plain_bpe(model: Any) -> bool:
    """Return True if the constructors of the rebuilt classes would create the same model."""
    from tokenizers.models import BPE

    return isinstance(model, BPE) and not (
        model.dropout
        or model.unk_token
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
        or model.fuse_unk
        or model.byte_fallback
        or model.ignore_merges
    )


def _has_other_files(folder: Path) -> bool:
    """Return True if a folder has vocabularies that transformers prefers to vocab.json."""
    return any(".model" in file.name or "tekken" in file.name for file in folder.iterdir())


def _declared_tokens(source: Any, config: Mapping[str, Any]) -> dict[int, Any]:
    """Return the added tokens by id: from the configuration, else from the source."""
    from tokenizers import AddedToken

    if "added_tokens_decoder" not in config:
        return source.get_added_tokens_decoder()
    declared = config["added_tokens_decoder"].items()
    return {int(number): AddedToken(**token) for number, token in declared}


def _add_tokens(
    tokenizer: Any,
    declared: Mapping[int, Any],
    tokens: Mapping[str, str | None],
    extra: list[str],
) -> None:
    """Add the declared tokens in the order of their ids, then new control tokens as special."""
    named = set(filter(None, tokens.values()))
    added = [token for _, token in sorted(declared.items(), key=lambda item: item[0])]
    for token in added:
        token.special = token.special or token.content in named
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    known.update(token.content for token in added)
    tokenizer.add_tokens(added)
    _add_special(tokenizer, [t for t in (*tokens.values(), *extra) if t and t not in known])


def _add_special(tokenizer: Any, texts: list[str]) -> None:
    from tokenizers import AddedToken

    tokenizer.add_tokens([AddedToken(text, special=True) for text in dict.fromkeys(texts)])


def _set_up_gpt2(tokenizer: Any) -> None:
    from tokenizers import decoders, pre_tokenizers

    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()


def _set_up_qwen2(tokenizer: Any) -> None:
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    tokenizer.normalizer = normalizers.NFC()
    split: Any = pre_tokenizers.Split(Regex(_QWEN2_PATTERN), behavior="isolated", invert=False)
    level: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()


_END = "<|endoftext|>"
_REBUILT: dict[str, _Rebuilt] = {
    "GPT2Tokenizer": _Rebuilt(
        {"unk_token": _END, "bos_token": _END, "eos_token": _END}, _set_up_gpt2
    ),
    "Qwen2Tokenizer": _Rebuilt(
        {"unk_token": _END, "eos_token": _END, "pad_token": _END}, _set_up_qwen2, True
    ),
}
