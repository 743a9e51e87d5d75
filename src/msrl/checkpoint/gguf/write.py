"""GGUF files for llama.cpp and Ollama, written from a model in the terms of Hugging Face.

Matrices have the chosen type and vectors float32, as llama.cpp's converter writes them. A matrix
whose rows do not divide into the blocks of Q8_0 has F16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from msrl.checkpoint.atomic_folder import require_free_path, require_space, staged_folder
from msrl.checkpoint.dtypes import hf_name
from msrl.checkpoint.gguf.file import PLAIN, GgufFile
from msrl.checkpoint.gguf.model import FREQUENCIES, config_values, gguf_name, in_pairs, metadata
from msrl.checkpoint.gguf.tokenizer import tokenizer_metadata
from msrl.checkpoint.hf.weight_files import StoredTensor
from msrl.checkpoint.source import HfSource
from msrl.checkpoint.torch_files.reader import TensorSpec
from msrl.checkpoint.weights import WeightSource
from msrl.errors import MsrlError
from msrl.models.families import all_rules, shape_from_config
from msrl.models.hf_config import HfConfig
from msrl.models.rules import Rule

FILE = "model.gguf"
_TYPES = {"fp32": "F32", "fp16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}  # by convert.dtype
_SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}  # gguf.LlamaFileType
_LARGEST = {"F16": 65504.0, "Q8_0": 127 * 65504.0}  # the scale of a block has F16


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor of the file. `weight` is its Hugging Face name, and `kind` its type in the file."""

    name: str
    weight: str
    shape: tuple[int, ...]
    kind: str
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.kind]]
        return math.prod(self.shape) // block * block_bytes

    def rounded(self) -> Tensor:
        """Return the tensor with the values and the type that a reader of the file gets."""
        import gguf

        if self.kind in PLAIN:
            return self.read().to(PLAIN[self.kind])
        blocks = _encode(self.read(), self.kind)
        return torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType[self.kind]))


class GgufModel:
    """Contents of a file to write: metadata and tensors."""

    def __init__(self, source: WeightSource, dtype: str) -> None:
        """Describe a model, whose matrices have the type `dtype`, a value of convert.dtype.

        Raises:
            MsrlError: A GGUF file cannot describe the model or its tokenizer.
        """
        self._source, shape = source, source.shape
        kind = _TYPES[_SHORT_NAMES[hf_name(source.main_dtype())] if dtype == "keep" else dtype]
        described, divisors = metadata(shape, source.hf_dir)
        self._entries = list(_entries(source, kind))
        if divisors is not None:
            read = partial(torch.clone, divisors)
            self._entries.append(_Entry(FREQUENCIES, "", tuple(divisors.shape), "F32", read))
        self._metadata = {
            **described,
            "general.file_type": _FILE_TYPES[kind],
            "general.quantization_version": 2,
            **tokenizer_metadata(source.hf_dir, shape.vocab_size),
        }
        self._check_complete()

    def _check_complete(self) -> None:
        """Check that a reader of the file gets the same network."""
        folder, expected = self._source.hf_dir, self._source.shape
        file = GgufFile(folder, self._metadata, {e.name: _stored(e) for e in self._entries})
        read = shape_from_config(HfConfig(config_values(file), str(folder)))
        read = replace(read, dtype=expected.dtype)
        names = [field.name for field in fields(expected)]
        lost = [name for name in names if getattr(read, name) != getattr(expected, name)]
        if lost:
            raise MsrlError(
                f"{folder}: msrl cannot describe {', '.join(lost)} of this "
                f"{expected.architecture} in a GGUF file. Use the converter of llama.cpp."
            )

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._entries)

    def rounded(self) -> HfSource:
        """Return the weights with the values and types that a reader of the file gets."""
        stored = {entry.weight: _stored(entry) for entry in self._entries if entry.weight}
        return HfSource(self._source.hf_dir, stored)

    def write(self, save: Path, advance: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Write the folder `save` with the file, and a Modelfile for Ollama.

        Raises:
            MsrlError: `save` is not free, the disk is full, or a number overflows its type.
        """
        import gguf

        require_free_path(save)
        require_space(save, self.num_bytes)
        with staged_folder(save) as folder:
            writer = gguf.GGUFWriter(folder / FILE, self._metadata["general.architecture"])
            for key, value in self._metadata.items():
                _add(writer, key, value)
            for entry in self._entries:
                kind = gguf.GGMLQuantizationType[entry.kind]
                # The type of a number of the shape; that of the stored blocks is `kind`.
                dtype = np.dtype(np.float32)
                writer.add_tensor_info(entry.name, entry.shape, dtype, entry.num_bytes, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for entry in self._entries:
                tensor = in_pairs(self._checked(entry), entry.weight, self._source.shape)
                writer.write_tensor_data(_encode(tensor, entry.kind))
                advance(entry.num_bytes)
            writer.close()
            (folder / "Modelfile").write_text(f"FROM ./{FILE}\n", encoding="utf-8")

    def _checked(self, entry: _Entry) -> Tensor:
        """Return a tensor; refuse NaN, infinity, and numbers that are too large for its type."""
        tensor = entry.read()
        largest = tensor.abs().max().item()
        if tensor.isfinite().all() and largest <= _LARGEST.get(entry.kind, largest):
            return tensor
        raise MsrlError(
            f"{self._source.hf_dir}: tensor {entry.weight}: its largest number, {largest:g}, "
            f"does not fit {entry.kind}. Use --dtype bf16, or restore the weights."
        )


def _entries(source: WeightSource, kind: str) -> Iterator[_Entry]:
    """Yield the tensors of a model in the order of its rules."""
    for rule in all_rules(source.shape):
        for number, (name, shape) in enumerate(zip(rule.hf, rule.shapes, strict=True)):
            read = partial(_read, source, rule, number)
            yield _Entry(gguf_name(name), name, shape, _kind(shape, kind), read)


def _kind(shape: tuple[int, ...], kind: str) -> str:
    """Return the type of a tensor if matrices have the type `kind`."""
    if len(shape) < 2:
        return "F32"
    return "F16" if kind == "Q8_0" and shape[-1] % 32 else kind


def _read(source: WeightSource, rule: Rule, number: int) -> Tensor:
    return source.hf_tensors(rule)[number]


def _stored(entry: _Entry) -> StoredTensor:
    spec = TensorSpec(PLAIN.get(entry.kind, torch.float32), entry.shape)
    return StoredTensor(Path(FILE), spec, entry.rounded)


def _encode(tensor: Tensor, kind: str) -> np.ndarray[Any, Any]:
    """Return the numbers or blocks of a tensor in a file."""
    import gguf

    if kind in PLAIN:
        plain = tensor.to(PLAIN[kind]).contiguous()
        return plain.view(torch.int16 if plain.element_size() == 2 else torch.int32).numpy()
    return gguf.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[kind])


def _add(writer: Any, key: str, value: Any) -> None:
    """Add an entry of metadata; the writer itself adds the architecture."""
    if key == "general.architecture":
        return
    adds = {bool: "add_bool", int: "add_uint32", float: "add_float32", str: "add_string"}
    getattr(writer, adds.get(type(value), "add_array"))(key, value)
