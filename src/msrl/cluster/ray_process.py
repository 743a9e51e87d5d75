"""Containment of Ray's effects on the driver process: startup, signal handlers and settings."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray

from msrl.cluster import state
from msrl.cluster.startup import retry_timeouts
from msrl.processes import trees
from msrl.temporary import ProcessRecord

_DAEMONS = ("gcs_server", "raylet")
_NAMES = (*_DAEMONS, "ray::")  # with which the names of Ray's processes begin
# Ray's own processes must not delay ranks and engines, whose threads wait for each other. Actors of
# msrl have their own environment variables and start in new workers, never in idle ones. Nobody
# watches the log files and the use of resources of a local Ray.
_BACKGROUND_SETTINGS = {
    "RAY_prestart_worker_first_driver": "0",
    "RAY_num_workers_soft_limit": "0",  # of idle workers to keep
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",  # number from which the interval applies
    "LOG_NAME_UPDATE_INTERVAL_S": "60",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",
}
_POLL_S = 0.02
_END_S = 10.0  # for processes that were killed
_PR_SET_CHILD_SUBREAPER = 36
_LOG = logging.getLogger("msrl.cluster")


def start_ray(**arguments: Any) -> None:
    """Call `ray.init`, and retry if Ray timed out during its startup.

    Raises:
        MsrlError: Ray timed out every time.
    """

    def start() -> None:
        before = {process.pid for process in ray_processes()}
        try:
            ray.init(**arguments)
        except Exception:
            # Ray's shutdown leaves the processes of a node that has not started. Their agents would
            # write into a folder that has been removed.
            new = [process for process in ray_processes() if process.pid not in before]
            trees.send(new, signal.SIGSTOP)  # they start no further processes
            started = trees.family(new)
            trees.send(started, signal.SIGKILL)
            ray.shutdown()
            trees.wait_for_end(started, _END_S, lambda: None)
            raise

    retry_timeouts(start)


def shut_down_ray() -> None:
    """Call `ray.shutdown`, and kill each of Ray's processes as soon as Ray has ended it.

    Ray sends SIGTERM to one process after the other and waits a second for each, but
    `separate_sessions` blocks the signal.
    """
    descendants = trees.descendants(os.getpid())
    with _killed_once_terminated(
        [process for process in descendants if trees.is_blocked(process, signal.SIGTERM)]
    ):
        ray.shutdown()


@contextlib.contextmanager
def _killed_once_terminated(blocking: Sequence[ProcessRecord]) -> Iterator[None]:
    """Kill each of the processes, which block SIGTERM, once SIGTERM was sent to it in the body."""
    waiting = [process for process in blocking if not trees.is_pending(process, signal.SIGTERM)]
    finished = threading.Event()

    def watch() -> None:
        while not finished.wait(_POLL_S):
            sent = [process for process in waiting if trees.is_pending(process, signal.SIGTERM)]
            trees.send(sent, signal.SIGKILL)

    watcher = threading.Thread(target=watch, name="msrl-ray-end", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()


def ray_processes() -> list[ProcessRecord]:
    """Return Ray's processes among the descendants of this one."""
    descendants = trees.descendants(os.getpid())
    return [process for process in descendants if process.name.startswith(_NAMES)]


@contextlib.contextmanager
def adopted_orphans() -> Iterator[None]:
    """Become the parent of descendants whose parent ends in the body (prctl(2)).

    The workers of a raylet that was killed stay visible and can be killed.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextlib.contextmanager
def preserved_signal_handlers() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM at the end.

    Ray installs a handler of SIGTERM below Python, which crashes the process.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def separate_sessions() -> Iterator[None]:
    """Start Ray's processes in separate sessions, in which SIGTERM and SIGHUP are blocked.

    A signal to this process's group or to every process of a job, or the end of its terminal, must
    not end them, since this process needs them to save a checkpoint. Slurm and systemd signal every
    process. Ray's processes handle SIGTERM, so it is blocked and not ignored; their children
    inherit the mask. They still end with this process: the kernel kills them
    when their parent has ended. Ray 2.54 to 2.60 requests that in `set_kill_on_parent_death_linux`,
    which `ray._private.services.start_ray_process` calls in the child before it executes Ray.

    Raises:
        RuntimeError: Ray's processes are in the process group of this one nevertheless.
    """
    from ray._private import utils

    ends_with_parent = utils.set_kill_on_parent_death_linux

    def in_own_session() -> None:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
        ends_with_parent()

    utils.set_kill_on_parent_death_linux = in_own_session
    try:
        yield
    finally:
        utils.set_kill_on_parent_death_linux = ends_with_parent
    shared = [
        process.name for process in trees.descendants(os.getpid()) if _is_ray_in_own_group(process)
    ]
    if shared:
        raise RuntimeError(
            f"Ray {ray.__version__} starts {', '.join(shared)} in the group of this process; "
            "its startup code has changed"
        )


def _is_ray_in_own_group(process: ProcessRecord) -> bool:
    with contextlib.suppress(ProcessLookupError):
        return process.name in _DAEMONS and os.getpgid(process.pid) == os.getpgid(0)
    return False


@contextlib.contextmanager
def ray_settings(
    token: Path | str, *, loopback: bool, tls: state.TlsFiles | None = None
) -> Iterator[None]:
    """Set Ray's process-wide settings for one session.

    They set the token and TLS, disable usage statistics, keep loopback addresses, and reduce the
    background work of a Ray that starts now.
    """
    from ray._private import ray_constants, worker
    from ray._raylet import AuthenticationTokenLoader, Config  # pyright: ignore[reportAttributeAccessIssue]

    settings = {
        **state.token_environment(token),
        **state.tls_environment(tls),
        **state.startup_wait_environment(),
        **state.priority_environment(),
        **{name: os.environ.get(name, value) for name, value in _BACKGROUND_SETTINGS.items()},
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray would end this process after a minute without its control store, before `ray_loss`.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "180",
    }
    settings["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    names = {*settings, "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"}
    before = {name: os.environ.pop(name, None) for name in names}
    multi_machine = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(settings)
    # Ray read both when it was imported. Without this, it replaces 127.0.0.1 by the machine's
    # external address.
    ray_constants.ENABLE_RAY_CLUSTER = multi_machine and not loopback
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
    show = worker.print_to_stdstream
    worker.print_to_stdstream = partial(_show_worker_output, show)
    try:
        yield
    finally:
        worker.print_to_stdstream = show
        ray_constants.ENABLE_RAY_CLUSTER = multi_machine
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _show_worker_output(show: Callable[..., None], data: Mapping[str, Any], **options: Any) -> None:
    """Print the output of a worker, but only log what Ray reports about its own processes.

    The loss of a worker or of Ray is described in msrl's messages.
    """
    if data.get("pid") == "raylet":
        _LOG.info("Ray: %s", "\n".join(data["lines"]))
    else:
        show(data, **options)
