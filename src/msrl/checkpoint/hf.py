"""Hugging Face folders: weights read and checked against the config, written at known places of files whose size is known beforehand.

The safetensors format: 8 bytes little-endian length, a JSON header with type, shape and byte range per tensor, then the bytes.
Source: https://huggingface.co/docs/safetensors (format section).
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from msrl.checkpoint import fp8, mxfp4
from msrl.checkpoint.archive import write_at
from msrl.checkpoint.dtypes import SAFETENSORS_NAMES, hf_name
from msrl.checkpoint.hf_files import INDEX, SINGLE, open_weight_files, some
from msrl.checkpoint.stacks import stacked_specs, taken_apart
from msrl.checkpoint.torch_file import TensorSpec, spec_of, tensor_blocks
from msrl.errors import ManyErrors, MsrlError
from msrl.models.entries import stack_of, stack_sizes
from msrl.models.families import all_rules, load_shape
from msrl.models.hf_config import read_hf_config
from msrl.models.rules import Rule
from msrl.models.shape import Shape

MAX_SHARD_BYTES = 5_000_000_000
_SIDECARS = ("*.json", "*.model", "*.jinja", "merges.txt", "*.py", "*.tiktoken")
_NUMBER = re.compile(r"\d+")
_DERIVED = (".rotary_emb.inv_freq", ".rotary_pos_emb.inv_freq")  # buffers that old checkpoints carry and every model computes


class HfCheckpoint:
    """The tensors of a Hugging Face folder by name; opening it checks that all are there, whole, and shaped as the config says."""

    def __init__(self, folder: Path) -> None:
        """Raises MsrlError for anything missing, cut short, misshapen or left over, by file and tensor; ManyErrors for several."""
        if not folder.is_dir():
            raise MsrlError(f"{folder}: there is no such folder")
        self.folder = folder
        self.shape: Shape = load_shape(folder)
        config = read_hf_config(folder)
        stored = fp8.dequantised(mxfp4.dequantised(open_weight_files(folder), config), config)
        self._stored = taken_apart(stored, stack_sizes(self.shape))
        self.specs = {name: stored.spec for name, stored in self._stored.items()}
        self._check_against(self.shape)

    def tensor(self, name: str) -> Tensor:
        """A tensor that is read from disk where it is used."""
        return self._stored[name].read()

    def _check_against(self, shape: Shape) -> None:
        rules = all_rules(shape)
        wanted = {name: size for rule in rules for name, size in zip(rule.hf, rule.shapes, strict=True)}
        tied = {"lm_head.weight"} if shape.tie_word_embeddings else set[str]()
        missing = sorted(set(wanted) - set(self.specs))
        unknown = set(self.specs) - set(wanted) - tied
        extra = sorted(name for name in unknown if not name.endswith(_DERIVED) and not name.startswith(shape.carried))
        problems = [self._misshapen(name, size) for name, size in wanted.items() if name in self.specs and self.specs[name].shape != size]
        if missing:
            rule = next(rule for rule in rules if missing[0] in rule.hf)
            problems.append(f"{self.folder}: {len(missing)} tensors are missing: {some(missing)}; the first one goes into {rule.mcore}")
        if extra:
            hint = _nearest_rule(extra[0], rules)
            problems.append(f"{self.folder}: {len(extra)} tensors have no place in {shape.architecture}: {some(extra)}; {hint}")
        if problems:
            raise ManyErrors(problems) if len(problems) > 1 else MsrlError(problems[0])
        self._check_tied_head(tied)

    def _misshapen(self, name: str, size: tuple[int, ...]) -> str:
        stored = self._stored[name]
        return f"{stored.file}: tensor {name} is {list(stored.spec.shape)}, but config.json makes it {list(size)}"

    def _check_tied_head(self, tied: set[str]) -> None:
        """A tied model may carry its output layer once more; it must be the embedding."""
        for name in tied & set(self.specs):
            if not torch.equal(self.tensor(name), self.tensor("model.embed_tokens.weight")):
                raise MsrlError(f"{self.folder}: tie_word_embeddings=true, but {name} differs from the embedding")


def _nearest_rule(name: str, rules: Iterable[Rule]) -> str:
    """A hint that names the rule whose Hugging Face name is most like `name`, numbers of layers aside."""
    known = {_NUMBER.sub("*", hf): _NUMBER.sub("*", rule.mcore) for rule in rules for hf in rule.hf}
    close = difflib.get_close_matches(_NUMBER.sub("*", name), known, n=1, cutoff=0.0)[0]
    return f"nearest rule: {close} -> {known[close]}"


def sidecar_files(folder: Path) -> list[Path]:
    """Config, tokenizer and code files: all that makes a model besides its weights."""
    found = {file for pattern in _SIDECARS for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in found if not file.name.endswith(".index.json") and file.name != "msrl_manifest.json")


def copy_sidecars(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy config and tokenizer files; config.json names `dtype` as the type of the weights unless it is None.

    A `quantization_config` is left out: weights that were read in FP8 or MXFP4 are what they stand for from then on.
    """
    target.mkdir(parents=True, exist_ok=True)
    for file in sidecar_files(source):
        shutil.copyfile(file, target / file.name)
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    changed = {key: value for key, value in config.items() if key != "quantization_config"}
    if dtype is not None:
        changed["dtype" if "dtype" in changed else "torch_dtype"] = hf_name(dtype)
    if changed != config:
        path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    offset: int
    spec: TensorSpec


