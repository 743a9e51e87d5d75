"""What Ray does to the process that it is imported into, kept within bounds: its start, its signal handlers, its settings."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from msrl.cluster import processes, state
from msrl.errors import MsrlError
from msrl.temporary import ProcessRecord

_LOG = logging.getLogger("msrl.cluster")
_STARTS = 3
_DAEMONS = ("gcs_server", "raylet")
_GIVEN_UP = "timed out during startup"  # what ray.init says when the raylet is late; how long it waits cannot be set


def start_ray(**arguments: Any) -> None:
    """`ray.init`, again where Ray gave its own start up, which it does on a busy machine. Raises MsrlError when it does so every time."""
    for attempt in range(1, _STARTS + 1):
        try:
            ray.init(**arguments)
        except Exception as error:
            ray.shutdown()
            if _GIVEN_UP not in str(error):
                raise
            if attempt == _STARTS:
                raise MsrlError(f"Ray gave up starting after 30 s, {_STARTS} times: is this machine overloaded?") from error
            _LOG.warning("Ray gave up starting after 30 s, as it does on a busy machine; trying again")
        else:
            return


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Ray takes SIGTERM over below Python, and answers it with a crash; what was in force before is put back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def own_sessions() -> Iterator[None]:
    """Start Ray's processes in sessions of their own: a signal to this process's group, and the end of its terminal, must not end them.

    This process needs them to save. They still end with it: the kernel kills them when their parent has ended. Ray 2.54 to 2.60 asks for
    that in `set_kill_on_parent_death_linux`, which `ray._private.services.start_ray_process` calls in the child before it becomes Ray's.
    Raises RuntimeError where Ray's processes share the group of this one all the same.
    """
    from ray._private import utils

    ends_with_parent = utils.set_kill_on_parent_death_linux

    def in_own_session() -> None:
        os.setsid()
        ends_with_parent()

    utils.set_kill_on_parent_death_linux = in_own_session
    try:
        yield
    finally:
        utils.set_kill_on_parent_death_linux = ends_with_parent
    shared = [process.name for process in processes.descendants(os.getpid()) if _is_ray_in_own_group(process)]
    if shared:
        raise RuntimeError(f"Ray {ray.__version__} starts {', '.join(shared)} in the group of this process: its start has changed")


def _is_ray_in_own_group(process: ProcessRecord) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return process.name in _DAEMONS and os.getpgid(process.pid) == os.getpgid(0)
    return False


@contextlib.contextmanager
def ray_settings(token: Path | str, *, loopback: bool) -> Iterator[None]:
    """Ray's process-wide settings for one session: the token, no usage statistics, and that loopback means loopback."""
    from ray._private import ray_constants
    from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

    wanted = {**state.token_environment(token), **state.patience(), "RAY_USAGE_STATS_ENABLED": "0"}
    wanted["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    names = {*wanted, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"}
    before = {name: os.environ.pop(name, None) for name in names}
    multi_machine = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(wanted)
    # Ray reads both when it is imported, which has happened: without this, 127.0.0.1 becomes the outer address of the machine.
    ray_constants.ENABLE_RAY_CLUSTER = multi_machine and not loopback
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = multi_machine
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
