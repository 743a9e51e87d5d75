"""CRC-32, the checksum of zip archives (RFC 1952, section 8).

Intel's ISA-L computes it where it is installed, many times faster than zlib.

The CRC of two concatenated blocks follows from the CRCs of the blocks, because CRCs are remainders
of polynomials over GF(2). The blocks of a file can therefore be written in any order. Numbers
represent polynomials with x^0 in the highest bit, as in the format.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Protocol

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this machine
    from zlib import crc32

__all__ = ["combine_crc32", "crc32", "file_crc32", "read_crc32"]

_POLYNOMIAL = 0xEDB88320
_BLOCK_BYTES = 1 << 20  # stays in the cache between the copy and the checksum


class Readable(Protocol):
    """A binary file that reads into memory of the caller."""

    def readinto(self, buffer: memoryview, /) -> int | None: ...


def combine_crc32(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two concatenated blocks: `first` * x^(8 * `second_bytes`) + `second`.

    Args:
      first: CRC-32 of the first block.
      second: CRC-32 of the second block.
      second_bytes: Length of the second block.
    """
    return _product(_shift(second_bytes), first) ^ second


@lru_cache(maxsize=4096)
def _shift(num_bytes: int) -> int:
    """Return x^(8 * num_bytes), computed by squaring."""
    result, power = 1 << 31, 1 << 23
    while num_bytes:
        if num_bytes & 1:
            result = _product(result, power)
        power, num_bytes = _product(power, power), num_bytes >> 1
    return result


def _product(a: int, b: int) -> int:
    """Return a * b modulo the polynomial."""
    result = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            result ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return result


def file_crc32(path: Path, advance: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Return the CRC-32 of a file as eight hexadecimal digits.

    `advance` is called with the size of each block after it was read.
    """
    with path.open("rb", buffering=0) as file:
        crc, _ = read_crc32(file, path.stat().st_size, advance)
    return f"{crc:08x}"


def read_crc32(
    file: Readable, num_bytes: int, advance: Callable[[int], None] = lambda num_bytes: None
) -> tuple[int, int]:
    """Return the CRC-32 of the next `num_bytes` bytes of an open file and the bytes read.

    The number of bytes is smaller than `num_bytes` if the file ends earlier.
    """
    buffer = memoryview(bytearray(min(_BLOCK_BYTES, num_bytes)))
    crc, missing = 0, num_bytes
    while missing:
        count = file.readinto(buffer[: min(missing, len(buffer))])
        if not count:
            break
        crc, missing = crc32(buffer[:count], crc), missing - count
        advance(count)
    return crc, num_bytes - missing
