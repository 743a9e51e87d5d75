"""Checks that a file is a whole archive of `torch.save`. Light to import."""

from __future__ import annotations

import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from msrl.checkpoint.torch_files.archive import check_archive
from msrl.errors import MsrlError

_OLD_MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)

# Exceptions that damaged archives and pickles raise. RuntimeError comes from torch, zipfile and
# recursion.
UNREADABLE = (
    RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError,
    AssertionError, MemoryError, EOFError, OSError,
    pickle.UnpicklingError, struct.error, zipfile.BadZipFile, zlib.error,
)  # fmt: skip


def check_records(path: Path, advance: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Compare every record of a file with its checksum and return the digest of the records.

    `advance` is called with the size of each block that was read.

    Raises:
        MsrlError: The file is damaged; names the record.
    """
    check_archive_file(path)
    try:
        with path.open("rb") as file:
            return check_archive(file, advance)
    except (MsrlError, *UNREADABLE) as error:
        raise MsrlError(f"{path}: {error}") from error


def _refuse_old_form(path: Path) -> None:
    """Raise MsrlError for a file that is a pickle instead of an archive.

    Its first value is a number that identifies torch's format before version 1.6. Source:
    `_legacy_save` in torch.serialization.
    """
    with path.open("rb") as file:
        begin = file.read(len(_OLD_MAGIC))
    if begin == _OLD_MAGIC:
        raise MsrlError(
            f"{path}: written in the old form of torch.save, before torch 1.6, which has no "
            "checksums and is not read. Load it with torch and save it again with torch.save."
        )
    if begin[:1] == pickle.PROTO and begin[1:2] <= b"\x05":
        raise MsrlError(
            f"{path}: a bare pickle, not a checkpoint that torch.save wrote. Save it again with "
            "torch.save."
        )


def check_archive_file(path: Path) -> None:
    """Check that the file is complete, uncompressed and not a program.

    The data of a compressed record would be mapped unchanged and read as numbers. A TorchScript
    archive contains code.
    """
    if not path.is_file():
        raise MsrlError(f"{path}: file does not exist")
    _refuse_old_form(path)
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except UNREADABLE as error:
        raise MsrlError(
            f"{path}: truncated or not written by torch.save ({error}). Copy or convert it again."
        ) from error
    compressed = next(
        (record.filename for record in records if record.compress_type != zipfile.ZIP_STORED), None
    )
    if compressed is not None:
        raise MsrlError(
            f"{path}: record {compressed} is compressed, which torch.save never does. "
            "Save or download it again."
        )
    if any(record.filename.endswith("/constants.pkl") for record in records):
        raise MsrlError(f"{path}: is a TorchScript program, not a checkpoint")
