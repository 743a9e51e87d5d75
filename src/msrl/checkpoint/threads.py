"""Independent pieces of work side by side: torch, checksums and the system let go of Python's lock
meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_THREADS_PER_CORE = 2  # two writers of one file wait for each other, and a core would too


def in_parallel(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run the jobs on two threads per core; their results in order. The first failure is raised,
    what has not begun by then never does.
    """
    with ThreadPoolExecutor(
        max(1, min(len(jobs), _THREADS_PER_CORE * (os.cpu_count() or 1)))
    ) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
