"""GGUF files become Hugging Face folders with the same weights, tokens and logits, and return."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel

from gguf_files import LLAMA3, MODELS, make_model, write_gguf
from msrl.checkpoint.dtypes import same_bits
from msrl.checkpoint.gguf.file import read_gguf
from msrl.checkpoint.gguf.folder import open_gguf
from msrl.checkpoint.gguf.model import FREQUENCIES
from msrl.errors import ManyErrors, MsrlError
from support import assert_mentions, mentions, shared_data
from test_cli import msrl

TEXTS = (
    "Natalia sold 48 clips in April,  1234 in May.\n\n\nIt's 3.14!",
    "def f(x):\n    return x**2  # \u5df2\u77e5\u4e09\u89d2\u5f62\t\r\n",
    "  leading spaces, trailing spaces   ",
)


def convert(file: Path, save: Path, *options: str) -> int:
    return msrl("convert-ckpt", "gguf2hf", "--load", str(file), "--save", str(save), *options)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sample(3)
@pytest.mark.slow
def test_a_float32_file_gives_the_weights_and_logits_of_its_model(name, tmp_path, capsys):
    from transformers import AutoModelForCausalLM

    model = make_model(name)
    file = write_gguf(tmp_path / "model.gguf", name, model)
    assert convert(file, tmp_path / "hf") == 0
    assert_mentions(capsys.readouterr().out, "round trip", "logits", "msrl chat")
    tokens = torch.arange(3, 63)[None]
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(converted(tokens).logits, model(tokens).logits)
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    for tensor_name, tensor in model.state_dict().items():
        if tensor_name in stored:
            assert torch.equal(stored[tensor_name], tensor), tensor_name


OTHER_TYPES = [pytest.param(t, marks=pytest.mark.full) for t in ("BF16", "Q4_0", "Q5_0", "Q5_1")]


@pytest.mark.parametrize("quantization", ["F16", "Q8_0", "Q4_1", *OTHER_TYPES])
@pytest.mark.slow
def test_a_quantized_file_gives_the_values_of_its_blocks(quantization, tmp_path, capsys):
    import gguf

    model, kind = make_model("llama"), gguf.GGMLQuantizationType[quantization]
    file = write_gguf(tmp_path / "model.gguf", "llama", model, quantization)
    assert convert(file, tmp_path / "hf") == 0, capsys.readouterr()
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight"):
        blocks = gguf.quantize(model.state_dict()[name].numpy(), kind)
        assert torch.equal(stored[name].float(), torch.from_numpy(gguf.dequantize(blocks, kind)))
    assert stored["model.norm.weight"].dtype == torch.float32
    assert stored["model.embed_tokens.weight"].dtype == (
        {"F16": torch.float16, "BF16": torch.bfloat16}.get(quantization, torch.float32)
    )


def test_the_type_of_the_result_can_be_chosen(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "qwen3", make_model("qwen3"), "Q8_0")
    assert convert(file, tmp_path / "hf", "--dtype", "bf16") == 0
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_tokenizer_chat_template_and_end_tokens_are_those_of_the_file(tmp_path):
    from transformers import AutoTokenizer

    changes = {"tokenizer.ggml.eot_token_id": 1}
    file = write_gguf(tmp_path / "model.gguf", "qwen2", make_model("qwen2"), changes=changes)
    assert convert(file, tmp_path / "hf", "--no-verify") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hi"
    assert tokenizer.decode(tokenizer("x = 12")["input_ids"]) == "x = 12"
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 1]


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen2.5-0.5b-instruct", "qwen3-4b"])
def test_texts_have_the_tokens_of_the_original_tokenizer(name, tmp_path):
    from transformers import AutoTokenizer

    folder = shared_data(f"tokenizers/{name}")
    original = AutoTokenizer.from_pretrained(folder)
    merges = json.loads(original.backend_tokenizer.to_str())["model"]["merges"]
    tokens = sorted(original.get_vocab(), key=original.get_vocab().__getitem__)
    special = set(original.all_special_tokens)
    model = make_model("qwen2")
    model.resize_token_embeddings(len(tokens), mean_resizing=False)
    changes = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": original.eos_token_id,
        "tokenizer.ggml.padding_token_id": original.pad_token_id,
    }
    file = write_gguf(tmp_path / "model.gguf", "qwen2", model, changes=changes)
    (tmp_path / "hf").mkdir()
    open_gguf(file, tmp_path / "hf")
    converted = AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXTS:
        assert converted(text)["input_ids"] == original(text)["input_ids"]


def test_smollm_splits_digits_before_words(tmp_path):
    """Otherwise the second of two spaces before a number would belong to the number."""

    from transformers import AutoTokenizer

    changes = {"tokenizer.ggml.pre": "smollm", "tokenizer.ggml.merges": ["\u0120 \u0120", "1 2"]}
    model = make_model("llama")
    tokens = ["<s>", "<e>", "<p>", *sorted(ByteLevel.alphabet()), "\u0120\u0120", "12"]
    tokens += [f"<|{number}|>" for number in range(model.config.vocab_size - len(tokens))]
    changes |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * len(tokens)}
    file = write_gguf(tmp_path / "model.gguf", "llama", model, changes=changes)
    (tmp_path / "hf").mkdir()
    open_gguf(file, tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer.tokenize("a  12") == ["a", "\u0120\u0120", "1", "2"]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"general.architecture": "mamba"}, ("general.architecture=mamba", "llama", "qwen3")),
        ({"llama.expert_count": 8}, ("llama.expert_count=8",)),
        ({"llama.attention.sliding_window": 512}, ("llama.attention.sliding_window=512",)),
        ({"llama.rope.dimension_count": 8}, ("llama.rope.dimension_count=8", "16")),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, ("longrope",)),
        ({"llama.block_count": 3}, ("missing", "model.layers.2")),
        ({"llama.block_count": 1}, ("not part of", "model.layers.1")),
        ({"llama.feed_forward_length": 90}, ("mlp", "90", "96")),
        ({"llama.embedding_length": None}, ("llama.embedding_length", "missing")),
        ({"llama.block_count": 0}, ("llama.block_count=0",)),
        ({"split.count": 3}, ("3 parts", "llama-gguf-split")),
        ({"tokenizer.ggml.pre": "unheard"}, ("tokenizer.ggml.pre=unheard", "llama-bpe")),
        ({"tokenizer.ggml.model": "rwkv"}, ("tokenizer",)),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, fragments, tmp_path, capsys):
    file = write_gguf(tmp_path / "model.gguf", "llama", make_model("llama"), changes=changes)
    assert convert(file, tmp_path / "hf") == 2
    assert_mentions(" ".join(capsys.readouterr().err.split()), "model.gguf", *fragments)
    assert not (tmp_path / "hf").exists() and not (tmp_path / "hf.unverified").exists()


def test_rotary_divisors_that_no_rope_type_gives_are_refused(tmp_path):
    model = make_model("llama3")
    model.model.rotary_emb.inv_freq[1] *= 1.5
    file = write_gguf(tmp_path / "model.gguf", "llama3", model)
    with pytest.raises(MsrlError, match=mentions("rope_freqs.weight", "llama3")):
        open_gguf(file, tmp_path)


def test_a_folder_and_a_missing_file_are_refused_with_what_to_name(tmp_path, capsys):
    write_gguf(tmp_path / "a.gguf", "llama", make_model("llama"))
    assert convert(tmp_path, tmp_path / "hf") == 2
    assert_mentions(capsys.readouterr().err, "a.gguf", "folder")
    assert convert(tmp_path / "none.gguf", tmp_path / "hf") == 2
    assert_mentions(capsys.readouterr().err, "convert.load", "does not exist")


def test_a_truncated_or_altered_file_is_read_or_refused_by_name(tmp_path):
    """Lengths that an altered byte makes huge are compared with the file before they are used."""
    whole = write_gguf(tmp_path / "whole.gguf", "llama", make_model("llama")).read_bytes()
    damaged, draw = tmp_path / "damaged.gguf", random.Random(0)
    header = whole.index(b"blk.0.")
    for attempt in range(400):
        content = bytearray(whole[: draw.randrange(header)] if attempt % 4 == 0 else whole)
        for _ in range(0 if attempt % 4 == 0 else draw.randrange(1, 4)):
            content[draw.randrange(min(header + 2000, len(content)))] = draw.choice(
                (0, 1, 127, 255)
            )
        damaged.write_bytes(content)
        try:
            file = read_gguf(damaged)
            for stored in file.tensors.values():
                stored.read()
        except (MsrlError, ManyErrors) as error:
            assert "damaged.gguf" in str(error)


# --- Files that msrl writes ---


def write(folder: Path, save: Path, *options: str) -> int:
    return msrl("convert-ckpt", "hf2gguf", "--load", str(folder), "--save", str(save), *options)


@pytest.fixture
def llama(tmp_path):
    """Return the Hugging Face folder of a small model."""
    file = write_gguf(tmp_path / "model.gguf", "llama", make_model("llama"))
    assert convert(file, tmp_path / "hf", "--no-verify") == 0
    return tmp_path / "hf"


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.slow
def test_a_written_file_has_the_contents_of_the_file_that_it_comes_from(name, tmp_path, capsys):
    original = write_gguf(tmp_path / "model.gguf", name, make_model(name))
    assert convert(original, tmp_path / "hf", "--no-verify") == 0
    assert write(tmp_path / "hf", tmp_path / "out") == 0, capsys.readouterr()
    assert_mentions(capsys.readouterr().out, "equal", "tokens", "logits")
    before, after = read_gguf(original), read_gguf(tmp_path / "out" / "model.gguf")
    assert before.metadata.items() <= after.metadata.items()
    assert before.tensors.keys() == after.tensors.keys()
    for tensor, stored in before.tensors.items():
        written = after.tensors[tensor].read()
        if tensor == FREQUENCIES:  # the package's file has quotients of transformers' frequencies
            torch.testing.assert_close(written, stored.read())
        else:
            assert torch.equal(written, stored.read()), tensor
    assert (tmp_path / "out" / "Modelfile").read_text() == "FROM ./model.gguf\n"


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "q8_0"])
def test_a_written_file_is_rounded_as_the_package_gguf_does(dtype, llama, tmp_path):
    quantization = {"fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}[dtype]
    expected = write_gguf(tmp_path / "expected.gguf", "llama", make_model("llama"), quantization)
    assert write(llama, tmp_path / "out", "--dtype", dtype, "--no-verify") == 0
    after = read_gguf(tmp_path / "out" / "model.gguf")
    for tensor, stored in read_gguf(expected).tensors.items():
        assert same_bits(stored.read(), after.tensors[tensor].read()), tensor


def test_weights_in_bfloat16_return_bit_for_bit(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "llama", make_model("llama"), "BF16")
    assert convert(file, tmp_path / "hf", "--dtype", "bf16", "--no-verify") == 0
    assert write(tmp_path / "hf", tmp_path / "out", "--no-verify") == 0
    back = tmp_path / "back"
    assert convert(tmp_path / "out" / "model.gguf", back, "--dtype", "bf16", "--no-verify") == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (tmp_path / "hf", back))
    assert before.keys() == after.keys()
    assert all(same_bits(tensor, after[name]) for name, tensor in before.items())


def set_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        ({"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}, ("GemmaForCausalLM",)),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, ("layers",)),
    ],
)
def test_models_that_a_file_cannot_describe_are_refused(config, fragments, llama, tmp_path, capsys):
    set_config(llama, **config)
    assert write(llama, tmp_path / "out") == 2
    assert_mentions(capsys.readouterr().err, llama, *fragments)
    assert not list(tmp_path.glob("out*"))


def test_numbers_that_overflow_their_type_are_refused(llama, tmp_path, capsys):
    weights = load_file(llama / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e6
    save_file(weights, llama / "model.safetensors")
    (llama / "msrl_manifest.json").unlink(missing_ok=True)
    assert write(llama, tmp_path / "out", "--dtype", "fp16") == 2
    assert_mentions(capsys.readouterr().err, "layers.1.mlp.up_proj", "F16", "--dtype bf16")
    assert not list(tmp_path.glob("out*"))


def test_other_conversions_do_not_quantize(llama, tmp_path, capsys):
    options = ("--load", str(llama), "--save", str(tmp_path / "out"), "--dtype", "q8_0")
    assert msrl("convert-ckpt", "hf2hf", *options) == 2
    assert_mentions(capsys.readouterr().err, "convert.dtype", "q8_0", "hf2gguf")
