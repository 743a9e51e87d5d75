"""Integrity checks of weight files before anything is loaded from them.

    msrl_manifest.json   size and checksum of every file written by msrl
    zip archives         torch's `.bin` and `.pt` files and the sections of `.distcp` files have a
                         CRC-32 per record
    safetensors          no checksums; the header must match the size of the file

`weight_checks` lists the files that a loader of the folder reads; `refuse_damaged` reads each file
once.
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
from msrl.checkpoint.distributed.read import is_distributed, read_metadata
from msrl.checkpoint.distributed.sections import Range, check_section, digest_of_sections
from msrl.checkpoint.distributed.write import COMMON, EXTRA, FORMAT, METADATA, file_sha256
from msrl.checkpoint.hf.manifest import HF_MANIFEST, hf_manifest_files
from msrl.checkpoint.hf.weight_files import INDEX, SINGLE, TORCH_INDEX, TORCH_SINGLE
from msrl.checkpoint.mcore.files import FILE, MANIFEST, TRACKER, iteration_dir, read_manifest
from msrl.checkpoint.mcore.locate import latest_iteration
from msrl.checkpoint.threads import in_parallel
from msrl.checkpoint.torch_files.whole_files import check_records
from msrl.checksums import file_crc32
from msrl.errors import MALFORMED, ManyErrors, MsrlError
from msrl.files import is_file_name, read_text_within

Depth = Literal["sizes", "archives", "checksums"]
"""Thoroughness of a check: sizes, also CRC-32s within archives, also checksums of the manifest."""

Advance = Callable[[int], None]
Records = Mapping[str, Mapping[str, Any]]
_BY_BYTES = (METADATA, FORMAT, EXTRA)  # their recorded SHA-256 covers the bytes, not zip records
_PICKLE = b"\x80\x02"  # first bytes of torch files that are a bare pickle instead of an archive
_OPTIMIZER = "optimizer."  # part of the keys of optimizer tensors in a distributed checkpoint


@dataclass(frozen=True, slots=True)
class FileCheck:
    """A file to verify.

    `read` compares the contents and returns a description of the problem, or an empty string.
    """

    folder: Path
    name: str  # relative to `folder`
    read: Callable[[Path, Advance], str]
    record: Mapping[str, Any] | None = None  # from the manifest

    @property
    def path(self) -> Path:
        return self.folder / self.name

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size if self._exists() else 0

    def _exists(self) -> bool:
        """Return False for a name that is too long for the file system, too."""
        try:
            return self.path.is_file()
        except OSError:
            return False

    def problem(self, advance: Advance) -> str:
        """Read the file and return a description of the problem, or an empty string."""
        if not self._exists():
            return "is missing"
        if self.record is not None and self.num_bytes != self.record["bytes"]:
            return f"has {self.num_bytes} bytes instead of {self.record['bytes']}"
        try:
            return self.read(self.path, advance)
        except MsrlError as error:
            return str(error).removeprefix(f"{self.path}: ")

    def message(self, problem: str) -> str:
        """Return an error message with the file, the problem and a remedy."""
        if problem.endswith("."):  # it has a remedy
            return f"{self.path}: {problem}"
        if self.record is None:
            return f"{self.path}: {problem}. Copy or download it again."
        if (self.folder / TRACKER).is_file():
            return f"{self.path}: {problem}. Copy or convert it again."
        return (
            f"{self.path}: {problem}. "
            f"Copy or convert it again, or remove {HF_MANIFEST} if the change is intended."
        )


def weight_checks(folder: Path) -> list[FileCheck]:
    """Return checks of the weight files that `open_weights` and `read_adapter` load from a folder.

    The list is empty if the folder contains no model.
    """
    if (folder / "config.json").is_file():
        return hf_checks(folder)
    if (folder / TRACKER).is_file():
        return mcore_checks(folder)
    return adapter_checks(folder)


def hf_checks(folder: Path, depth: Depth = "checksums") -> list[FileCheck]:
    """Return checks of the weight files of a Hugging Face folder.

    Raises:
        MsrlError: The manifest is not readable.
    """
    records = hf_manifest_files(folder) or {}
    return _checks(folder, records, _hf_weight_files(folder), depth)


def adapter_checks(folder: Path, depth: Depth = "checksums") -> list[FileCheck]:
    """Return checks of the weight files of an adapter (PEFT, or in an mcore checkpoint)."""
    if (folder / TRACKER).is_file() and not (folder / peft_files.CONFIG).is_file():
        return mcore_checks(folder, depth=depth)
    names = [
        name for name in (peft_files.WEIGHTS, peft_files.TORCH_WEIGHTS) if (folder / name).is_file()
    ]
    return _checks(folder, {}, names[:1], depth)


def mcore_checks(
    save: Path, iteration: int | str | None = None, *, depth: Depth = "checksums"
) -> list[FileCheck]:
    """Return checks of the files of an iteration (default: the latest) of an mcore checkpoint.

    Raises:
        MsrlError: The tracker, the manifest or the index of tensors is not readable.
    """
    iteration = latest_iteration(save) if iteration is None else iteration
    records, folder = _mcore_records(save, iteration) or {}, iteration_dir(save, iteration)
    if is_distributed(folder):
        return _dist_checks(save, folder, records, depth)
    files = [str(path.relative_to(save)) for path in sorted(folder.glob(f"mp_rank_*/{FILE}"))]
    return _checks(save, records, files, depth)


def damages(checks: Iterable[FileCheck], advance: Advance = lambda num_bytes: None) -> list[str]:
    """Verify files in parallel and return a message per damaged file.

    `advance` is called with the number of bytes of each block that was read.
    """
    checks = list(checks)
    problems = in_parallel([partial(check.problem, advance) for check in checks])
    return [
        check.message(problem) for check, problem in zip(checks, problems, strict=True) if problem
    ]


def refuse_damaged(checks: Iterable[FileCheck], advance: Advance = lambda num_bytes: None) -> None:
    """Verify files.

    Raises:
        MsrlError: A file is damaged; names the file and the damaged record.
        ManyErrors: Several files are damaged.
    """
    messages = damages(checks, advance)
    if messages:
        raise ManyErrors(messages) if len(messages) > 1 else MsrlError(messages[0])


def has_manifest(folder: Path, *, is_hf: bool) -> bool:
    """Return True if a manifest lists the files of the folder (of mcore: the latest iteration)."""
    records = (
        hf_manifest_files(folder) if is_hf else _mcore_records(folder, latest_iteration(folder))
    )
    return records is not None


def _hf_weight_files(folder: Path) -> list[str]:
    """Return the names of the weight files; safetensors take precedence over torch files.

    Errors in the index are left to the loader.
    """
    for single, index in ((SINGLE, INDEX), (TORCH_SINGLE, TORCH_INDEX)):
        if (folder / index).is_file():
            return _indexed_files(folder / index)
        if (folder / single).is_file():
            return [single]
    return []


def _indexed_files(index: Path) -> list[str]:
    """Return the existing files that an index names."""
    try:
        weight_map = json.loads(read_text_within(index))["weight_map"]
        names = sorted({str(name) for name in weight_map.values()})
    except MALFORMED as error:
        raise MsrlError(f"{index}: not an index of weight files ({error!r})") from error
    return [name for name in names if is_file_name(name) and (index.parent / name).is_file()]


def _mcore_records(save: Path, iteration: int | str) -> Records | None:
    """Return the manifest's records of an iteration's files, or None if it has none.

    Raises:
        MsrlError: The records are incomplete.
    """
    if not (save / MANIFEST).is_file():
        return None
    entry: Any = read_manifest(save)["iterations"].get(str(iteration))
    if entry is None:
        return None
    files = entry.get("files") if isinstance(entry, dict) else None
    if not isinstance(files, dict) or not all(map(_is_record, files.values())):
        raise MsrlError(
            f"{save / MANIFEST}: lists no files of iteration {iteration}. "
            "Copy or convert the checkpoint again."
        )
    return files


def _is_record(record: object) -> bool:
    return (
        isinstance(record, dict) and "bytes" in record and ("sha256" in record or "crc32" in record)
    )


def _dist_checks(save: Path, folder: Path, records: Records, depth: Depth) -> list[FileCheck]:
    """Return checks of the files of a distributed checkpoint.

    In a file without a record, only the tensors that are weights are checked.
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
        _section_check(check, (ranges if check.record else weights).get(check.name, ()), depth)
        for check in checks
    ]


