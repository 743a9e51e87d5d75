"""Integrity of weight files: checksums that are compared before anything is loaded from the files.

    msrl_manifest.json   size and checksum of every file that msrl wrote zip archives
    torch's `.bin` and `.pt` files and the sections of `.distcp` files have a CRC-32 per record
    safetensors          no checksums; the header must describe the size of the file

`weight_checks` lists the files that a loader of the folder reads, `refuse_damaged` reads each of
them once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open

from msrl.checkpoint.adapters import peft as peft_files
from msrl.checkpoint.dist.read import is_distributed, read_metadata
from msrl.checkpoint.dist.sections import Range, check_section, digest_of_sections
from msrl.checkpoint.dist.write import COMMON, EXTRA, FORMAT, METADATA, sha256_of
from msrl.checkpoint.hf.manifest import HF_MANIFEST, hf_manifest_files
from msrl.checkpoint.hf.weight_files import INDEX, SINGLE, TORCH_INDEX, TORCH_SINGLE
from msrl.checkpoint.mcore.files import FILE, MANIFEST, TRACKER, iteration_dir, read_manifest
from msrl.checkpoint.mcore.locate import latest_iteration
from msrl.checkpoint.threads import in_parallel
from msrl.checkpoint.torch_files.reader import check_records
from msrl.checksums import file_crc32
from msrl.errors import ManyErrors, MsrlError

Depth = Literal["sizes", "archives", "checksums"]
"""How much is compared: sizes with the manifest, CRC-32s within archives besides, or also the
checksums of the manifest.
"""

Advance = Callable[[int], None]
Records = Mapping[str, Mapping[str, Any]]
_BY_BYTES = (
    METADATA,
    FORMAT,
    EXTRA,
)  # files of a distributed checkpoint whose SHA-256 is of their bytes
_PICKLE = b"\x80\x02"  # how a file of torch begins that is a bare pickle, not an archive
_OPTIMIZER = "optimizer."  # in the keys of tensors of a distributed checkpoint that are not weights


@dataclass(frozen=True, slots=True)
class FileCheck:
    """A file to verify. `read` compares its contents and returns the problem, or an empty string.
    """

    folder: Path
    name: str  # relative to `folder`
    read: Callable[[Path, Advance], str]
    record: Mapping[str, Any] | None = None  # of the manifest

    @property
    def path(self) -> Path:
        return self.folder / self.name

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size if self.path.is_file() else 0

    def problem(self, advance: Advance) -> str:
        """Read the file; return what is wrong with it, or an empty string."""
        if not self.path.is_file():
            return "is missing"
        if self.record is not None and self.num_bytes != self.record["bytes"]:
            return f"has {self.num_bytes} bytes, not {self.record['bytes']}"
        try:
            return self.read(self.path, advance)
        except MsrlError as error:
            return str(error).removeprefix(f"{self.path}: ")

    def message(self, problem: str) -> str:
        """The problem with its file and the remedy."""
        if self.record is None:
            return f"{self.path}: {problem}. Copy or download it again."
        if (self.folder / TRACKER).is_file():
            return f"{self.path}: {problem}. Copy or convert it again."
        return f"{self.path}: {problem}. Copy or convert it again, or remove {HF_MANIFEST} if that was meant."


def weight_checks(folder: Path, depth: Depth = "checksums") -> list[FileCheck]:
    """List the weight files of a folder, chosen as `open_weights` and `read_adapter` choose them;
    none where it holds no model.
    """
    if (folder / "config.json").is_file():
        return hf_checks(folder, depth)
    if (folder / TRACKER).is_file():
        return mcore_checks(folder, depth=depth)
    return adapter_checks(folder, depth)


def hf_checks(folder: Path, depth: Depth = "checksums") -> list[FileCheck]:
    """List the weight files of a Hugging Face folder. Raises MsrlError for a manifest that is not
    readable.
    """
    records = hf_manifest_files(folder) or {}
    return _checks(folder, records, _hf_weight_files(folder), depth)


def adapter_checks(folder: Path, depth: Depth = "checksums") -> list[FileCheck]:
    """List the weight files of a PEFT adapter, or of an mcore checkpoint that holds one."""
    if (folder / TRACKER).is_file() and not (folder / peft_files.CONFIG).is_file():
        return mcore_checks(folder, depth=depth)
    names = [
        name for name in (peft_files.WEIGHTS, peft_files.TORCH_WEIGHTS) if (folder / name).is_file()
    ]
    return _checks(folder, {}, names[:1], depth)


def mcore_checks(
    save: Path, iteration: int | str | None = None, *, depth: Depth = "checksums"
) -> list[FileCheck]:
    """List the files of an iteration (default: the latest) of an mcore checkpoint of either format.

    Raises MsrlError for a tracker, a manifest or an index of tensors that is not readable.
    """
    iteration = latest_iteration(save) if iteration is None else iteration
    records, folder = _mcore_records(save, iteration) or {}, iteration_dir(save, iteration)
    if is_distributed(folder):
        return _dist_checks(save, folder, records, depth)
    return _checks(
        save,
        records,
        [str(path.relative_to(save)) for path in sorted(folder.glob(f"mp_rank_*/{FILE}"))],
        depth,
    )


def damages(checks: Iterable[FileCheck], advance: Advance = lambda num_bytes: None) -> list[str]:
    """Verify files, several at a time; return a message per damaged file. `advance` is called with
    the bytes that were read.
    """
    checks = list(checks)
    problems = in_parallel([partial(check.problem, advance) for check in checks])
    return [
        check.message(problem) for check, problem in zip(checks, problems, strict=True) if problem
    ]


def refuse_damaged(checks: Iterable[FileCheck], advance: Advance = lambda num_bytes: None) -> None:
    """Verify files. Raises MsrlError that names the damaged one and its record, ManyErrors for
    several.
    """
    messages = damages(checks, advance)
    if messages:
        raise ManyErrors(messages) if len(messages) > 1 else MsrlError(messages[0])


def has_manifest(folder: Path, *, is_hf: bool) -> bool:
    """Return True if a manifest lists the files of a folder, of an mcore checkpoint those of its
    latest iteration.
    """
    records = (
        hf_manifest_files(folder) if is_hf else _mcore_records(folder, latest_iteration(folder))
    )
    return records is not None


def _hf_weight_files(folder: Path) -> list[str]:
    """The names of the files that hold the weights, safetensors before torch's; the loader refuses
    what is wrong with the index.
    """
    for single, index in ((SINGLE, INDEX), (TORCH_SINGLE, TORCH_INDEX)):
        if (folder / index).is_file():
            return _indexed_files(folder / index)
        if (folder / single).is_file():
            return [single]
    return []


def _indexed_files(index: Path) -> list[str]:
    """The files that an index names and that are there."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise MsrlError(f"{index}: not an index of weight files: {error!r}") from error
    return [name for name in names if Path(name).name == name and (index.parent / name).is_file()]


