"""Hugging Face folders: safetensors read by mmap and checked, written at known places of files whose size is known beforehand.

The safetensors format: 8 bytes little-endian length, a JSON header with type, shape and byte range per tensor, then the bytes.
Source: https://huggingface.co/docs/safetensors (format section).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from msrl.checkpoint.dtypes import BY_SAFETENSORS_NAME, SAFETENSORS_NAMES, hf_name
from msrl.checkpoint.torch_file import TensorSpec, spec_of, tensor_bytes
from msrl.errors import MsrlError, nearest
from msrl.models.families import all_rules, load_shape
from msrl.models.shape import Shape

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000
_SIDECARS = ("*.json", "*.model", "*.jinja", "merges.txt", "*.py", "*.tiktoken")
_DERIVED = (".rotary_emb.inv_freq",)  # buffers that old checkpoints carry and every model computes


class HfCheckpoint:
    """The tensors of a Hugging Face folder by name; opening it checks that all are there, whole, and shaped as the config says."""

    def __init__(self, folder: Path) -> None:
        """Raises MsrlError for anything missing, cut short, misshapen or left over, by file and tensor."""
        if not folder.is_dir():
            raise MsrlError(f"{folder}: there is no such folder")
        self.folder = folder
        self.shape: Shape = load_shape(folder)
        self.specs: dict[str, TensorSpec] = {}
        self._files: dict[str, Any] = {}
        for file, expected in _weight_files(folder).items():
            self._open(folder / file, expected)
        self._check_against(self.shape)

    def tensor(self, name: str) -> Tensor:
        """A tensor that is read from disk where it is used."""
        return self._files[name].get_tensor(name)

    def _open(self, path: Path, expected: set[str] | None) -> None:
        """Open one file; with an index, it must hold exactly the tensors that the index expects in it."""
        if not path.is_file():
            raise MsrlError(f"{path}: the index names this file, but it is missing")
        try:
            file = safe_open(path, "pt")
            names = set(file.keys())
        except (SafetensorError, OSError) as error:
            raise MsrlError(f"{path}: cut short or not safetensors ({error}); copy or download it again") from error
        if expected is not None and names != expected:
            raise MsrlError(f"{path}: {_difference(names, expected)} as against {INDEX}")
        for name in file.keys():  # noqa: SIM118 - not a mapping
            view = file.get_slice(name)
            dtype = BY_SAFETENSORS_NAME.get(view.get_dtype())
            if dtype is None:
                known = ", ".join(BY_SAFETENSORS_NAME)
                raise MsrlError(f"{path}: tensor {name} has type {view.get_dtype()}, which is not supported; supported: {known}")
            self.specs[name] = TensorSpec(dtype, tuple(view.get_shape()))
            self._files[name] = file

    def _check_against(self, shape: Shape) -> None:
        wanted = {name: size for rule in all_rules(shape) for name, size in zip(rule.hf, rule.shapes, strict=True)}
        missing = sorted(set(wanted) - set(self.specs))
        if missing:
            raise MsrlError(f"{self.folder}: {len(missing)} tensors are missing, {_some(missing)} ({nearest(missing[0], self.specs)})")
        for name, size in wanted.items():
            if self.specs[name].shape != size:
                raise MsrlError(f"{self.folder}: tensor {name} is {list(self.specs[name].shape)}, but config.json makes it {list(size)}")
        tied = {"lm_head.weight"} if shape.tie_word_embeddings else set[str]()
        extra = sorted(name for name in set(self.specs) - set(wanted) - tied if not name.endswith(_DERIVED))
        if extra:
            raise MsrlError(f"{self.folder}: {len(extra)} tensors have no place in {shape.architecture}: {_some(extra)}")
        self._check_tied_head(tied)

    def _check_tied_head(self, tied: set[str]) -> None:
        """A tied model may carry its output layer once more; it must be the embedding."""
        for name in tied & set(self.specs):
            if not torch.equal(self.tensor(name), self.tensor("model.embed_tokens.weight")):
                raise MsrlError(f"{self.folder}: tie_word_embeddings=true, but {name} differs from the embedding")


def _weight_files(folder: Path) -> dict[str, set[str] | None]:
    """File names with the tensors that an index expects in them; None where there is no index."""
    has_single, has_index = (folder / SINGLE).is_file(), (folder / INDEX).is_file()
    if has_single and not has_index:
        return {SINGLE: None}
    if not has_index:
        other = "; its weights are in torch's own files: save it again with save_pretrained" if list(folder.glob("*.bin")) else ""
        raise MsrlError(f"{folder}: there is neither {SINGLE} nor {INDEX}{other}")
    try:
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        names = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise MsrlError(f"{folder / INDEX}: not an index of safetensors files: {error!r}") from error
    files: dict[str, set[str] | None] = {file: {t for t, f in names.items() if f == file} for file in sorted(set(names.values()))}
    if has_single and SINGLE not in files:
        raise MsrlError(f"{folder}: {SINGLE} and {INDEX} are both here and disagree; remove the one that is not meant")
    outside = [file for file in files if Path(file).name != file]
    if outside:
        raise MsrlError(f"{folder / INDEX}: names {outside[0]}, which is not a plain file name")
    return files


def _difference(names: set[str], expected: set[str]) -> str:
    missing, extra = sorted(expected - names), sorted(names - expected)
    parts = [f"lacks {_some(missing)}"] if missing else []
    return " and ".join(parts + ([f"has besides {_some(extra)}"] if extra else []))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def sidecar_files(folder: Path) -> list[Path]:
    """Config, tokenizer and code files: all that makes a model besides its weights."""
    found = {file for pattern in _SIDECARS for file in folder.glob(pattern) if file.is_file()}
    return sorted(file for file in found if not file.name.endswith(".index.json") and file.name != "msrl_manifest.json")


def copy_sidecars(source: Path, target: Path, dtype: torch.dtype | None) -> None:
    """Copy config and tokenizer files; config.json names `dtype` as the type of the weights unless it is None."""
    target.mkdir(parents=True, exist_ok=True)
    for file in sidecar_files(source):
        shutil.copyfile(file, target / file.name)
    if dtype is not None:
        path = target / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["dtype" if "dtype" in config else "torch_dtype"] = hf_name(dtype)
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Place:
    file: Path
    offset: int
    spec: TensorSpec


class HfWriter:
    """Writes safetensors of at most `max_shard_bytes` into a folder, tensors in any order and from several threads.

    The folder is expected not to be visible yet (see `files.staged_folder`). `close` raises ValueError when a tensor was not written.
    """

    def __init__(self, folder: Path, specs: Mapping[str, TensorSpec], max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        shards = _shards(specs, max_shard_bytes)
        names = [SINGLE] if len(shards) == 1 else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        self._places: dict[str, _Place] = {}
        self._written: set[str] = set()
        self._descriptors: dict[Path, int] = {}
        for file, shard in zip(names, shards, strict=True):
            self._begin(folder / file, {name: specs[name] for name in shard})
        if len(shards) > 1:
            weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
            index = {"metadata": {"total_size": sum(spec.num_bytes for spec in specs.values())}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def write(self, name: str, tensor: Tensor) -> None:
        """Put a tensor where it belongs. Raises ValueError when it is not the one that was announced."""
        place = self._places[name]
        if spec_of(tensor) != place.spec:
            raise ValueError(f"{name} was announced as {place.spec}, not {spec_of(tensor)}")
        data, offset = tensor_bytes(tensor), place.offset
        while data:
            count = os.pwrite(self._descriptors[place.file], data, offset)
            data, offset = data[count:], offset + count
        self._written.add(name)

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        missing = sorted(set(self._places) - self._written)
        if missing:
            raise ValueError(f"not written: {_some(missing)}")

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
