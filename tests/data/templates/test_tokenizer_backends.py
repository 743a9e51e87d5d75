"""Tokenizers built without transformers are equal to those that transformers loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from msrl.data.tokenizer import load_tokenizer, open_tokenizer
from support import shared_data

END = "<|endoftext|>"
WORDS = ["ab", "abc", "Ġab", "Ġx"]
MERGES = [("a", "b"), ("ab", "c"), ("Ġ", "ab"), ("Ġ", "x")]
TEXT = f"abc ab 12 x\n\n  x'S {END} <a> <b>abc<c> \u212b"
PLAIN: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
QWEN2: dict[str, Any] = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": END, "bos_token": None}
GPT2: dict[str, Any] = {"tokenizer_class": "GPT2Tokenizer"}
CLASSES = (PLAIN, QWEN2, GPT2)


def token(text: str, **flags: bool) -> dict[str, Any]:
    """Return an added token as tokenizer_config.json declares it."""
    default = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"content": text, **default, "special": True, **flags}


def write(folder: Path, config: dict[str, Any], *, only_vocab: bool = False, **fields: Any) -> Path:
    """Write a byte-level tokenizer with the added tokens END, <a> and <b> into a folder."""
    vocab = {
        text: id for id, text in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *WORDS])
    }
    tokenizer = Tokenizer(models.BPE(vocab, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([END, AddedToken("<a>", lstrip=True, special=True)])
    tokenizer.add_tokens([AddedToken("<b>", normalized=False)])
    contents = json.loads(tokenizer.to_str())
    model = {**contents["model"], **fields.pop("model", {})}
    folder.mkdir(exist_ok=True)
    if only_vocab:
        (folder / "vocab.json").write_text(json.dumps(vocab))
        lines = ["#version: 0.2", *(" ".join(pair) for pair in MERGES)]
        (folder / "merges.txt").write_text("\n".join(lines) + "\n")
    else:
        text = json.dumps({**contents, **fields, "model": model})
        (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def components(backend: Any) -> dict[str, Any]:
    """Return everything that determines the ids of a text, without settings of no effect."""
    contents = json.loads(backend.to_str())
    model = contents["model"]
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        model[key] = model[key] or None
    processor = contents["post_processor"]
    if processor and processor["type"] == "TemplateProcessing" and len(processor["single"]) == 1:
        contents["post_processor"] = None
    return contents


def assert_equal(folder: Path) -> None:
    opened, loaded = open_tokenizer(folder), load_tokenizer(folder)
    expected = components(loaded.backend_tokenizer)
    expected.update(truncation=None, padding=None)
    assert components(opened.backend) == expected
    names = [getattr(loaded, f"{name}_token") for name in ("bos", "eos", "pad")]
    assert [opened.bos_token, opened.eos_token, opened.pad_token] == names
    assert opened.backend.encode(TEXT).ids == loaded(TEXT)["input_ids"]


DECLARED = {"260": token(END), "261": token("<a>", lstrip=True), "262": token("<b>", special=False)}
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "all added tokens": {"added_tokens_decoder": DECLARED},
    "a new added token": {"added_tokens_decoder": {**DECLARED, "263": token("<c>")}},
    "fewer added tokens": {"added_tokens_decoder": {"260": token(END)}},
    "other flags": {"added_tokens_decoder": {**DECLARED, "261": token("<a>", rstrip=True)}},
    "ids in another order": {"added_tokens_decoder": {"262": token(END), "260": token("<b>")}},
    "a control token of the vocabulary": {"eos_token": "abc"},
    "a new control token": {"unk_token": "<c>", "pad_token": "<c>", "mask_token": "<d>"},
    "a control token that was not special": {"eos_token": "<b>"},
    "no control token": {"eos_token": None, "pad_token": None, "unk_token": None},
    "further special tokens": {"extra_special_tokens": ["<c>", "<a>", "ab"]},
    "special tokens of version 4": {"additional_special_tokens": ["<c>", "<b>"]},
    "named special tokens": {"extra_special_tokens": {"image_token": "<c>"}},
    "a token of a model": {"image_token": "<c>"},
    "a token as an object": {"eos_token": {**token(END), "__type": "AddedToken"}},
    "split special tokens": {"split_special_tokens": True},
    "a space before the text": {"add_prefix_space": True},
    "a token before the text": {"bos_token": "<a>", "add_bos_token": True},
}


@pytest.mark.sample(18)
@pytest.mark.parametrize("change", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("config", CLASSES, ids=lambda config: config["tokenizer_class"])
def test_a_tokenizer_is_equal_to_that_of_transformers(tmp_path, config, change):
    assert_equal(write(tmp_path, {**config, **change}))


@pytest.mark.sample(12)
@pytest.mark.parametrize("change", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("config", CLASSES[1:], ids=lambda config: config["tokenizer_class"])
def test_a_vocabulary_with_merges_is_equal_to_that_of_transformers(tmp_path, config, change):
    assert_equal(write(tmp_path, {**config, **change}, only_vocab=True))


FILES: dict[str, dict[str, Any]] = {
    "a normalizer": {"normalizer": {"type": "NFKC"}},
    "another split": {"pre_tokenizer": {"type": "Whitespace"}},
    "no post-processor": {"post_processor": None},
    "an unknown token": {"model": {"unk_token": "a", "fuse_unk": True}},
    "byte fallback": {"model": {"byte_fallback": True}},
    "words without merges": {"model": {"ignore_merges": True}},
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("change", FILES.values(), ids=FILES)
@pytest.mark.parametrize("config", CLASSES, ids=lambda config: config["tokenizer_class"])
def test_the_components_of_the_file_count_where_transformers_reads_them(tmp_path, config, change):
    assert_equal(write(tmp_path, config, **change))


@pytest.mark.parametrize("config", CLASSES, ids=lambda config: config["tokenizer_class"])
@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
@pytest.mark.parametrize("change", [{}, {"added_tokens_decoder": DECLARED}])
def test_files_of_earlier_versions_count_where_transformers_reads_them(
    tmp_path, config, name, change
):
    tokens = {"added_tokens.json": {"<c>": 263}, "special_tokens_map.json": {"pad_token": "<c>"}}
    write(tmp_path, {**config, **change})
    (tmp_path / name).write_text(json.dumps(tokens[name]))
    assert_equal(tmp_path)


@pytest.mark.sample(5)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3", "gpt2", "granite", "llama"])
@pytest.mark.parametrize("config", CLASSES, ids=lambda config: config["tokenizer_class"])
def test_the_class_is_that_of_auto_tokenizer(tmp_path, config, model_type):
    from transformers import AutoTokenizer

    write(tmp_path, config)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    expected, loaded = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    assert type(loaded) is type(expected)
    assert_equal(tmp_path)


@pytest.mark.parametrize("config", CLASSES, ids=lambda config: config["tokenizer_class"])
def test_a_limit_in_the_file_never_shortens_or_pads_texts(tmp_path, config):
    limit = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {
        "strategy": {"Fixed": 100},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    write(tmp_path / "limited", {**config, "image_token": END}, truncation=limit, padding=padding)
    limited = open_tokenizer(tmp_path / "limited")
    plain = open_tokenizer(write(tmp_path / "plain", config))
    assert limited.backend.encode(TEXT).ids == plain.backend.encode(TEXT).ids


def test_a_padding_token_of_the_file_counts_as_in_transformers(tmp_path):
    padding = {
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 300,
        "pad_type_id": 0,
        "pad_token": "<padding>",
    }
    for number, config in enumerate(CLASSES):
        write(tmp_path / str(number), config, padding=padding)
        assert_equal(tmp_path / str(number))


@pytest.mark.parametrize(
    "name",
    [
        "qwen2.5-0.5b-instruct",
        pytest.param("qwen3-4b", marks=pytest.mark.full),
        "gpt2",
        "granite-3.1-1b-a400m",
    ],
)
@pytest.mark.slow
def test_published_tokenizers_are_opened_without_transformers(name):
    folder = shared_data("tokenizers", name)
    code = (
        "import sys; from msrl.data.tokenizer import open_tokenizer; "
        f"open_tokenizer({str(folder)!r}); print('transformers' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
    opened, loaded = open_tokenizer(folder), load_tokenizer(folder)
    assert components(opened.backend) == components(loaded.backend_tokenizer)
