"""Writer for Megatron's distributed checkpoints (`torch_dist`), with one file per layer.

One process writes them tensor by tensor:

    <iteration>/.metadata           names, shapes, chunks and their positions in the files
    <iteration>/__<n>_0.distcp      tensors: n = 0 before the layers, 1 to L the layers, L + 1 after
    <iteration>/__extra_0.distcp    extra state of modules, which is empty: one object for all
    <iteration>/common.pt           args, iteration and naming of the contents
    <iteration>/metadata.json       format

Source: megatron-core 0.16 dist_checkpointing, torch.distributed.checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from msrl.checkpoint.distributed.names import (
    global_position,
    is_stacked,
    split_joined,
    split_specs,
    stored_spec,
)
from msrl.checkpoint.distributed.sections import Range, append_tensor, digest_of_sections
from msrl.checkpoint.torch_files.reader import Pieces, TensorSpec, WrittenFile
from msrl.checkpoint.torch_files.whole_files import check_records
from msrl.models.shape import Shape

METADATA, COMMON, FORMAT, EXTRA = ".metadata", "common.pt", "metadata.json", "__extra_0.distcp"
_BACKENDS = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def tensor_file(name: str, num_layers: int) -> str:
    """Return the name of the file that holds a tensor; `name` is msrl's name."""
    match = _LAYER.match(name)
    number = 0 if name.startswith("embedding.") else num_layers + 1
    if match:
        number = int(match[1]) + 1
    return f"__{number}_0.distcp"


def group_by_file(
    tensors: Iterable[tuple[str, Pieces]], num_layers: int
) -> dict[str, list[tuple[str, Pieces]]]:
    """Return a model's tensors by the file that holds them."""
    files: dict[str, list[tuple[str, Pieces]]] = {}
    for name, pieces in tensors:
        files.setdefault(tensor_file(name, num_layers), []).append((name, pieces))
    return files


def write_file(
    path: Path,
    shape: Shape,
    te: bool,
    tensors: Iterable[tuple[str, Pieces]],
    advance: Callable[[int], None],
) -> tuple[str, WrittenFile, dict[str, Range]]:
    """Write one file of tensors; return its name, size and checksum, and the tensors' ranges."""
    ranges: dict[str, Range] = {}
    digests: list[str] = []
    end = 0
    for name, pieces in itertools.chain.from_iterable(
        split_joined(*tensor, shape) for tensor in tensors
    ):
        stored = Pieces(
            stored_spec(global_position(name, shape, te=te), pieces.spec),
            pieces.tensors,
            pieces.refuse_nonfinite,
        )
        written = append_tensor(path, end, stored, advance)
        ranges[name] = Range(path.name, end, written.num_bytes)
        digests.append(written.sha256)
        end += written.num_bytes
    return path.name, WrittenFile(end, digest_of_sections(digests)), ranges


def write_metadata_files(
    folder: Path,
    shape: Shape,
    te: bool,
    specs: Mapping[str, TensorSpec],
    ranges: Mapping[str, Range],
    args: argparse.Namespace,
    iteration: int,
) -> dict[str, WrittenFile]:
    """Write all files of an iteration except the tensors' files, and return their checksums.

    These are extra states, metadata, arguments and format. `specs` describes all tensors unsharded.
    """
    empty = io.BytesIO()
    torch.save([None], empty)
    extra = folder / EXTRA
    extra.write_bytes(empty.getvalue())
    from msrl.checkpoint.distributed.metadata import (
        build_metadata,
    )  # torch's classes take half a second to import

    metadata = build_metadata(
        shape, split_specs(specs, shape), ranges, EXTRA, extra.stat().st_size, te
    )
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    content = {"non_homogeneous_layers": not is_stacked(shape), "singleton_local_shards": False}
    args = argparse.Namespace(**{**vars(args), "ckpt_format": "torch_dist", "use_dist_ckpt": True})
    common = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "content_metadata": content,
    }
    torch.save(common, folder / COMMON)
    (folder / FORMAT).write_text(json.dumps(_BACKENDS))
    written = {name: _file_checksum(folder / name) for name in (METADATA, FORMAT, EXTRA)}
    written[COMMON] = WrittenFile((folder / COMMON).stat().st_size, check_records(folder / COMMON))
    return written


def _file_checksum(path: Path) -> WrittenFile:
    return WrittenFile(path.stat().st_size, file_sha256(path))


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
