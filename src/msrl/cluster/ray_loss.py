"""Loss of Ray itself, which ends a run: of its control store, or of the node of this process.

Ray reacts to it by ending this process in native code, before the run can print a message. `check`
raises an error before that happens. It is called whenever this process calls Ray or waits for it. A
call of Ray that is running at the loss may never return: a thread then ends this process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

from msrl import temporary
from msrl.cluster import state
from msrl.cluster.probe import Address
from msrl.errors import ProcessFailedError
from msrl.limits import print_note

# Processes without which Ray cannot work, and their names in messages.
_CORE = {"gcs_server": "Ray's control store (gcs_server)", "raylet": "Ray's node (raylet)"}
_WITHOUT_CRASH = (0, -signal.SIGKILL, -signal.SIGTERM)  # exit codes
_ASK_EVERY_S, _CONNECT_S = 5.0, 3.0
_SILENCE_S = 60.0  # of the head; Ray gives up after the same time
_LOOK_EVERY_S, _GRACE_S = 1.0, 30.0  # time for this process to end by itself


class RayLostError(ProcessFailedError):
    """Ray was lost, and all workers with it. `is_crash` is True if its logs may show the reason."""

    def __init__(self, message: str, *, is_crash: bool = False) -> None:
        super().__init__(message)
        self.is_crash = is_crash


# Raises RayLostError if the Ray of the present session is lost. The argument is True after a
# failure, of which the loss may be the reason.
Finder = Callable[[bool], None]
_find: Finder | None = None
_describe: list[Callable[[RayLostError], str]] = []  # by the log of the run, if there is one


@contextlib.contextmanager
def described_by(describe: Callable[[RayLostError], str]) -> Iterator[None]:
    """Let `describe` return the message of a process that ends in a call of Ray, in the body."""
    _describe.append(describe)
    try:
        yield
    finally:
        _describe.remove(describe)


@contextlib.contextmanager
def ended_if_stuck(find: Finder, clean: Callable[[], None]) -> Iterator[None]:
    """End this process if the body does not end by itself after a loss. `clean` removes traces."""
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.wait(_LOOK_EVERY_S):
            try:
                find(False)
            except RayLostError as error:
                if not is_over.wait(_GRACE_S):
                    _end(error, clean)
                return

    threading.Thread(target=poll, name="msrl-ray-loss", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def _end(error: RayLostError, clean: Callable[[], None]) -> None:
    """Print the message of the run and end this process, whose other threads may be blocked."""
    try:
        text = _describe[-1](error) if _describe else str(error)
        print_note(text)
        clean()
    finally:
        os._exit(1)


def check(*, has_failed: bool = False) -> None:
    """Raise RayLostError if the Ray of the present session is lost."""
    if _find is not None:
        _find(has_failed)


@contextlib.contextmanager
def watch(find: Finder) -> Iterator[None]:
    """Let `check` call `find` in the body.

    Raises:
        RayLostError: The body failed, and Ray is lost.
    """
    global _find
    _find = find
    try:
        yield
    except RayLostError:
        raise
    except Exception:
        check(has_failed=True)
        raise
    finally:
        _find = None


def find_in_local_ray(_: bool) -> None:
    """Raise RayLostError if a core process of the local Ray has ended."""
    from ray._private import worker

    node = worker._global_node
    for kind, process in [] if node is None else node.dead_processes():
        if kind in _CORE:
            code: int = process.returncode
            end = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise RayLostError(
                f"{_CORE[kind]} ended with {end} (pid {process.pid}), and all workers with it",
                is_crash=code not in _WITHOUT_CRASH,
            )


class ClusterWatch:
    """Finder of the loss of a cluster: of its head, or of its node on this machine."""

    def __init__(self, head: Address, host: str) -> None:
        """Watch the cluster of `head`, to which this process connects through the node `host`."""
        self._head, self._answered, self._asked = head, time.monotonic(), 0.0
        self._node = [
            process
            for _, record in state.load_records()
            if record.here and (record.address, record.host) == (str(head), host)
            for process in record.processes
            if process.name in _CORE
        ]

    def __call__(self, has_failed: bool) -> None:
        """Raise RayLostError if the cluster is lost. The head is asked every few seconds."""
        for process in self._node:
            if not temporary.is_running(process):
                raise self._error(f"{_CORE[process.name]} has ended on this machine")
        now = time.monotonic()
        if has_failed or now - self._asked >= _ASK_EVERY_S:
            self._asked = now
            self._ask(now)

    def _ask(self, now: float) -> None:
        try:
            socket.create_connection((self._head.host, self._head.port), _CONNECT_S).close()
        except ConnectionRefusedError:
            raise self._error("its head has ended") from None
        except OSError as error:
            if now - self._answered > _SILENCE_S:
                silence = f"its head has not answered for {_SILENCE_S:g} s ({error})"
                raise self._error(silence) from None
        else:
            self._answered = now

    def _error(self, problem: str) -> RayLostError:
        return RayLostError(
            f"cluster {self._head}: {problem}. Start it again on all machines (msrl cluster down, "
            "then up and join), and resume the run"
        )
