"""Limits of the time and memory that reading a file of another system takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msrl.errors import MsrlError
from msrl.limits import TimeLimitError, memory_within, run_within

T = TypeVar("T")

TIME_LIMIT_S = 30.0  # of CPU time
_MEMORY_BYTES = 2 << 30


def within_limits(name: str, read: Callable[[], T]) -> T:
    """Call a function that reads the file `name`.

    Raises:
        MsrlError: It takes longer, or needs more memory, than any file that people write.
    """
    try:
        with memory_within(_MEMORY_BYTES):
            return run_within(TIME_LIMIT_S, read, of_cpu=True)
    except TimeLimitError as error:
        raise MsrlError(f"{name}: {error} to read. Import a shorter file.") from None
    except MemoryError:
        raise MsrlError(
            f"{name}: needs more than {_MEMORY_BYTES >> 30} GiB of memory to read. Import a "
            "shorter file."
        ) from None
