"""Files of `torch.save`, written tensor by tensor at places known beforehand: in any order, by
several threads.

The format is a zip archive (see `archive`): `data.pkl`, and a record `data/<n>` per storage. In
memory is a block of each tensor that is being written, instead of a rank's whole share. Source:
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
    piece_blocks,
    pieces_of,
)

_PICKLE, _ORDER, _VERSION = "data.pkl", "byteorder", "version"


class TorchWriter:
    """Writes what `torch.save(wrap(tensors), path, pickle_protocol=protocol)` would.

    The file stands under its final name from the start: the caller writes into a folder that is not
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
        """The archive lies from byte `begin` on. Only protocol 2 is read `weights_only`."""
        self._places = {
            name: _StandIn(str(index), spec) for index, (name, spec) in enumerate(specs.items())
        }
        head = {
            _PICKLE: _pickled(wrap(dict(self._places)), protocol),
            _ORDER: sys.byteorder.encode(),
        }
        tail = {_VERSION: b"3\n"}
        sizes = {place.record: place.spec.num_bytes for place in self._places.values()}
        self._archive = ArchiveWriter(path, {**_sizes(head), **sizes, **_sizes(tail)}, begin)
        for name, data in {**head, **tail}.items():
            self._archive.write(name, [memoryview(data)])

    def write(
        self,
        name: str,
        tensor: Tensor | Pieces,
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Put a tensor where it belongs; `advance` hears of every block. Raises ValueError when it
        is not the one that was announced.
        """
        whole, place = pieces_of(tensor), self._places[name]
        if whole.spec != place.spec:
            raise ValueError(f"{name} {whole.spec} was given where {place.spec} was announced")
        self._archive.write(place.record, piece_blocks(whole), advance)

    def close(self) -> WrittenFile:
        """Finish the archive; its bytes and the digest of its records. Raises ValueError when a
        tensor was not written.
        """
        return WrittenFile(*self._archive.close())


def _sizes(records: Mapping[str, bytes]) -> dict[str, int]:
    return {name: len(data) for name, data in records.items()}


@dataclass(frozen=True, slots=True)
class _StandIn:
    """A tensor that is announced in the pickle and comes later in the file."""

    key: str
    spec: TensorSpec

    @property
    def record(self) -> str:
        """The record that holds its bytes."""
        return f"data/{self.key}"


@dataclass(frozen=True, slots=True)
class _Storage:
    """The storage of a stand-in: the pickle names it by key, type and size."""

    key: str
    spec: TensorSpec


def _pickled(value: object, protocol: int) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=protocol).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    """Writes a stand-in as torch writes a tensor: a rebuild call around a storage that is named by
    its key.
    """

    def persistent_id(self, obj: object) -> object:
        if not isinstance(obj, _Storage):
            return None
        return (
            "storage",
            getattr(torch, STORAGES[obj.spec.dtype]),
            obj.key,
            "cpu",
            obj.spec.num_elements,
        )

    def reducer_override(self, obj: object) -> Any:
        if not isinstance(obj, _StandIn):
            return NotImplemented
        shape = obj.spec.shape
        strides = tuple(torch.Size(shape[axis + 1 :]).numel() for axis in range(len(shape)))
        arguments = (
            _Storage(obj.key, obj.spec),
            0,
            shape,
            strides,
            False,
            collections.OrderedDict(),
        )
        return _rebuild_tensor_v2, arguments
