"""Writer for files of `torch.save`: tensors in any order and from several threads.

The format is a zip archive (see `archive`): `data.pkl`, and a record `data/<n>` per storage. One
block of each tensor being written is in memory, instead of all tensors of a rank. Source:
torch.serialization and PEP 307, the pickle protocol.
"""

from __future__ import annotations

import collections
import io
import pickle
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from msrl.checkpoint.torch_files.archive import ArchiveWriter
from msrl.checkpoint.torch_files.reader import (
    STORAGES,
    Pieces,
    TensorSpec,
    WrittenFile,
    as_pieces,
    piece_blocks,
)
from msrl.errors import MsrlError

_PICKLE, _ORDER, _VERSION = "data.pkl", "byteorder", "version"


class TorchWriter:
    """Writer with the result of `torch.save(wrap(tensors), path, pickle_protocol=protocol)`.

    The file has its final name from the start, so the caller writes into a folder that is not
    visible yet.
    """

    def __init__(
        self,
        path: Path,
        specs: Mapping[str, TensorSpec],
        wrap: Callable[[dict[str, Any]], object],
        *,
        protocol: int = 4,
        begin: int = 0,
    ) -> None:
        """Create the archive at byte `begin` of the file.

        torch reads only protocol 2 with `weights_only`.

        Raises:
            MsrlError: Checkpoints have no weights of such a type.
        """
        for name, spec in specs.items():
            if spec.dtype not in STORAGES:
                type_name = str(spec.dtype).removeprefix("torch.")
                raise MsrlError(
                    f"{path}: {name} has type {type_name}, which is not supported. "
                    "Select a type with --dtype."
                )
        self._declared = {
            name: _DeclaredTensor(str(index), spec)
            for index, (name, spec) in enumerate(specs.items())
        }
        head = {
            _PICKLE: _pickle(wrap(dict(self._declared)), protocol),
            _ORDER: sys.byteorder.encode(),
        }
        tail = {_VERSION: b"3\n"}
        sizes = {declared.record: declared.spec.num_bytes for declared in self._declared.values()}
        self._archive = ArchiveWriter(path, {**_sizes(head), **sizes, **_sizes(tail)}, begin)
        for name, data in {**head, **tail}.items():
            self._archive.write(name, [memoryview(data)])

    def write(
        self,
        name: str,
        tensor: Tensor | Pieces,
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Write a tensor at its position; `advance` is called with the size of each block.

        Raises:
            ValueError: The tensor has another type or shape than declared.
        """
        pieces, declared = as_pieces(tensor), self._declared[name]
        if pieces.spec != declared.spec:
            raise ValueError(f"{name} was declared as {declared.spec}, but is {pieces.spec}")
        self._archive.write(declared.record, piece_blocks(pieces), advance)

    def close(self) -> WrittenFile:
        """Finish the archive; return its size and the digest of its records.

        Raises:
            ValueError: A tensor was not written.
        """
        return WrittenFile(*self._archive.close())


def _sizes(records: Mapping[str, bytes]) -> dict[str, int]:
    return {name: len(data) for name, data in records.items()}


@dataclass(frozen=True, slots=True)
class _DeclaredTensor:
    """A tensor that the pickle describes and that is written later."""

    key: str
    spec: TensorSpec

    @property
    def record(self) -> str:
        """Name of the record with the tensor's data."""
        return f"data/{self.key}"


@dataclass(frozen=True, slots=True)
class _DeclaredStorage:
    """Storage of a declared tensor; the pickle refers to it by key, type and size."""

    key: str
    spec: TensorSpec


def _pickle(value: object, protocol: int) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=protocol).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Pickler that writes a declared tensor as torch does.

    The pickle has a call of the rebuild function with a storage that is identified by its key.
    """

    def persistent_id(self, obj: object) -> object:
        if not isinstance(obj, _DeclaredStorage):
            return None
        return (
            "storage",
            getattr(torch, STORAGES[obj.spec.dtype]),
            obj.key,
            "cpu",
            obj.spec.num_elements,
        )

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, _DeclaredTensor):
            return NotImplemented
        shape = obj.spec.shape
        strides = tuple(torch.Size(shape[axis + 1 :]).numel() for axis in range(len(shape)))
        arguments = (
            _DeclaredStorage(obj.key, obj.spec),
            0,
            shape,
            strides,
            False,
            collections.OrderedDict(),
        )
        return _rebuild_tensor_v2, arguments
