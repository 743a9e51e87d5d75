"""Metadata of a distributed checkpoint (`.metadata`), as torch's classes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.filesystem import (
    _StorageInfo,  # pyright: ignore[reportPrivateUsage] - the format contains it
)
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from msrl.checkpoint.distributed.names import (
    GlobalPosition,
    extra_states,
    global_position,
    stored_spec,
)
from msrl.checkpoint.distributed.sections import Range
from msrl.checkpoint.torch_files.reader import TensorSpec
from msrl.models.shape import Shape


def build_metadata(
    shape: Shape,
    specs: Mapping[str, TensorSpec],
    ranges: Mapping[str, Range],
    extra_file: str,
    extra_bytes: int,
    te: bool,
) -> Metadata:
    """Return names, shapes and chunks of all tensors and of the modules' extra states.

    `ranges` locates each tensor by name. The extra states have no contents and share one object of
    `extra_bytes` in `extra_file`.
    """
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    extra_info = _StorageInfo(extra_file, 0, extra_bytes)
    for name, spec in specs.items():
        position, where = global_position(name, shape, te=te), ranges[name]
        stored = tensors.setdefault(position.key, _tensor_metadata(position, spec))
        assert isinstance(stored, TensorStorageMetadata)
        offsets, sizes = (
            torch.Size([*position.index, *(0 for _ in spec.shape)]),
            torch.Size(stored_spec(position, spec).shape),
        )
        storage[MetadataIndex(position.key, offsets)] = _StorageInfo(
            where.name, where.begin, where.length
        )
        stored.chunks.append(ChunkStorageMetadata(offsets, sizes))
        for key in extra_states(name, position, te=te):
            tensors[key], storage[MetadataIndex(key)] = BytesStorageMetadata(), extra_info
    return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta(), version="1.0.0")


def _tensor_metadata(position: GlobalPosition, spec: TensorSpec) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(spec.dtype), torch.Size([*position.extents, *spec.shape]), []
    )
