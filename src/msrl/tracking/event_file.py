"""Event file of TensorBoard (`events.out.tfevents.*`): TFRecords with one protobuf event each.

A record consists of the length of the data (8 bytes), the checksum of the length, the data and the
checksum of the data. Checksums are masked CRC-32C (4 bytes). All numbers are little-endian. Format:
https://www.tensorflow.org/tutorials/load_data/tfrecord

The writer of the package tensorboard computes the checksums in Python, which takes longer than
everything else that a tracker does.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path

import google_crc32c

_MASK = 0xA282EAD8
_LENGTH, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")
_numbers = count()  # of the files of this process, because two can begin in the same second


class EventFile:
    """New event file in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._file = (folder / f"events.out.tfevents.{name}").open("xb")

    def append(self, events: Iterable[bytes]) -> None:
        """Append serialized events, and flush them."""
        self._file.write(b"".join(map(record, events)))
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def record(data: bytes) -> bytes:
    """Return the record of an event."""
    length = _LENGTH.pack(len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def _checksum(data: bytes) -> bytes:
    """Return the masked CRC-32C: rotated right by 15 bits, plus a constant."""
    value = google_crc32c.value(data)
    rotated = value >> 15 | value << 17 & 0xFFFFFFFF
    return _CHECKSUM.pack((rotated + _MASK) & 0xFFFFFFFF)
