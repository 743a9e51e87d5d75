"""Fuzzing of every parser of foreign bytes with hypothesis; `nox -s fuzz` runs it.

A target passes any input that is read or refused with MsrlError. Another exception, more than
`MAX_SECONDS` of computing for one input, `MAX_WAIT_S` of waiting or more than `MAX_BYTES` of memory
is a finding. Findings become ordinary tests. The table at the end has the largest of each.

    python tests/fuzz.py [--seconds N] [TARGET...]
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import io
import itertools
import json
import os
import pickle
import random
import resource
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors

from support import ROOT, folders

sys.path.extend(folders())

import tiny_checkpoints as tiny
import vision_folders
from families import FAMILIES
from gguf_files import make_model, write_gguf
from mixture_families import MIXTURES
from msrl import limits
from msrl.chat_rendering import client as chat_rendering
from msrl.checkpoint.adapters.megatron import read_adapter
from msrl.checkpoint.convert import McoreTarget, write_mcore
from msrl.checkpoint.distributed.read import GlobalTensors
from msrl.checkpoint.gguf.file import read_gguf
from msrl.checkpoint.hf.folder import sidecar_files
from msrl.checkpoint.hf.weight_files import open_safetensors, open_weight_files
from msrl.checkpoint.integrity import weight_checks
from msrl.checkpoint.source import open_weights
from msrl.checkpoint.torch_files.reader import read_torch_file
from msrl.checkpoint.torch_files.whole_files import check_records
from msrl.cli.configuration import load_configuration
from msrl.config.sources import parse
from msrl.data.columns import DroppedRow
from msrl.data.files.readers import read_batches
from msrl.data.handlers import make_handler
from msrl.data.images.files import ImageReader, ImageWriter
from msrl.data.images.load import ImageRecord, ImageSettings, load_images
from msrl.data.images.marks import IMAGE, attach_images
from msrl.data.indexed import IndexedReader, IndexedWriter
from msrl.data.native import native_examples, native_prompts
from msrl.data.render import make_renderer
from msrl.data.templates.files import _read as read_template
from msrl.data.templates.files import load_template
from msrl.data.tokenizer import load_tokenizer, open_tokenizer
from msrl.errors import MsrlError
from msrl.importers.command import translate_arguments
from msrl.limits import run_within
from msrl.models.families import all_rules, shape_from_config
from msrl.models.hf_config import read_hf_config
from msrl.models.parallel_layout import ParallelLayout
from msrl.types import Conversation, Message
from msrl.vision.pixels import check_image, decode_image, image_size, load_decoders
from msrl.vision.settings import read_vision_settings
from msrl.workflows.report import run as write_report
from msrl.workflows.rl.replay.responses import FIELDS, ResponseFile
from msrl.workflows.view.build import write_folder
from tiny_qwen2 import CHATML, make_tokenizer
from view_runs import make_run
from vision_folders import encoded, picture

MAX_SECONDS = 5.0  # of computing for one input, also in processes that have ended
# 1 s for each of three renderings, and 2 s of an import, then the message
LIMITS = {"chat_templates": 10.0, "regular_expressions": 10.0, "sizes": 20.0}
MAX_BYTES = 2 << 30  # of address space beyond the size of the idle process
MAX_WAIT_S = 180  # for a pipe without a writer

Target = Callable[[Path, Any], object]
TARGETS: dict[str, tuple[st.SearchStrategy[Any], Target]] = {}

EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "set", "insert", "delete", "repeat", "nest", "cut"]),
        st.floats(0, 1, exclude_max=True),
        st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"[", b"{", b"(", b"9"])),
    ),
    max_size=6,
)
SIZES = st.one_of(
    st.integers(-2, 9),
    st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)]),
)
LEAVES = st.one_of(st.none(), st.booleans(), SIZES, st.floats(), st.text(max_size=6))
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner),
    max_leaves=8,
)


def target(strategy: st.SearchStrategy[Any]) -> Callable[[Target], Target]:
    """Register a function that reads an input in an empty folder."""

    def register(function: Target) -> Target:
        TARGETS[function.__name__] = strategy, function
        return function

    return register


def edit(data: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
    """Return `data` after edits at relative positions."""
    for kind, where, new in edits:
        at = int(where * len(data))
        if kind == "flip" and data:
            data = data[:at] + bytes([data[at] ^ (new[0] or 1)]) + data[at + 1 :]
        elif kind == "set":
            data = data[:at] + new + data[at + len(new) :]
        elif kind == "insert":
            data = data[:at] + new + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + len(new) :]
        elif kind == "repeat":
            data = data[:at] + data[at : at + 64] * new[0] + data[at:]
        elif kind == "nest":
            data = data[:at] + new[:1] * 6000 + data[at:]
        else:
            data = data[:at]
    return data


def archive(data_pkl: bytes, storages: tuple[bytes, ...] = (b"\0" * 24,)) -> bytes:
    """Return an archive of `torch.save` with correct checksums around a pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as written:
        written.writestr("archive/data.pkl", data_pkl)
        written.writestr("archive/byteorder", b"little")
        for number, storage in enumerate(storages):
            written.writestr(f"archive/data/{number}", storage)
    return file.getvalue()


