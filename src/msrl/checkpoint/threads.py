"""Independent tasks on threads.

Threads suffice, because torch, checksums and system calls release the GIL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_THREADS_PER_CORE = 2  # writers of one file wait for each other and leave their core idle


def in_parallel(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run the tasks on two threads per core and return their results in order.

    The first exception is raised; tasks that have not started by then are canceled.
    """
    with ThreadPoolExecutor(
        max(1, min(len(tasks), _THREADS_PER_CORE * (os.cpu_count() or 1)))
    ) as pool:
        futures = [pool.submit(task) for task in tasks]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
