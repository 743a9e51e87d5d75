"""Process that forks one process per episode, started as `python -m msrl.environments.fork_server`.

It loads all environments once. Its control socket carries the messages of `protocol.py`. It kills
all episodes when that socket closes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from msrl import registry
from msrl.environments.base import EnvironmentSource
from msrl.environments.episode_process import EpisodeSetup, Factory, detach, serve_episode
from msrl.environments.protocol import COMMAND, EXITED, OPEN
from msrl.environments.tools import prepare_tools, tool_format
from msrl.errors import MsrlError
from msrl.http_requests import without_loopback_proxy
from msrl.processes.messages import MAX_DETAIL_BYTES, READY, error_frame, frame, read
from msrl.processes.parent import end_with_parent, leave_signals_to_parent
from msrl.user_files import NotLoadedError, load_function


def main() -> None:
    """Load the environments, then fork and reap the processes of episodes."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    leave_signals_to_parent()
    setup: EpisodeSetup = read(source)
    sys.path[:] = setup.path
    os.environ.update(without_loopback_proxy(os.environ))
    try:
        factories = {name: _load(name, source) for name, source in setup.sources.items()}
        if setup.tool_format:
            tool_format(setup.tool_format)
    except (NotLoadedError, MsrlError) as error:
        sink.write(error_frame(str(error)))
        return
    sink.write(frame(READY))
    gc.freeze()  # pages that collections do not write stay shared with the forks
    with socket.socket(fileno=setup.control_fd) as control:
        _ForkServer(control, factories, setup, sink.fileno()).serve()


def _load(name: str, source: EnvironmentSource) -> Factory:
    """Return the constructor of an environment with its options, after `prepare` of its module.

    Raises:
        NotLoadedError: A user's file cannot be executed, or the options do not fit.
    """
    target, module = _target(name, source)
    try:
        constructor = target.__init__ if isinstance(target, type) else target
        key = f"environment.{name}.options"
        registry.check_options(constructor, source.options, key=key, with_required=True)
        prepare: Callable[..., None] | None = getattr(module, "prepare", None)
        if prepare is not None:
            prepare(**source.options)
        if not source.path:  # the constructors of built-in environments check their options
            prepare_tools(type(target(**source.options)))
        elif isinstance(target, type):
            prepare_tools(target)
    except Exception as error:
        if isinstance(error, MsrlError):
            raise NotLoadedError(str(error)) from error
        detail = traceback.format_exc(limit=-2)[-MAX_DETAIL_BYTES:]
        raise NotLoadedError(f"environment {name}: cannot be prepared: {detail}") from error
    return partial(target, **source.options)


def _target(name: str, source: EnvironmentSource) -> tuple[Callable[..., Any], object]:
    """Return the callable that creates an environment, and its module."""
    if not source.path:
        module = importlib.import_module(f"{registry.ENVIRONMENTS}.{source.name}")
        return module.environment, module
    file, _, attribute = source.path.rpartition(":")
    module_name = f"msrl_environment_{name}"
    target = load_function(file, module_name, attribute)
    return target, sys.modules[module_name]


class _ForkServer:
    """Processes of the open episodes by number."""

    def __init__(
        self,
        control: socket.socket,
        factories: Mapping[str, Factory],
        setup: EpisodeSetup,
        sink_fd: int,
    ) -> None:
        self._control, self._factories, self._setup = control, factories, setup
        self._sink_fd, self._pid = sink_fd, os.getpid()
        self._pids: dict[int, int] = {}
        self._exited: deque[tuple[int, int]] = deque()
        self._wakeup, wake = socket.socketpair()
        wake.setblocking(False)
        self._wakeup.setblocking(False)
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        try:
            while self._step():
                pass
        finally:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number in list(self._pids):
                self._kill(number)

    def _step(self) -> bool:
        """Wait for a command or the end of a process; return False at the end of the input."""
        writers = [self._control] if self._exited else []
        readable, writable, _ = select.select([self._control, self._wakeup], writers, [])
        if self._wakeup in readable:
            with contextlib.suppress(BlockingIOError):
                self._wakeup.recv(4096)
        self._reap()
        if writable:
            self._report()
        return self._control not in readable or self._command()

    def _command(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, COMMAND.size, 1)
        if not data:
            return False
        kind, number = COMMAND.unpack(data)
        if kind == OPEN:
            with socket.socket(fileno=descriptors[0]) as channel:
                self._fork(number, channel)
        elif number in self._pids:
            self._kill(number)
        return True

    def _fork(self, number: int, channel: socket.socket) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._exited.append((number, -(error.errno or 1)))
            return
        if pid:
            self._pids[number] = pid
            return
        try:
            self._become_episode()
            serve_episode(channel, self._factories, self._setup)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the parent closed the episode
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)

    def _become_episode(self) -> None:
        """Leave everything that belongs to the fork server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self._control, self._wakeup, self._wake):
            descriptor.close()
        os.close(self._sink_fd)
        end_with_parent(self._pid)
        detach()

    def _kill(self, number: int) -> None:
        """Kill a process and its session. The parent is informed when it is reaped."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pids[number], signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pids[number], signal.SIGKILL)

    def _reap(self) -> None:
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        for number, pid in list(self._pids.items()):
            if os.waitid(os.P_PID, pid, flags) is not None:
                self._kill(number)  # children of the process, before its id becomes free
                _, status = os.waitpid(pid, 0)
                del self._pids[number]
                self._exited.append((number, status))

    def _report(self) -> None:
        while self._exited:
            message = EXITED.pack(*self._exited[0])
            try:
                self._control.send(message, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            self._exited.popleft()


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        main()
