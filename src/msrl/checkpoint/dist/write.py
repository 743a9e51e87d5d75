"""Write Megatron's distributed checkpoint (`torch_dist`): one process, tensor by tensor, a file per
layer.

    <iteration>/.metadata           names, shapes and parts of all tensors, and where each part lies
    (torch.distributed.checkpoint) <iteration>/__<n>_0.distcp      the tensors: n 0 what comes
    before the layers, 1 to L the layers, L + 1 what comes after <iteration>/__extra_0.distcp    the
    extra state of modules, of which there is none: one object for all <iteration>/common.pt
    args, iteration, and how the content is named <iteration>/metadata.json       the format

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

from msrl.checkpoint.dist.names import apart, is_stacked, place_of, specs_apart, stored_spec
from msrl.checkpoint.dist.sections import Range, append_tensor, digest_of_sections
from msrl.checkpoint.torch_files.reader import Pieces, TensorSpec, WrittenFile, check_records
from msrl.models.shape import Shape

METADATA, COMMON, FORMAT, EXTRA = ".metadata", "common.pt", "metadata.json", "__extra_0.distcp"
_BACKENDS = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


def file_of(name: str, num_layers: int) -> str:
    """The file that holds a tensor, given by our name."""
    match = _LAYER.match(name)
    number = int(match[1]) + 1 if match else 0 if name.startswith("embedding.") else num_layers + 1
    return f"__{number}_0.distcp"


def by_file(tensors: Iterable[tuple[str, Pieces]], num_layers: int) -> dict[str, list[tuple[str, Pieces]]]:
    """A model's tensors by the file that holds them."""
    files: dict[str, list[tuple[str, Pieces]]] = {}
    for name, pieces in tensors:
        files.setdefault(file_of(name, num_layers), []).append((name, pieces))
    return files


def write_file(
    path: Path, shape: Shape, te: bool, tensors: Iterable[tuple[str, Pieces]], advance: Callable[[int], None]
) -> tuple[str, WrittenFile, dict[str, Range]]:
    """Write one file of tensors; its name, its checksum, and where each tensor lies."""
    places: dict[str, Range] = {}
    digests: list[str] = []
    end = 0
    for name, pieces in itertools.chain.from_iterable(apart(*tensor, shape) for tensor in tensors):
        stored = Pieces(stored_spec(place_of(name, shape, te=te), pieces.spec), pieces.parts)
        written = append_tensor(path, end, stored, advance)
        places[name] = Range(path.name, end, written.num_bytes)
        digests.append(written.sha256)
        end += written.num_bytes
    return path.name, WrittenFile(end, digest_of_sections(digests)), places


def write_rest(
    folder: Path,
    shape: Shape,
    te: bool,
    specs: Mapping[str, TensorSpec],
    places: Mapping[str, Range],
    args: argparse.Namespace,
    iteration: int,
) -> dict[str, WrittenFile]:
    """Write what stands beside the tensors of an iteration: extra states, names, arguments, format.
    `specs` are all tensors, whole.
    """
    nothing = io.BytesIO()
    torch.save([None], nothing)
    objects = folder / EXTRA
    objects.write_bytes(nothing.getvalue())
    from msrl.checkpoint.dist.metadata import metadata_of  # torch's classes take half a second to import

    metadata = metadata_of(shape, specs_apart(specs, shape), places, EXTRA, objects.stat().st_size, te)
    (folder / METADATA).write_bytes(pickle.dumps(metadata))
    content = {"non_homogeneous_layers": not is_stacked(shape), "singleton_local_shards": False}
    args = argparse.Namespace(**{**vars(args), "ckpt_format": "torch_dist", "use_dist_ckpt": True})
    torch.save({"args": args, "checkpoint_version": 3.0, "iteration": iteration, "content_metadata": content}, folder / COMMON)
    (folder / FORMAT).write_text(json.dumps(_BACKENDS))
    written = {name: _written(folder / name) for name in (METADATA, FORMAT, EXTRA)}
    written[COMMON] = WrittenFile((folder / COMMON).stat().st_size, check_records(folder / COMMON))
    return written


def _written(path: Path) -> WrittenFile:
    return WrittenFile(path.stat().st_size, sha256_of(path))


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
