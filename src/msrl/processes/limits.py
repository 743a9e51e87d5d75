"""Limits that a process sets itself: memory, and the time of a call."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

_GRACE_S = 5.0


def limit_memory(memory_bytes: int) -> None:
    """Limit the address space to this much more than this process has now; 0 sets no limit."""
    if memory_bytes:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = _address_space() + memory_bytes
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _address_space() -> int:
    """Return the bytes of address space of this process; a fork begins with its parent's."""
    num_pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    return int(num_pages) * resource.getpagesize()


def start_alarm(timeout_s: float) -> None:
    """Let the kernel kill this process after the parent's limit, in case the parent is gone."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s + _GRACE_S)
