"""Zip archives as torch writes them: uncompressed records, each aligned to 64 bytes.

The position of each record is known before writing, so that records can be written in any order and
by several threads. The CRC-32s of the format serve as checksums. Source: PKWARE's APPNOTE 6.3.10
(4.3 structure, 4.5.3 sizes of 64 bits); "FB" is the padding field of torch's writer.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from msrl.checksums import crc32, read_crc32
from msrl.errors import MsrlError

if TYPE_CHECKING:
    from msrl.checksums import Readable

ALIGNMENT = 64
ROOT = "archive"
_LOCAL, _CENTRAL = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
_END, _END64, _LOCATOR = (
    struct.Struct("<4s4H2IH"),
    struct.Struct("<4sQ2H2I4Q"),
    struct.Struct("<4sIQI"),
)
_MAX16, _MAX32 = 0xFFFF, 0xFFFFFFFF
_DATE = 1 << 5 | 1  # 1980-01-01: archives of the same records have the same bytes
_UTF8 = 1 << 11  # the flag of a name in UTF-8


@dataclass(frozen=True, slots=True)
class _Record:
    """A record and the position of its header relative to the archive."""

    name: bytes
    num_bytes: int
    begin: int

    @property
    def is_wide(self) -> bool:
        """True if the size needs 64 bits."""
        return self.num_bytes >= _MAX32

    @property
    def data(self) -> int:
        """Position of the record's data relative to the archive."""
        least = self.begin + _LOCAL.size + len(self.name) + 20 * self.is_wide + 4
        return least + -least % ALIGNMENT

    def local_header(self, crc: int) -> bytes:
        size = _MAX32 if self.is_wide else self.num_bytes
        wide = struct.pack("<2H2Q", 1, 16, self.num_bytes, self.num_bytes) if self.is_wide else b""
        extra_bytes = self.data - self.begin - _LOCAL.size - len(self.name)
        padding = extra_bytes - len(wide) - 4
        fixed = _LOCAL.pack(
            b"PK\3\4",
            45 if self.is_wide else 20,
            0,
            0,
            0,
            _DATE,
            crc,
            size,
            size,
            len(self.name),
            extra_bytes,
        )
        return fixed + self.name + wide + b"FB" + padding.to_bytes(2, "little") + b"Z" * padding

    def central_header(self, crc: int) -> bytes:
        size, begin = _MAX32 if self.is_wide else self.num_bytes, min(self.begin, _MAX32)
        large = [self.num_bytes] * 2 * self.is_wide + [self.begin] * (begin == _MAX32)
        extra = struct.pack(f"<2H{len(large)}Q", 1, 8 * len(large), *large) if large else b""
        version, mode = 45 if large else 20, 0o600 << 16
        fixed = (
            b"PK\1\2",
            3 << 8 | version,
            version,
            0,
            0,
            0,
            _DATE,
            crc,
            size,
            size,
            len(self.name),
            len(extra),
            0,
            0,
            0,
            mode,
            begin,
        )
        return _CENTRAL.pack(*fixed) + self.name + extra


