"""The proof of a conversion that needs no model: every tensor of the result, read back from disk, bit for bit as it came in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from msrl.checkpoint.dist.read import sections_digest
from msrl.checkpoint.dist.write import EXTRA, FORMAT, METADATA, sha256_of
from msrl.checkpoint.dtypes import cast_to, same_bits
from msrl.checkpoint.hf.manifest import hf_manifest_files
from msrl.checkpoint.hf.pass_through import carried_tensors
from msrl.checkpoint.mcore.files import MANIFEST, read_manifest
from msrl.checkpoint.source import Copy, ShardedSource, WeightSource
from msrl.checkpoint.threads import in_parallel
from msrl.checkpoint.torch_files.checksums import file_crc32
from msrl.checkpoint.torch_files.reader import check_records
from msrl.errors import MsrlError
from msrl.models.families import all_rules

_AT_ONCE = 1 << 20  # numbers that are compared in double precision at a time


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many Hugging Face tensors (and bytes) were compared, and the names of those that differ."""

    num_tensors: int
    num_bytes: int
    different: tuple[str, ...]


def compare(
    source: WeightSource, result: WeightSource, dtype: torch.dtype | None, advance: Callable[[int], None] = lambda num_bytes: None
) -> Comparison:
    """Compare all tensors of `result` with those of `source`, cast to `dtype` unless it is None, under their Hugging Face names.

    Tensors that are carried through keep their type.
    """
    num_tensors, num_bytes, different = 0, 0, list[str]()
    for rule in all_rules(source.shape):
        kind = cast_to(rule, dtype)
        for name, before, after in zip(rule.hf, source.hf_tensors(rule), result.hf_tensors(rule), strict=True):
            if not same_bits(before if kind is None else before.to(kind), after):
                different.append(name)
            num_tensors, num_bytes = num_tensors + 1, num_bytes + after.nbytes
            advance(after.nbytes)
    carried, arrived = (carried_tensors(side.hf_dir, source.shape) for side in (source, result))
    different += sorted(carried.keys() ^ arrived.keys())
    for name in carried.keys() & arrived.keys():
        if not same_bits(carried[name].read(), arrived[name].read()):
            different.append(name)
        num_tensors, num_bytes = num_tensors + 1, num_bytes + carried[name].spec.num_bytes
        advance(carried[name].spec.num_bytes)
    return Comparison(num_tensors, num_bytes, tuple(different))


def refuse_unlike_copies(source: ShardedSource, where: Path, advance: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Raises MsrlError when ranks that should hold a tensor alike do not: each of them computed with its own, and one would be taken.

    `advance` is told of the bytes of each copy.
    """
    copies = list(source.copies())
    is_same = in_parallel([partial(_is_same, copy, advance) for copy in copies])
    unlike = [copy for copy, same in zip(copies, is_same, strict=True) if not same]
    if unlike:
        raise MsrlError(
            f"{where}: {len(unlike)} tensors are not alike on the ranks that hold copies of them: {unlike[0].ranks} (up to"
            f" {_apart(unlike[0]):.1e} apart); the ranks drifted apart in training or a file is of another checkpoint; reshard with"
            " --no-verify takes the first rank's, and what it writes can be converted and proven"
        )


def _is_same(copy: Copy, advance: Callable[[int], None]) -> bool:
    found = same_bits(copy.read, copy.other)
    advance(copy.other.nbytes)
    return found


def _apart(copy: Copy) -> float:
    """The largest difference of two numbers; NaN where there is one."""
    if copy.read.shape != copy.other.shape:
        return float("inf")
    pairs = zip(copy.read.flatten().split(_AT_ONCE), copy.other.flatten().split(_AT_ONCE), strict=True)
    return torch.stack([(one.double() - other.double()).abs().max() for one, other in pairs]).max().item()


def damaged_files(save: Path, iteration: int | str, *, thorough: bool = True) -> list[str] | None:
    """Files of an iteration that are not as the manifest says, each with the reason; None where there is no entry.

    `thorough` reads every file and compares its checksum; without it, sizes alone are compared.
    """
    if not (save / MANIFEST).is_file():
        return None
    entry: Any = read_manifest(save)["iterations"].get(str(iteration))
    if entry is None:
        return None
    files = entry.get("files") if isinstance(entry, dict) else None
    if not isinstance(files, dict) or not all(map(_is_record, files.values())):
        raise MsrlError(f"{save / MANIFEST}: does not say which files iteration {iteration} has; copy or convert the checkpoint again")
    return _damages(save, files, thorough)


def _is_record(facts: object) -> bool:
    """Whether a manifest says of a file what is compared."""
    return isinstance(facts, dict) and "bytes" in facts and ("sha256" in facts or "crc32" in facts)


def damaged_hf_files(folder: Path, *, thorough: bool = True) -> list[str] | None:
    """`damaged_files` for the weights of a Hugging Face folder."""
    files = hf_manifest_files(folder)
    return None if files is None else _damages(folder, files, thorough)


def _damages(folder: Path, files: Mapping[str, Mapping[str, Any]], thorough: bool) -> list[str]:
    """What is not as its record says, a sentence per file; several are read at a time."""
    found = in_parallel([partial(_damage, folder / name, facts, thorough) for name, facts in files.items()])
    return [f"{name}: {why}" for name, why in zip(files, found, strict=True) if why]


def _damage(path: Path, facts: Mapping[str, Any], thorough: bool) -> str:
    if not path.is_file():
        return "is missing"
    if path.stat().st_size != facts["bytes"]:
        return f"has {path.stat().st_size} bytes, not {facts['bytes']}"
    if not thorough:
        return ""
    try:
        is_same = file_crc32(path) == facts["crc32"] if "crc32" in facts else _digest(path) == facts["sha256"]
    except MsrlError as error:
        return str(error).removeprefix(f"{path}: ")
    return "" if is_same else "has been altered since the manifest was written"


def _digest(path: Path) -> str:
    """A file's digest, taken as its manifest entry was: of records where it is an archive (or many), of the bytes elsewhere."""
    if path.name in (METADATA, FORMAT, EXTRA):
        return sha256_of(path)
    return sections_digest(path) if path.suffix == ".distcp" else check_records(path)