def _section_check(check: FileCheck, ranges: Collection[Range], depth: Depth) -> FileCheck:
    """Return the check of a `.distcp` file with tensors at `ranges`; other checks unchanged."""
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
    if record is None or depth != "checksums":
        return ""
    return _compare_checksum(digest, record["sha256"])


def _checks(folder: Path, records: Records, loaded: Iterable[str], depth: Depth) -> list[FileCheck]:
    """Return checks of the files in the manifest, and of loaded files that the manifest lacks."""
    recorded = [
        FileCheck(folder, name, partial(_read_recorded, record, depth), record)
        for name, record in records.items()
    ]
    unrecorded = [
        FileCheck(folder, name, partial(_read_unrecorded, depth))
        for name in loaded
        if name not in records
    ]
    return recorded + unrecorded


def _read_recorded(record: Mapping[str, Any], depth: Depth, path: Path, advance: Advance) -> str:
    """Compare a file with its record in the manifest."""
    if depth == "checksums" and "crc32" in record:
        return _compare_checksum(file_crc32(path, advance), record["crc32"])
    if depth == "checksums" and path.name in _BY_BYTES:
        return _compare_checksum(file_sha256(path), record["sha256"])
    if depth == "sizes" or not _is_archive(path):
        return ""
    digest = check_records(path, advance)
    return _compare_checksum(digest, record["sha256"]) if depth == "checksums" else ""


def _read_unrecorded(depth: Depth, path: Path, advance: Advance) -> str:
    """Compare a file with the checksums inside it, if its format has any."""
    if depth != "sizes" and _is_archive(path):
        check_records(path, advance)
    elif path.suffix == ".safetensors":
        return _header_problem(path)
    return ""


def _is_archive(path: Path) -> bool:
    """Return True for a zip archive of torch.

    torch's older format has no checksums; the loader refuses it with a clear message.
    """
    if path.suffix not in (".pt", ".bin"):
        return False
    with path.open("rb") as file:
        return file.read(len(_PICKLE)) != _PICKLE


def _compare_checksum(checksum: str, recorded: str) -> str:
    if checksum == recorded:
        return ""
    return "has been altered since the manifest was written (checksum mismatch)"


def _header_problem(path: Path) -> str:
    try:
        with safe_open(path, "pt"):
            return ""
    except (SafetensorError, OSError) as error:
        return f"is truncated or not safetensors ({error})"
