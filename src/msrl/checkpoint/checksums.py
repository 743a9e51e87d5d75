"""CRC-32, the checksum of zip archives: by Intel's ISA-L where it is installed, whose rate is many times that of zlib's."""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this machine
    from zlib import crc32

__all__ = ["crc32"]
