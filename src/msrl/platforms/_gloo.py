"""Shared network devices of a process's gloo groups."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any


@functools.cache
def share_gloo_devices() -> None:
    """Let all gloo groups that this process creates from now on share their network devices.

    By default, PyTorch creates a device for each group, whose thread wakes up 100 times per second.
    Megatron creates 18 groups for one rank and vLLM 13; their threads delay the computation.
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_gloo_available():
        return
    group_class: Any = distributed.ProcessGroupGloo
    create = group_class.__init__

    def create_with_shared_devices(
        self: Any, store: Any, rank: int, size: int, timeout: Any = None, *, options: Any = None
    ) -> None:
        if options is None and not isinstance(timeout, group_class._Options):
            options = group_class._Options()
            options._devices = list(_devices(os.environ.get("GLOO_SOCKET_IFNAME", ""), os.getpid()))
            options._threads = 2 * len(options._devices)
            if isinstance(timeout, timedelta):
                options._timeout = timeout
        create(self, store, rank, size, timeout if options is None else options)

    group_class.__init__ = create_with_shared_devices


@functools.cache
def _devices(interfaces: str, process: int) -> tuple[Any, ...]:
    """Return the devices of comma-separated network interfaces, which PyTorch would create.

    A forked process needs its own, because it does not inherit their threads.
    """
    from torch import distributed

    group_class: Any = distributed.ProcessGroupGloo
    names = [name for name in interfaces.split(",") if name]
    return tuple(group_class.create_device(interface=name) for name in names) or (
        group_class.create_default_device(),
    )