def torch_file() -> bytes:
    file = io.BytesIO()
    contents = {
        "args": argparse.Namespace(num_layers=2, noop_layers=(0,), name="x", ratio=0.5),
        "model": {"weight": torch.arange(6.0).view(2, 3)},
        "rng": [torch.ones(2, dtype=torch.uint8), None, {1, 2}, b"bytes"],
    }
    torch.save(contents, file)
    return file.getvalue()


def read_pickle(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as contents:
        return contents.read(next(n for n in contents.namelist() if n.endswith("data.pkl")))


WHOLE = torch_file()
PICKLE = read_pickle(WHOLE)
NAMES = st.sampled_from([
    "argparse Namespace", "torch._utils _rebuild_tensor_v2", "collections OrderedDict",
    "collections defaultdict", "builtins getattr", "builtins dict", "builtins set", "os system",
    "torch FloatStorage", "torch bfloat16", "torch Size", "numpy._core.multiarray _reconstruct",
    "numpy dtype", "_codecs encode", "pathlib PosixPath", "torch.nn.parameter Parameter",
    "msrl.errors MsrlError", "copyreg _reconstructor", "enum Enum", "megatron.core X",
])  # fmt: skip
OPCODES = st.one_of(
    NAMES.map(lambda name: f"c{name.replace(' ', chr(10))}\n".encode()),
    st.sampled_from([b"(", b")", b"]", b"}", b"\x8f", b"t", b"\x85", b"\x86", b"\x87", b"R", b"b",
                     b"a", b"e", b"s", b"u", b"\x90", b"\x91", b"0", b"1", b"2", b"N", b"\x88",
                     b"Q", b"\x81", b"\x92", b"\x94", b"\x93", b"."]),
    st.integers(0, 255).map(lambda n: b"K" + bytes([n])),
    st.integers(0, 9).map(lambda n: b"h" + bytes([n])),
    st.integers(0, 9).map(lambda n: b"q" + bytes([n])),
    SIZES.map(lambda n: b"\x8a\x09" + (n % 2**64).to_bytes(9, "little")),
    st.text(max_size=6).map(lambda t: b"X" + len(t.encode()).to_bytes(4, "little") + t.encode()),
)  # fmt: skip


def read_archive_file(folder: Path, data: bytes) -> None:
    path = folder / "file.pt"
    path.write_bytes(data)
    for read in (read_torch_file, check_records):
        with suppress(MsrlError):
            read(path)


@target(EDITS)
def torch_archives(folder: Path, edits: Any) -> None:
    read_archive_file(folder, edit(WHOLE, edits))


@target(EDITS)
def pickles(folder: Path, edits: Any) -> None:
    read_archive_file(folder, archive(edit(PICKLE, edits)))


@target(st.lists(OPCODES, max_size=40))
def pickle_opcodes(folder: Path, opcodes: list[bytes]) -> None:
    read_archive_file(folder, archive(b"\x80\x02" + b"".join(opcodes) + b"."))


@target(EDITS)
def metadata_bytes(folder: Path, edits: Any) -> None:
    _read_distributed(folder, edit(DIST_METADATA, edits))


@target(st.tuples(st.lists(SIZES, min_size=3, max_size=3), st.lists(SIZES, min_size=4)))
def metadata_numbers(folder: Path, numbers: Any) -> None:
    """Change sizes, offsets and byte ranges of one tensor in the metadata."""
    sizes, ranges = numbers
    metadata = pickle.loads(DIST_METADATA)
    key, stored = next(iter(metadata.state_dict_metadata.items()))
    vars(stored)["size"] = tuple(sizes)
    for name, value in zip(("offsets", "sizes"), (ranges[:2], ranges[2:4]), strict=True):
        object.__setattr__(stored.chunks[0], name, tuple(value))
    index = next(index for index in metadata.storage_data if index.fqn == key)
    info = metadata.storage_data[index]
    metadata.storage_data[index] = dataclasses.replace(info, offset=ranges[0], length=ranges[-1])
    _read_distributed(folder, pickle.dumps(metadata))


def _read_distributed(folder: Path, metadata: bytes) -> None:
    for name, data in DIST_FILES.items():
        (folder / name).write_bytes(data)
    (folder / ".metadata").write_bytes(metadata)
    tensors = GlobalTensors(folder)
    for key in list(tensors.stored)[:4]:
        with suppress(MsrlError):
            tensors.read(key, ())


@target(EDITS)
def safetensors_bytes(folder: Path, edits: Any) -> None:
    _safetensors(folder, edit(SAFETENSORS, edits))


@target(st.tuples(JSON, st.lists(SIZES, max_size=4), st.lists(SIZES, max_size=3)))
def safetensors_headers(folder: Path, fields: Any) -> None:
    extra, shape, offsets = fields
    header = {"a": {"dtype": "F32", "shape": shape, "data_offsets": offsets}, "b": extra}
    text = json.dumps(header).encode()
    _safetensors(folder, len(text).to_bytes(8, "little") + text + b"\0" * 64)


def _safetensors(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)
    for tensor in open_safetensors(folder / "model.safetensors").values():
        tensor.read()


@target(EDITS)
def gguf_files(folder: Path, edits: Any) -> None:
    (folder / "model.gguf").write_bytes(edit(GGUF, edits))
    for tensor in read_gguf(folder / "model.gguf").tensors.values():
        tensor.read()


CONFIGS = [family.config for family in (FAMILIES | MIXTURES).values()]


@target(st.tuples(st.sampled_from(CONFIGS), st.integers(0, 99), JSON))
def model_configs(folder: Path, change: Any) -> None:
    config, number, value = change
    key = list(config)[number % len(config)]
    changed = {**config, key: value}
    if isinstance(config[key], dict) and number % 2:
        inner = list(config[key])
        changed[key] = {**config[key], inner[number % len(inner)]: value}
    (folder / "config.json").write_text(json.dumps(changed))
    all_rules(shape_from_config(read_hf_config(folder)))


@target(st.tuples(st.sampled_from(["model.safetensors.index.json", "msrl_manifest.json",
                                   "adapter_config.json"]), EDITS | JSON))  # fmt: skip
def json_files(folder: Path, change: Any) -> None:
    """Read a model, its manifest and an adapter with one changed JSON file."""
    name, edits = change
    (folder / "config.json").write_bytes(HF_FILES["config.json"])
    for file, data in HF_FILES.items():
        is_changed = file == name
        text = JSON_TEXTS.get(file, data)
        if is_changed and isinstance(edits, list) and all(isinstance(e, tuple) for e in edits):
            text = edit(text, edits)
        elif is_changed:
            text = json.dumps(edits).encode()
        (folder / file).write_bytes(text)
    for read in (open_weight_files, weight_checks, lambda path: read_adapter(path, HF_SHAPE)):
        with suppress(MsrlError):
            read(folder)


ARGUMENTS = st.sampled_from([
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "num_layer_list",
    "noop_layers", "num_layers_per_virtual_pipeline_stage", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "moe_tp_extend_ep", "num_experts", "rotary_base",
    "num_attention_heads", "load", "schedules_method", "norm_epsilon", "rope_scaling_type",
    "group_query_attention", "num_query_groups", "kv_channels", "lora_r", "moe_layer_freq",
])  # fmt: skip


@target(st.dictionaries(ARGUMENTS, JSON, max_size=3))
def checkpoint_arguments(folder: Path, changes: dict[str, Any]) -> None:
    contents = torch.load(io.BytesIO(RANK_FILE), weights_only=False)
    vars(contents["args"]).update(changes)
    (folder / "latest_checkpointed_iteration.txt").write_text("1")
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_bytes(HF_FILES["config.json"])
    path = folder / "iter_0000001" / "mp_rank_00" / "model_optim_rng.pt"
    path.parent.mkdir(parents=True)
    torch.save(contents, path)
    open_weights(folder)


@target(EDITS)
def indexed_data(folder: Path, edits: Any) -> None:
    (folder / "data.idx").write_bytes(edit(INDEX, edits))
    (folder / "data.bin").write_bytes(b"\0" * 40)
    reader = IndexedReader(folder / "data")
    for number in range(min(len(reader), 20)):
        reader[number].sum()


SAMPLE_YAML = b"""\
model: {path: a/b}
train:
  steps: 3
  optimizer: &o {lr: 1e-5, warmup: 0.1}
  other: *o
data: {train: [a, b], "k": 'it''s', long: |
    text
  }
"""
SAMPLE_SCRIPT = b"""\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=2; PP="${PP:-4}"
LOAD=$(dirname $0)/ckpt
ARGS="
    --tensor-model-parallel-size $TP \\
    --num-layers 32 --hidden-size 4096 # comment
"
torchrun --nproc_per_node 8 pretrain_gpt.py $ARGS --rotary-base 1e6 | tee logs/$(date +%F).log
python convert_ckpt.py --model-type GPT --load-dir "$LOAD" --save-dir 'x y' \\
    --target-tensor-parallel-size ${TP}
"""
SHELL_WORDS = st.lists(
    st.sampled_from([
        "$", "${", "}", "$(", ")", "`", '"', "'", "\\", "\n", " ", "A=1", "$A", "${A:-b}", "--x",
        "<<EOF", "EOF", "#", "|", "&&", ";", "(", "[[", "for i in a; do", "done", "if", "then",
        "fi", "{", "\0", "\t", "python pretrain_gpt.py", "--num-layers", "2", "torchrun", "$((1+",
        "))", "*", "~", "\x1b[31m", "\udc80",
    ]),
    max_size=40,
)  # fmt: skip


@target(EDITS)
def yaml_files(folder: Path, edits: Any) -> None:
    parse(edit(SAMPLE_YAML, edits).decode("utf-8", "replace"), "file.yaml")


@target(st.tuples(st.sampled_from(["mindspeed-llm", "mindspeed-rl", "lightrft"]), EDITS))
def shell_scripts(folder: Path, change: Any) -> None:
    system, edits = change
    (folder / "run.sh").write_bytes(edit(SAMPLE_SCRIPT, edits))
    translate_arguments(system, [str(folder / "run.sh")])


@target(st.tuples(st.sampled_from(["mindspeed-llm", "lightrft"]), SHELL_WORDS))
def shell_words(folder: Path, change: Any) -> None:
    system, words = change
    text = "".join(words).encode("utf-8", "surrogateescape")
    (folder / "run.sh").write_bytes(SAMPLE_SCRIPT[:200] + text)
    translate_arguments(system, [str(folder / "run.sh")])


@target(st.tuples(st.sampled_from(["mindspeed-rl", "mindspeed-llm", "roll"]), EDITS))
def imported_yaml(folder: Path, change: Any) -> None:
    system, edits = change
    (folder / "run.yaml").write_bytes(edit(FOREIGN_YAML[system], edits))
    translate_arguments(system, [str(folder / "run.yaml")])


@target(EDITS)
def template_files(folder: Path, edits: Any) -> None:
    (folder / "mine.yaml").write_bytes(edit(TEMPLATE, edits))
    read_template(folder / "mine.yaml")


TURN_KEYS = st.sampled_from([
    "role", "content", "from", "value", "tool_calls", "function_call", "name", "tool_call_id",
    "reasoning_content", "thinking", "type", "text", "input", "id", "arguments", "function",
    "tool_use_id", "is_error", "loss",
])  # fmt: skip
TURN_VALUES = st.recursive(
    st.one_of(
        LEAVES,
        st.sampled_from([
            "user", "assistant", "system", "tool", "human", "gpt", "observation", "function_call",
            "tool_use", "tool_result", "thinking", "text", "image",
            '{"name": "f", "arguments": {}}',
            '[{"name": "f"}]', "{", "<think>a</think>b", "<tool_call>", "[" * 3000,
        ]),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TURN_KEYS, inner, max_size=4),
    max_leaves=10,
)  # fmt: skip
TURN = st.one_of(
    st.dictionaries(TURN_KEYS, TURN_VALUES, max_size=5),
    st.fixed_dictionaries({
        "role": st.sampled_from(["user", "assistant", "tool", "system"]),
        "content": TURN_VALUES,
        "tool_calls": TURN_VALUES,
    }),
    TURN_VALUES,
)  # fmt: skip
COLUMNS = st.sampled_from([
    "messages", "conversations", "conversation", "instruction", "input", "output", "history",
    "tools", "system", "prompt", "query", "response", "answer", "question", "text", "images",
])  # fmt: skip


@target(
    st.tuples(
        st.sampled_from(["auto", "sharegpt", "alpaca", "r1"]),
        st.dictionaries(COLUMNS, st.one_of(st.lists(TURN, max_size=4), TURN_VALUES), max_size=4),
    )
)
def rows_with_tool_calls(folder: Path, change: Any) -> None:
    """Read a row with turns and calls in any form, and render it."""
    name, row = change
    handler = make_handler(name, kind=None, map_keys={}, options={})
    try:
        conversation = handler.converter()(row)
    except DroppedRow:
        return
    with suppress(MsrlError):
        RENDERER.prompts([conversation])
    RENDERER.examples([conversation])


RESPONSE_VALUES = st.one_of(
    JSON, TURN_VALUES, st.lists(TURN, max_size=2), st.lists(SIZES, max_size=3)
)


@target(st.tuples(st.dictionaries(st.sampled_from(FIELDS), RESPONSE_VALUES), EDITS))
def responses_of_others(folder: Path, change: Any) -> None:
    """Read rows of responses, of which one has any values, and damaged bytes of them."""
    values, edits = change
    row = {"prompt_ids": [1], "response_ids": [2], "reward": 1.0}
    text = json.dumps(row) + "\n" + json.dumps(row | values) + "\n"
    for data in (text.encode(), edit(text.encode(), edits)):
        (folder / "rows.jsonl").write_bytes(data)
        with suppress(MsrlError):
            ResponseFile(folder / "rows.jsonl", lambda: RENDERER, 300, needs_rewards=True)


PICTURE_FORMS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")


@target(st.tuples(st.sampled_from(PICTURE_FORMS), EDITS))
def pictures(folder: Path, change: Any) -> None:
    """Read the size and the pixels of a damaged image."""
    form, edits = change
    data = edit(PICTURES[form], edits)
    with suppress(MsrlError):
        image_size(data)
    with suppress(MsrlError):
        check_image(data)
    decode_image(data, IMAGES.vision)


SOURCES = st.recursive(
    st.one_of(
        LEAVES,
        st.binary(max_size=9),
        st.sampled_from(["a.png", "file:///a%00b", "data:image/png;base64,iVBO", "data:,", "http://x",
                         ".", "/dev/zero", "a/../a.png"]),
    ),
    lambda inner: st.dictionaries(
        st.sampled_from(["bytes", "path", "url", "image", "image_url", "base64", "data", "x"]),
        inner,
        max_size=3,
    ) | st.lists(inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
MARKED = st.lists(
    st.sampled_from(["<image>", "\ufdd1", "<|vision_start|><|image_pad|><|vision_end|>", "x"]),
    max_size=4,
)


@target(st.tuples(SOURCES, st.lists(MARKED, min_size=1, max_size=3)))
def rows_with_images(folder: Path, change: Any) -> None:
    """Attach images to the marks of a row, and read them."""
    column, texts = change
    (folder / "a.png").write_bytes(PICTURES["PNG"])
    messages = tuple(Message("user", "".join(text)) for text in texts)
    conversation = attach_images(Conversation(messages), column)
    loaded = load_images(conversation, IMAGES, folder, {}, {})
    marks = sum(message.content.count(IMAGE) for message in loaded.messages)
    assert len(loaded.images) in (0, marks)


@target(st.tuples(st.sampled_from(["images.jsonl", "images.idx", "image_rows.idx"]), EDITS))
def files_of_images(folder: Path, change: Any) -> None:
    """Read the images of a damaged dataset."""
    name, edits = change
    for path, data in IMAGE_FILES.items():
        (folder / path).write_bytes(edit(data, edits) if path == f"x_{name}" else data)
    reader = ImageReader(str(folder / "x"), 2)
    for number in range(len(reader)):
        reader[number]


REFERENCES = st.lists(
    st.sampled_from(["${k%d}", "${k%d}${k%d}", "[ '${k%d}', '${k%d}' ]", "{a: '${k%d}'}", "x",
                     "${k9}", "${env:HOME}", "${k%d.a}", "${", "${k%d}" * 200]),
    max_size=60,
)  # fmt: skip


@target(REFERENCES)
def interpolations(folder: Path, forms: list[str]) -> None:
    """Load a configuration whose values refer to those before them."""
    lines = [f"k{n}: {form.replace('%d', str(n - 1))}" for n, form in enumerate(forms, 1)]
    (folder / "a.yaml").write_text("\n".join(["k0: ab", *lines]))
    load_configuration([str(folder / "a.yaml")])


PATTERNS = st.lists(
    st.sampled_from(["(", ")", "a", "a+", "+", "*", "(a+)+", "(a|aa)*", "(.*)*", "b", "$", "^",
                     "{9}", "[a-z]", "?", "(a*)*", r"\\d", "|", "{1,99999}"]),
    max_size=12,
).map("".join)  # fmt: skip


@target(st.tuples(PATTERNS, st.integers(1, 5000)))
def regular_expressions(folder: Path, change: Any) -> None:
    """Import a script that compares a text with a regular expression."""
    pattern, length = change
    program = "python pretrain_gpt.py --num-layers 2\n"
    condition = f"x={'a' * length}\nif [[ $x =~ {pattern} ]]; then y=1; fi\n"
    (folder / "run.sh").write_text(condition + program)
    translate_arguments("mindspeed-llm", [str(folder / "run.sh")])


SIZED = {
    "run.sh": (b"x=", b"a", b"\npython pretrain_gpt.py --num-layers 2\n"),
    "lines.sh": (b"", b"x=1\n", b"python pretrain_gpt.py --num-layers 2\n"),
    "comment.yaml": (b"# ", b"x", b"\nrun: {name: x}\n"),
    "text.yaml": (b"run: {name: '", b"x", b"'}\n"),
    "list.yaml": (b"run: [", b"1,", b"]\n"),
    "turns.jsonl": (b'{"messages": [', b'{"role": "user", "content": "a"},', b"1]}"),
    "text.jsonl": (b'{"messages": [{"role": "user", "content": "', b"a b ", b'"}]}'),
    "lists.jsonl": (b'{"messages": [', b"[],", b"[]]}"),
    "deep.jsonl": (b'{"messages": ', b"[", b""),
    "cell.csv": (b"a,b\n1,", b"x", b"\n"),
    "row.csv": (b"a,b\n", b"x,", b"\n"),
    "line.txt": (b"", b"x ", b""),
    "array.json": (b"[", b"1,", b"1]"),
}


@target(st.tuples(st.sampled_from(sorted(SIZED)), st.integers(1, 24), st.booleans()))
def sizes(folder: Path, change: Any) -> None:
    """Read a file of up to 24 MB in which one thing is long: a line, a cell, a comment, a row."""
    name, megabytes, is_compressed = change
    head, middle, tail = SIZED[name]
    size = megabytes << (16 if name.endswith("yaml") else 20)
    content = head + middle * (size // len(middle)) + tail
    path = folder / name
    if path.suffix in (".sh", ".yaml"):
        path.write_bytes(content)
        if path.suffix == ".sh":
            translate_arguments("mindspeed-llm", [str(path)])
        else:
            load_configuration([str(path)])
        return
    path = path.with_name(f"{name}.gz") if is_compressed else path
    path.write_bytes(gzip.compress(content, 1) if is_compressed else content)
    handler = make_handler("auto", kind=None, map_keys={}, options={})
    for batch in read_batches([path]):
        for _, row in batch.values():
            with suppress(DroppedRow):
                handler.converter()(row)


@target(st.tuples(
    st.sampled_from(["PLAIN", "RLE_DICTIONARY", "DELTA_BYTE_ARRAY", "arrow"]),
    st.integers(0, 40 << 20), st.integers(0, 600),
))  # fmt: skip
def cells(folder: Path, change: Any) -> None:
    """Read a table whose rows repeat a long text, in an encoding that writes it once."""
    encoding, length, num_rows = change
    if encoding in ("PLAIN", "DELTA_BYTE_ARRAY"):  # pyarrow writes these from all texts
        num_rows = min(num_rows, (200 << 20) // (length + 1))
    num_rows = min(num_rows, (1 << 30) // (length + 1))  # the time grows with the decoded bytes
    numbers = pa.array([0] * num_rows, pa.int32())
    table = pa.table({"text": pa.DictionaryArray.from_arrays(numbers, ["x" * length])})
    path = folder / "x.parquet"
    if encoding == "arrow":
        path = folder / "x.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        has_dictionary = encoding == "RLE_DICTIONARY"
        if not has_dictionary:
            table = table.cast(pa.schema({"text": pa.string()}))
        codings = None if has_dictionary else {"text": encoding}
        pq.write_table(table, path, use_dictionary=has_dictionary, column_encoding=codings,
                       dictionary_pagesize_limit=1 << 30, compression="zstd")  # fmt: skip
    del table
    for batch in read_batches([path]):
        for _, row in batch.values():
            assert len(row["text"]) == length


SPECIAL = st.sampled_from(["pipe", "/dev/zero", "/dev/full", "/etc/passwd", "..", "itself", "deep",
                           "folder", "empty", "huge"])  # fmt: skip


def _replace(path: Path, kind: str) -> None:
    """Put something else in the place of a file."""
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "deep":
        path.write_text("[" * 100_000)
    elif kind == "folder":
        path.mkdir()
    elif kind in ("empty", "huge"):
        with path.open("wb") as file:
            file.truncate(0 if kind == "empty" else 256 << 20)
    else:
        path.symlink_to(path if kind == "itself" else kind)


@target(st.tuples(st.integers(0, 99), SPECIAL))
def run_folders(folder: Path, change: Any) -> None:
    """Show and report a run folder in which a file is a pipe, device, link or something else."""
    number, kind = change
    run = make_run(folder / "run", num_steps=1)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    _replace(files[number % len(files)], kind)
    with redirect_stdout(io.StringIO()):
        with suppress(MsrlError):
            write_folder([run], folder / "view")
        write_report(run)


@target(st.tuples(st.integers(0, 99), SPECIAL))
def model_files(folder: Path, change: Any) -> None:
    """Read a model folder in which a file is a pipe, device, link or something else."""
    number, kind = change
    for name, data in (HF_FILES | TOKENIZER_FILES).items():
        (folder / name).write_bytes(data)
    files = sorted(folder.iterdir())
    _replace(files[number % len(files)], kind)
    for read in (open_tokenizer, load_tokenizer, sidecar_files, open_weights, read_hf_config):
        with suppress(MsrlError):
            read(folder)


JINJA_WORDS = st.lists(
    st.sampled_from([
        "{{", "}}", "{%", "%}", "{#", "#}", "{% for m in messages %}", "{% endfor %}", "{% if ",
        "{% endif %}", "{% set x = ", "{% generation %}", "{% endgeneration %}", "m['content']",
        "{{ m.content }}", "{% for i in range(99999) %}", "{{ x }}", "x ~ x", " * 10 ** 9", "'a'",
        "{% macro f() %}", "{% endmacro %}", "{{ f() }}", "{{ messages | tojson }}", "|", "self",
        "{{ ''.__class__ }}", "{{ raise_exception('x') }}", "{% include 'a' %}", "tools", "[", "]",
        "{{ messages[0].content.format(m) }}", "loop", "namespace(a=1)", "<|im_end|>", " ", "\n",
        "7 ** 50000000", "{{ 10 ** (10 ** 9) }}", "('a b' * 5000000)", "| wordwrap(1)", "| length",
        "| indent(10**5)", "| center(10**9)", "'%1000000000d' % 1", "'{:>1000000000}'.format(1)",
        "{% set n.a = n.a ~ n.a %}", "{% set n = namespace(a='aa') %}",
    ]),
    max_size=20,
)  # fmt: skip


@target(st.one_of(JINJA_WORDS.map("".join), EDITS))
def chat_templates(folder: Path, change: Any) -> None:
    """Render a conversation with the chat template of a tokenizer."""
    if isinstance(change, list):
        change = edit(CHATML.encode(), change).decode("utf-8", "replace")
    for name, data in TOKENIZER_FILES.items():
        (folder / name).write_bytes(data)
    (folder / "chat_template.jinja").write_text(change, encoding="utf-8", errors="replace")
    tokenizer = open_tokenizer(folder)
    conversation = Conversation((Message("user", "a <|im_end|> b"), Message("assistant", "c")))
    for render in (native_prompts, native_examples):
        with suppress(MsrlError):
            render(tokenizer, [conversation], None)


FOREIGN_YAML = {
    "mindspeed-rl": b"actor_config:\n  model: q\n  lr: 1e-6\nrl_config: {n_samples_per_prompt: 8}\n"
    b"megatron_training: {train_iters: 3, global_batch_size: 8}\ngenerate_config: {}\n",
    "mindspeed-llm": b"training: {actor: {lr: 1e-6}}\nresource_pool: {actor_rollout: [8]}\n",
    "roll": b"rollout_batch_size: 8\nactor_train:\n  model_args: {dtype: bf16}\n"
    b"  training_args: {learning_rate: 1e-6}\n  strategy_args: {strategy_name: megatron_train}\n",
}


def _prepare(root: Path) -> None:
    """Create the valid files that targets change."""
    chat_rendering.LIMITS = chat_rendering.RenderingLimits(1.0, 1_000_000, 256 << 20)
    limits.IMPORT_LIMIT_S = 2.0
    global DIST_METADATA, DIST_FILES, HF_FILES, JSON_TEXTS, HF_SHAPE, RANK_FILE, INDEX
    global GGUF, SAFETENSORS, TEMPLATE, RENDERER, TOKENIZER_FILES
    tiny.save(root / "hf", shards=2)
    source = open_weights(root / "hf")
    HF_SHAPE = source.shape
    HF_FILES = {path.name: path.read_bytes() for path in (root / "hf").iterdir()}
    adapter = b'{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}'
    records = {"model-00001-of-00002.safetensors": {"bytes": 1, "crc32": "00000000"}}
    manifest = {"format": 1, "files": records, "iterations": {}}
    JSON_TEXTS = {
        "adapter_config.json": adapter,
        "msrl_manifest.json": json.dumps(manifest).encode(),
    }
    HF_FILES |= JSON_TEXTS | {"adapter_model.safetensors": save_safetensors({"a": torch.ones(2)})}
    write_mcore(source, root / "dist", McoreTarget(distributed=True))
    dist = root / "dist" / "iter_0000001"
    DIST_METADATA = (dist / ".metadata").read_bytes()
    DIST_FILES = {path.name: path.read_bytes() for path in dist.iterdir()}
    write_mcore(source, root / "mcore", McoreTarget(ParallelLayout()))
    RANK_FILE = next((root / "mcore").rglob("model_optim_rng.pt")).read_bytes()
    SAFETENSORS = save_safetensors(
        {"a": torch.ones(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    )
    GGUF = write_gguf(root / "model.gguf", "llama", make_model("llama")).read_bytes()
    writer = IndexedWriter(root / "data.bin", root / "data.idx")
    import numpy as np

    writer.add(np.arange(10, dtype=np.int32), np.array([3, 7], dtype=np.int32))
    writer.close()
    INDEX = (root / "data.idx").read_bytes()
    make_tokenizer().save_pretrained(root / "tokenizer")
    (root / "tokenizer" / "chat_template.jinja").unlink(missing_ok=True)
    TOKENIZER_FILES = {path.name: path.read_bytes() for path in (root / "tokenizer").iterdir()}
    RENDERER = make_renderer(load_template("qwen"), open_tokenizer(root / "tokenizer"))
    TEMPLATE = next((ROOT / "templates").rglob("qwen.yaml")).read_bytes()
    _prepare_images(root)


def _prepare_images(root: Path) -> None:
    """Create images, and a dataset with images."""
    global IMAGES, IMAGE_FILES, PICTURES
    IMAGES = ImageSettings(read_vision_settings(vision_folders.write_folder(root / "vision")), "")
    PICTURES = {form: encoded(picture(40, 30), form) for form in PICTURE_FORMS}
    records: dict[str, ImageRecord] = {}
    row = attach_images(Conversation((Message("user", "<image>"),)), PICTURES["PNG"])
    load_images(row, IMAGES, root, records, {})
    (root / "images").mkdir()
    writer = ImageWriter(root / "images", "x", is_linked=False)
    number = writer.add_image(next(iter(records.values())))
    writer.add_rows([((3, number),), ()])
    list(writer.close())
    IMAGE_FILES = {path.name: path.read_bytes() for path in (root / "images").iterdir()}
    load_decoders()


def _computing_s() -> float:
    """Return the CPU time of this process and of those that it waited for."""
    return sum(os.times()[:4])


def fuzz(name: str, seconds: float) -> str:
    """Run a target for some seconds; return the number of inputs and the largest cost of one.

    Raises:
        Exception: whatever an input raises that is not an MsrlError.
    """
    strategy, function = TARGETS[name]
    count, longest, end = 0, 0.0, time.monotonic() + seconds
    Path("/proc/self/clear_refs").write_text("5")  # begins a new peak of memory

    def run(value: Any) -> None:
        nonlocal count, longest
        if time.monotonic() > end:
            return
        count += 1
        start = _computing_s()  # a busy machine is no finding
        with tempfile.TemporaryDirectory(dir=SCRATCH) as folder, suppress(MsrlError):
            run_within(MAX_WAIT_S, lambda: function(Path(folder), value))
        taken_s = _computing_s() - start
        longest = max(longest, taken_s)
        limit = LIMITS.get(name, MAX_SECONDS)
        assert taken_s < limit, f"{name}: one input took {taken_s:.1f} s"

    options = settings(
        max_examples=200,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    for number in itertools.count(SEED):
        seed(number)(options(given(strategy)(run)))()
        if time.monotonic() > end:
            status = Path("/proc/self/status").read_text()
            peak = int(status.partition("VmHWM:")[2].split()[0]) >> 10
            return f"{count:6} inputs, at most {longest:4.1f} s and {peak:5} MiB"
    raise AssertionError("unreachable")


def main() -> int:
    """Run the targets and return the number of those with a finding."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=540, help="Time for all targets together.")
    parser.add_argument("targets", nargs="*", help="Targets to run. Default: all.")
    options = parser.parse_args()
    names = options.targets or list(TARGETS)
    global SCRATCH, SEED
    SEED = random.randrange(10**6)
    findings = 0
    with tempfile.TemporaryDirectory() as root:
        SCRATCH = Path("/dev/shm") if Path("/dev/shm").is_dir() else Path(root)
        _prepare(Path(root))
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MAX_BYTES, resource.RLIM_INFINITY))
        for name in names:
            try:
                costs = fuzz(name, options.seconds / len(names))
                print(f"{name:22} {costs}", flush=True)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                findings += 1
                print(f"{name}: FINDING (seed {SEED})", flush=True)
                traceback.print_exc()
    return findings


if __name__ == "__main__":
    sys.exit(main())