def _mcore_records(save: Path, iteration: int | str) -> Records | None:
    """What the manifest says of the files of an iteration. Raises MsrlError where it does not say
    enough.
    """
    if not (save / MANIFEST).is_file():
        return None
    entry: Any = read_manifest(save)["iterations"].get(str(iteration))
    if entry is None:
        return None
    files = entry.get("files") if isinstance(entry, dict) else None
    if not isinstance(files, dict) or not all(map(_is_record, files.values())):
        raise MsrlError(
            f"{save / MANIFEST}: does not say which files iteration {iteration} has; copy or convert the checkpoint again"
        )
    return files


def _is_record(record: object) -> bool:
    return (
        isinstance(record, dict) and "bytes" in record and ("sha256" in record or "crc32" in record)
    )


def _dist_checks(save: Path, folder: Path, records: Records, depth: Depth) -> list[FileCheck]:
    """The files of a distributed checkpoint; of a file without a record, the tensors that are
    weights.
    """
    tensors, _ = read_metadata(folder)
    ranges, weights = dict[str, set[Range]](), dict[str, set[Range]]()
    for key, stored in tensors.items():
        for where in (chunk.where for chunk in stored.chunks):
            name = str((folder / where.name).relative_to(save))
            ranges.setdefault(name, set()).add(where)
            if _OPTIMIZER not in key:
                weights.setdefault(name, set()).add(where)
    common = [str(path.relative_to(save)) for path in [folder / COMMON] if path.is_file()]
    checks = _checks(save, records, [*common, *sorted(weights)], depth)
    return [
        _of_sections(check, (ranges if check.record else weights).get(check.name, ()), depth)
        for check in checks
    ]


def _of_sections(check: FileCheck, ranges: Collection[Range], depth: Depth) -> FileCheck:
    """The check of a file of tensors, which lie in these ranges; any other check as it is."""
    if check.path.suffix != ".distcp" or check.path.name in _BY_BYTES:
        return check
    in_order = sorted(ranges, key=lambda where: where.begin)
    return replace(check, read=partial(_read_sections, in_order, check.record, depth))


def _read_sections(
    ranges: Sequence[Range],
    record: Mapping[str, Any] | None,
    depth: Depth,
    path: Path,
    advance: Advance,
) -> str:
    if depth == "sizes":
        return ""
    with path.open("rb") as file:
        digest = digest_of_sections([check_section(file, where, advance) for where in ranges])
    return (
        _compared(digest, record["sha256"]) if record is not None and depth == "checksums" else ""
    )


def _checks(folder: Path, records: Records, loaded: Iterable[str], depth: Depth) -> list[FileCheck]:
    """The files of the manifest and those that are loaded without being in it."""
    listed = [
        FileCheck(folder, name, partial(_read_recorded, record, depth), record)
        for name, record in records.items()
    ]
    return [
        *listed,
        *(
            FileCheck(folder, name, partial(_read_unrecorded, depth))
            for name in loaded
            if name not in records
        ),
    ]


def _read_recorded(record: Mapping[str, Any], depth: Depth, path: Path, advance: Advance) -> str:
    """Compare a file with its record in the manifest."""
    if depth == "checksums" and "crc32" in record:
        return _compared(file_crc32(path, advance), record["crc32"])
    if depth == "checksums" and path.name in _BY_BYTES:
        return _compared(sha256_of(path), record["sha256"])
    if depth == "sizes" or not _is_archive(path):
        return ""
    digest = check_records(path, advance)
    return _compared(digest, record["sha256"]) if depth == "checksums" else ""


def _read_unrecorded(depth: Depth, path: Path, advance: Advance) -> str:
    """Compare a file with the checksums in itself, where its format has some."""
    if depth != "sizes" and _is_archive(path):
        check_records(path, advance)
    elif path.suffix == ".safetensors":
        return _broken_header(path)
    return ""


def _is_archive(path: Path) -> bool:
    """Return True for a zip archive of torch; its form before those has no checksums, and the
    loader refuses it by name.
    """
    if path.suffix not in (".pt", ".bin"):
        return False
    with path.open("rb") as file:
        return file.read(len(_PICKLE)) != _PICKLE


def _compared(checksum: str, recorded: str) -> str:
    return (
        ""
        if checksum == recorded
        else "has been altered since the manifest was written: its checksum differs"
    )


def _broken_header(path: Path) -> str:
    try:
        with safe_open(path, "pt"):
            return ""
    except (SafetensorError, OSError) as error:
        return f"cut short or not safetensors ({error})"