class ArchiveWriter:
    """Writer of records of known sizes as an archive that starts at byte `begin` of a file."""

    def __init__(self, path: Path, sizes: Mapping[str, int], begin: int = 0) -> None:
        """Create the file if it is absent, and extend it to hold the records.

        `sizes` has the size in bytes of every record by name.
        """
        self._path, self._begin = path, begin
        self._records: dict[str, _Record] = {}
        self._crcs: dict[str, int] = {}
        self._end = 0
        for name, num_bytes in sizes.items():
            record = self._records[name] = _Record(f"{ROOT}/{name}".encode(), num_bytes, self._end)
            self._end = record.data + num_bytes
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        os.truncate(descriptor, begin + self._end)
        os.close(descriptor)

    def write(
        self,
        name: str,
        blocks: Iterable[memoryview],
        advance: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """Write a record; `advance` is called with the size of each block.

        Raises:
            ValueError: The record has another size than declared.
        """
        record, crc, num_written = self._records[name], 0, 0
        descriptor = os.open(self._path, os.O_WRONLY)
        try:
            for block in blocks:
                if num_written + len(block) > record.num_bytes:
                    raise ValueError(f"{name}: more bytes than the {record.num_bytes} declared")
                crc = crc32(block, crc)
                write_at(descriptor, block, self._begin + record.data + num_written)
                num_written += len(block)
                advance(len(block))
            if num_written != record.num_bytes:
                raise ValueError(
                    f"{name}: {num_written} bytes instead of the {record.num_bytes} declared"
                )
            write_at(descriptor, memoryview(record.local_header(crc)), self._begin + record.begin)
        finally:
            os.close(descriptor)
        self._crcs[name] = crc

    def close(self) -> tuple[int, str]:
        """Write the archive's directory; return the archive's size and the digest of its records.

        Raises:
            ValueError: A record was not written.
        """
        missing = [name for name in self._records if name not in self._crcs]
        if missing:
            raise ValueError(f"records not written: {', '.join(missing[:3])}")
        directory = b"".join(
            record.central_header(self._crcs[name]) for name, record in self._records.items()
        )
        ending = self._ending(len(directory))
        descriptor = os.open(self._path, os.O_WRONLY)
        try:
            write_at(descriptor, memoryview(directory + ending), self._begin + self._end)
        finally:
            os.close(descriptor)
        checksum = records_digest(
            (record.name.decode(), record.num_bytes, self._crcs[name])
            for name, record in self._records.items()
        )
        return self._end + len(directory) + len(ending), checksum

    def _ending(self, directory_bytes: int) -> bytes:
        """Return the end of the archive, which locates the directory."""
        count, begin = len(self._records), self._end
        wide = b""
        if count >= _MAX16 or begin >= _MAX32:
            wide = _END64.pack(b"PK\6\6", 44, 45, 45, 0, 0, count, count, directory_bytes, begin)
            wide += _LOCATOR.pack(b"PK\6\7", 0, begin + directory_bytes, 1)
        counts = (min(count, _MAX16),) * 2
        return wide + _END.pack(
            b"PK\5\6", 0, 0, *counts, min(directory_bytes, _MAX32), min(begin, _MAX32), 0
        )


def write_at(descriptor: int, data: memoryview, offset: int) -> None:
    """Write all of `data` at `offset`."""
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


def check_archive(file: IO[bytes], advance: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Compare every record of an open archive with its CRC-32 and return the digest of the records.

    `advance` is called with the size of each block that was read.

    Raises:
        MsrlError: A record is damaged; names the record.
        zipfile.BadZipFile, OSError: The file is not an archive.
    """
    with zipfile.ZipFile(file) as archive:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or not _is_intact(file, info, advance):
                raise MsrlError(f"record {info.filename} does not match its checksum")
        return archive_digest(archive)


def _is_intact(file: IO[bytes], info: zipfile.ZipInfo, advance: Callable[[int], None]) -> bool:
    """Return True if a record has the size and CRC-32 of the archive's directory.

    Raises:
        MsrlError: The record is not at the position in the directory.
    """
    file.seek(info.header_offset)
    header = _LOCAL.unpack(file.read(_LOCAL.size))
    if header[0] != b"PK\3\4" or file.read(header[-2]) != info.orig_filename.encode(
        "utf-8" if info.flag_bits & _UTF8 else "cp437"
    ):
        raise MsrlError(f"record {info.filename} is not at the position in the archive's directory")
    file.seek(header[-1], os.SEEK_CUR)
    return read_crc32(cast("Readable", file), info.file_size, advance) == (info.CRC, info.file_size)


def archive_digest(archive: zipfile.ZipFile) -> str:
    """Return the SHA-256 of the names, sizes and CRC-32s of an archive's records.

    The CRC-32s are in the directory, so the data is not read.
    """
    return records_digest(
        (record.filename, record.file_size, record.CRC) for record in archive.infolist()
    )


def records_digest(records: Iterable[tuple[str, int, int]]) -> str:
    """Return the SHA-256 of names, sizes and CRC-32s."""
    lines = [f"{name} {num_bytes} {crc:08x}\n" for name, num_bytes, crc in records]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
