"""Messages between a process and its child: pickled objects to the child, frames from it.

A pickled object is prefixed by its length (8 bytes). A frame is a HEADER (kind, number, length of
the detail) and the detail in UTF-8.
"""

from __future__ import annotations

import pickle
import struct
from typing import IO, Any

_LENGTH = struct.Struct("<Q")
_HEADER = struct.Struct("<BdI")
READY, RAISED = 0, 2  # kinds of frames that all workers have
MAX_DETAIL_BYTES = 4000  # of an error

Frame = tuple[int, float, str]
"""Kind, number and detail."""


class FrameTooLongError(Exception):
    """A frame announces more bytes than its reader accepts."""


def packed(message: object) -> bytes:
    """Return an object as a message to a child."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def read(source: IO[bytes]) -> Any:
    """Return the next message of the parent, or None at the end of the input."""
    prefix = source.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        return None
    return pickle.loads(source.read(_LENGTH.unpack(prefix)[0]))


def frame(kind: int, number: float = 0.0, detail: bytes = b"") -> bytes:
    """Return a message to the parent."""
    return _HEADER.pack(kind, number, len(detail)) + detail


def error_frame(detail: str) -> bytes:
    """Return a message about an error."""
    return frame(RAISED, detail=detail.encode("utf-8", "replace")[-MAX_DETAIL_BYTES:])


class FrameReader:
    """Decoder of frames that arrive in pieces."""

    def __init__(self, max_bytes: int | None = None) -> None:
        self._received = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[Frame]:
        """Return the frames that are complete with this data.

        Raises:
            FrameTooLongError: A frame is longer than `max_bytes`.
        """
        self._received += data
        frames: list[Frame] = []
        start = 0
        while len(self._received) >= start + _HEADER.size:
            kind, number, length = _HEADER.unpack_from(self._received, start)
            if self._max_bytes is not None and length > self._max_bytes:
                raise FrameTooLongError(length)
            end = start + _HEADER.size + length
            if len(self._received) < end:
                break
            detail = self._received[start + _HEADER.size : end].decode("utf-8", "replace")
            frames.append((kind, number, detail))
            start = end
        del self._received[:start]
        return frames
