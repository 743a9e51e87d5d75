"""What `.metadata` of a distributed checkpoint holds, in the classes that torch reads it into."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage] - it is what the format holds
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from msrl.checkpoint.dist.names import GlobalPosition, extra_states, place_of, stored_spec
from msrl.checkpoint.dist.sections import Range
from msrl.checkpoint.torch_files.reader import TensorSpec
from msrl.models.shape import Shape


def metadata_of(
    shape: Shape, specs: Mapping[str, TensorSpec], places: Mapping[str, Range], extra_file: str, extra_bytes: int, te: bool
) -> Metadata:
    """Names, shapes and parts of all tensors; objects without contents of their own lie in
    `extra_file`, of `extra_bytes`.
    """
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    nothing = _StorageInfo(extra_file, 0, extra_bytes)
    for name, spec in specs.items():
        place, where = place_of(name, shape, te=te), places[name]
        stored = tensors.setdefault(place.key, _described(place, spec))
        assert isinstance(stored, TensorStorageMetadata)
        offsets, sizes = torch.Size([*place.index, *(0 for _ in spec.shape)]), torch.Size(stored_spec(place, spec).shape)
        storage[MetadataIndex(place.key, offsets)] = _StorageInfo(where.name, where.begin, where.length)
        stored.chunks.append(ChunkStorageMetadata(offsets, sizes))
        for key in extra_states(name, place, te=te):
            tensors[key], storage[MetadataIndex(key)] = BytesStorageMetadata(), nothing
    return Metadata(tensors, storage_data=storage, storage_meta=StorageMeta(), version="1.0.0")


def _described(place: GlobalPosition, spec: TensorSpec) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(spec.dtype), torch.Size([*place.extents, *spec.shape]), [])