class HfWriter:
    """Writes safetensors of at most `max_shard_bytes` into a folder, tensors in any order and from several threads.

    The folder is expected not to be visible yet (see `files.staged_folder`). `close` raises ValueError when a tensor was not written.
    """

    def __init__(
        self, folder: Path, specs: Mapping[str, TensorSpec], max_shard_bytes: int = MAX_SHARD_BYTES, *, single: str | None = None
    ) -> None:
        """With `single`, everything goes into one file of that name. Entries of a stack (see `stacks`) are written one by one."""
        entries, specs = specs, stacked_specs(specs)
        shards = [list(specs)] if single else _shards(specs, max_shard_bytes)
        count = len(shards)
        names = [single or SINGLE] if count == 1 else [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
        self._places: dict[str, _Place] = {}
        self._written: set[str] = set()
        self._descriptors: dict[Path, int] = {}
        for file, shard in zip(names, shards, strict=True):
            self._begin(folder / file, {name: specs[name] for name in shard})
        if count > 1:
            weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            index = {"metadata": {"total_size": sum(spec.num_bytes for spec in specs.values())}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        self._find_entries(entries)

    def _find_entries(self, specs: Mapping[str, TensorSpec]) -> None:
        """Give every entry its place in its stack, which has none as a whole."""
        for name, spec in specs.items():
            found = stack_of(name)
            if found is not None:
                stack = self._places[found[0]]
                self._places[name] = _Place(stack.file, stack.offset + found[1] * spec.num_bytes, spec)
        for stack in {found[0] for name in specs if (found := stack_of(name))}:
            del self._places[stack]

    def write(self, name: str, tensor: Tensor, advance: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Put a tensor where it belongs; `advance` hears of every block. Raises ValueError when it is not the one that was announced."""
        place = self._places[name]
        if spec_of(tensor) != place.spec:
            raise ValueError(f"{name} was announced as {place.spec}, not {spec_of(tensor)}")
        offset = place.offset
        for block in tensor_blocks(tensor):
            write_at(self._descriptors[place.file], block, offset)
            offset += len(block)
            advance(len(block))
        self._written.add(name)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        missing = sorted(set(self._places) - self._written)
        if missing:
            raise ValueError(f"not written: {some(missing)}")

    def _begin(self, path: Path, specs: Mapping[str, TensorSpec]) -> None:
        """Write a file's header and stretch the file to its final size."""
        entries, end = dict[str, Any](), 0
        for name, spec in sorted(specs.items(), key=lambda item: -item[1].dtype.itemsize):  # wider types first keeps all aligned
            begin, end = end, end + spec.num_bytes
            entries[name] = {"dtype": SAFETENSORS_NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        self._descriptors[path] = descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.write(descriptor, len(header).to_bytes(8, "little") + header)
        os.truncate(descriptor, 8 + len(header) + end)
        for name, spec in specs.items():
            self._places[name] = _Place(path, 8 + len(header) + entries[name]["data_offsets"][0], spec)


def _shards(specs: Mapping[str, TensorSpec], max_bytes: int) -> list[list[str]]:
    """Names in their order, cut where the next tensor would go over `max_bytes`."""
    shards: list[list[str]] = [[]]
    room = max_bytes
    for name, spec in specs.items():
        if shards[-1] and spec.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= spec.num_bytes
    return shards
