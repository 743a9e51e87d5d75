"""Fuzzing of every parser of foreign bytes with hypothesis; `nox -s fuzz` runs it.

A target passes any input that is read or refused with MsrlError. Another exception, more than
`MAX_SECONDS` for one input or more than `MAX_BYTES` of memory is a finding. Findings become
ordinary tests.

    python tests/fuzz.py [--seconds N] [TARGET...]
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import itertools
import json
import pickle
import random
import resource
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_safetensors

import tiny_checkpoints as tiny
from families import FAMILIES
from mixture_families import MIXTURES
from msrl.checkpoint.adapters.megatron import read_adapter
from msrl.checkpoint.convert import McoreTarget, write_mcore
from msrl.checkpoint.dist.read import GlobalTensors
from msrl.checkpoint.hf.weight_files import open_safetensors, open_weight_files
from msrl.checkpoint.integrity import weight_checks
from msrl.checkpoint.source import open_weights
from msrl.checkpoint.torch_files.reader import read_torch_file
from msrl.checkpoint.torch_files.whole_files import check_records
from msrl.config.sources import parse
from msrl.data.columns import DroppedRow
from msrl.data.handlers import make_handler
from msrl.data.indexed import IndexedReader, IndexedWriter
from msrl.data.native import native_examples, native_prompts
from msrl.data.render import make_renderer
from msrl.data.templates.files import _read as read_template
from msrl.data.templates.files import load_template
from msrl.data.tokenizer import open_tokenizer
from msrl.errors import MsrlError
from msrl.importers.command import translate_arguments
from msrl.models.families import all_rules, shape_from_config
from msrl.models.hf_config import read_hf_config
from msrl.models.parallel_layout import ParallelLayout
from msrl.types import Conversation, Message
from tiny_qwen2 import CHATML, make_tokenizer

MAX_SECONDS = 5.0  # of computing for one input
LIMITS = {"chat_templates": 40.0}  # 10 s for each of three renderings, then the message
MAX_BYTES = 2 << 30  # of address space beyond that of the idle process

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


def edited(data: bytes, edits: list[tuple[str, float, bytes]]) -> bytes:
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
    read_archive_file(folder, edited(WHOLE, edits))


@target(EDITS)
def pickles(folder: Path, edits: Any) -> None:
    read_archive_file(folder, archive(edited(PICKLE, edits)))


@target(st.lists(OPCODES, max_size=40))
def pickle_opcodes(folder: Path, opcodes: list[bytes]) -> None:
    read_archive_file(folder, archive(b"\x80\x02" + b"".join(opcodes) + b"."))


@target(EDITS)
def metadata_bytes(folder: Path, edits: Any) -> None:
    _distributed(folder, edited(DIST_METADATA, edits))


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
    _distributed(folder, pickle.dumps(metadata))


def _distributed(folder: Path, metadata: bytes) -> None:
    for name, data in DIST_FILES.items():
        (folder / name).write_bytes(data)
    (folder / ".metadata").write_bytes(metadata)
    tensors = GlobalTensors(folder)
    for key in list(tensors.stored)[:4]:
        with suppress(MsrlError):
            tensors.read(key, ())


@target(EDITS)
def safetensors_bytes(folder: Path, edits: Any) -> None:
    _safetensors(folder, edited(SAFETENSORS, edits))


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
            text = edited(text, edits)
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
    (folder / "data.idx").write_bytes(edited(INDEX, edits))
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
    parse(edited(SAMPLE_YAML, edits).decode("utf-8", "replace"), "file.yaml")


@target(st.tuples(st.sampled_from(["mindspeed-llm", "mindspeed-rl", "lightrft"]), EDITS))
def shell_scripts(folder: Path, change: Any) -> None:
    system, edits = change
    (folder / "run.sh").write_bytes(edited(SAMPLE_SCRIPT, edits))
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
    (folder / "run.yaml").write_bytes(edited(FOREIGN_YAML[system], edits))
    translate_arguments(system, [str(folder / "run.yaml")])


@target(EDITS)
def template_files(folder: Path, edits: Any) -> None:
    (folder / "mine.yaml").write_bytes(edited(TEMPLATE, edits))
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
    "tools", "system", "prompt", "query", "response", "answer", "question", "text",
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


JINJA_WORDS = st.lists(
    st.sampled_from([
        "{{", "}}", "{%", "%}", "{#", "#}", "{% for m in messages %}", "{% endfor %}", "{% if ",
        "{% endif %}", "{% set x = ", "{% generation %}", "{% endgeneration %}", "m['content']",
        "{{ m.content }}", "{% for i in range(99999) %}", "{{ x }}", "x ~ x", " * 10 ** 9", "'a'",
        "{% macro f() %}", "{% endmacro %}", "{{ f() }}", "{{ messages | tojson }}", "|", "self",
        "{{ ''.__class__ }}", "{{ raise_exception('x') }}", "{% include 'a' %}", "tools", "[", "]",
        "{{ messages[0].content.format(m) }}", "loop", "namespace(a=1)", "<|im_end|>", " ", "\n",
    ]),
    max_size=20,
)  # fmt: skip


@target(st.one_of(JINJA_WORDS.map("".join), EDITS))
def chat_templates(folder: Path, change: Any) -> None:
    """Render a conversation with the chat template of a tokenizer."""
    if isinstance(change, list):
        change = edited(CHATML.encode(), change).decode("utf-8", "replace")
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
    global DIST_METADATA, DIST_FILES, HF_FILES, JSON_TEXTS, HF_SHAPE, RANK_FILE, INDEX
    global SAFETENSORS, TEMPLATE, RENDERER, TOKENIZER_FILES
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
    writer = IndexedWriter(root / "data.bin", root / "data.idx")
    import numpy as np

    writer.add(np.arange(10, dtype=np.int32), np.array([3, 7], dtype=np.int32))
    writer.close()
    INDEX = (root / "data.idx").read_bytes()
    make_tokenizer().save_pretrained(root / "tokenizer")
    (root / "tokenizer" / "chat_template.jinja").unlink(missing_ok=True)
    TOKENIZER_FILES = {path.name: path.read_bytes() for path in (root / "tokenizer").iterdir()}
    RENDERER = make_renderer(load_template("qwen"), open_tokenizer(root / "tokenizer"))
    TEMPLATE = next((Path(__file__).parents[1] / "templates").rglob("qwen.yaml")).read_bytes()


def fuzz(name: str, seconds: float) -> int:
    """Run a target for some seconds and return the number of inputs.

    Raises:
        Exception: whatever an input raises that is not an MsrlError.
    """
    strategy, function = TARGETS[name]
    count, end = 0, time.monotonic() + seconds

    def run(value: Any) -> None:
        nonlocal count
        count += 1
        start = time.process_time()  # a busy machine is no finding
        with tempfile.TemporaryDirectory(dir=SCRATCH) as folder, suppress(MsrlError):
            function(Path(folder), value)
        taken_s = time.process_time() - start
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
            return count
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
                count = fuzz(name, options.seconds / len(names))
                print(f"{name}: {count} inputs", flush=True)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                findings += 1
                print(f"{name}: FINDING (seed {SEED})", flush=True)
                traceback.print_exc()
    return findings


if __name__ == "__main__":
    sys.exit(main())
