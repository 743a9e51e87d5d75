"""Thread of an `EnvironmentPool`: it owns the fork server and the channels of all episodes."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, get_args

from msrl.environments.base import EpisodeFault, FaultReason, Opening, StepResult
from msrl.environments.clean import clean_value
from msrl.environments.episode_process import FAULT, EpisodeSetup
from msrl.errors import MsrlError
from msrl.processes.child import MAX_REPEATS
from msrl.processes.fork_server import EXITED, START_LIMIT_S, ForkServerClient
from msrl.processes.messages import MAX_DETAIL_BYTES, READY, FrameReader, FrameTooLongError
from msrl.types import Message

_SERVER = "msrl.environments.fork_server"
KILL_LIMIT_S = 10.0  # from a kill to the report of the fork server
Reply = Opening | StepResult | EpisodeFault


@dataclass(slots=True)
class EpisodeState:
    """Episode with its channel to the process, if it has one, and its running call."""

    number: int
    timeout_s: float
    channel: socket.socket | None = None
    frames: FrameReader | None = None
    unsent: bytearray = field(default_factory=bytearray)
    future: Future[Any] | None = None  # of the waiting or running call
    is_running: bool = False
    is_opening: bool = False
    is_dying: bool = False  # killed, and not yet reported by the fork server
    deadline: float = float("inf")
    fault: EpisodeFault | None = None
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class CallRequest:
    """Request of a caller to the thread of the pool."""

    kind: str
    future: Future[Any] | None
    episode: EpisodeState | None = None
    data: bytes = b""


class PoolLoop:
    """Thread that owns the fork server and all channels."""

    def __init__(self, setup: Callable[[int], EpisodeSetup], max_running: int) -> None:
        self.fault_counts: Counter[str] = Counter()
        self._make_setup, self._max_running = setup, max_running
        self._inbox: deque[CallRequest] = deque()
        self._waiting: deque[CallRequest] = deque()
        self._starting: list[Future[Any]] = []
        self._running: dict[int, EpisodeState] = {}
        self._known: dict[int, EpisodeState] = {}  # episodes with a process
        self._selector = selectors.DefaultSelector()
        self._wakeup, self._wake = socket.socketpair()
        self._server: ForkServerClient[EpisodeSetup] | None = None
        self._num_killed_starts = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        for end in (self._wakeup, self._wake):
            end.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, self._drain)

    def submit(self, command: CallRequest) -> None:
        """Hand a command to the thread.

        Raises:
            RuntimeError: The pool is stopped.
        """
        with self._lock:
            if self._is_stopped:
                raise RuntimeError("this pool of environments is stopped")
            self._inbox.append(command)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="environments", daemon=True)
                self._thread.start()
        self._notify()

    def stop(self) -> None:
        with self._lock:
            if self._is_stopped:
                return
            self._is_stopped = True
        self._notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake.send(b"x")

    def _run(self) -> None:
        try:
            while not self._is_stopped:
                self._step()
        finally:
            self._end()

    def _step(self) -> None:
        while self._inbox:
            self._accept(self._inbox.popleft())
        self._dispatch()
        now = time.monotonic()  # before the replies are read: a late reader loses no reply
        for key, events in self._selector.select(self._wait_s(now)):
            key.data(events)
        self._check_deadlines(now)

    def _end(self) -> None:
        """Cancel all calls and end all processes."""
        with self._lock:
            self._is_stopped = True
            commands = [*self._inbox, *self._waiting]
        futures = [command.future for command in commands]
        futures += [episode.future for episode in self._running.values()]
        for future in [*futures, *self._starting]:
            if future is not None:
                _cancel(future)
        for episode in self._known.values():
            self._hang_up(episode)
        if self._server is not None:
            self._server.stop()
        self._selector.close()
        self._wakeup.close()
        self._wake.close()

    def _accept(self, command: CallRequest) -> None:
        episode, future = command.episode, command.future
        if episode is None:
            assert future is not None
            return self._start(future)
        if command.kind == "close":
            return self._close(episode)
        assert future is not None
        if episode.fault is not None:
            return _resolve(future, episode.fault)
        if episode.future is not None or episode.is_closed:
            problem = "is closed" if episode.is_closed else "has a call that is not finished"
            return _resolve(future, ValueError(f"episode {episode.number} {problem}"))
        episode.future = future
        return self._waiting.append(command)

    def _start(self, future: Future[Any]) -> None:
        if self._server is not None and self._server.is_ready:
            return _resolve(future, None)
        self._starting.append(future)
        return self._require_server()

    def _require_server(self) -> None:
        if self._server is None:
            self._server = ForkServerClient(_SERVER, self._make_setup)
            self._selector.register(self._server.process, selectors.EVENT_READ, self._read_server)
            self._selector.register(self._server.control, selectors.EVENT_READ, self._read_control)

    def _dispatch(self) -> None:
        """Run waiting calls up to the limit."""
        if not self._waiting:
            return
        self._require_server()
        assert self._server is not None
        while self._server.is_ready and self._waiting and len(self._running) < self._max_running:
            command = self._waiting.popleft()
            if command.episode is not None and not command.episode.is_closed:
                self._send(command.episode, command)

    def _send(self, episode: EpisodeState, command: CallRequest) -> None:
        assert self._server is not None
        episode.is_running = True
        episode.is_opening = command.kind == "open"
        episode.deadline = time.monotonic() + episode.timeout_s
        self._running[episode.number] = episode
        if command.kind == "open":
            try:
                channel = self._server.open(episode.number)
            except OSError as error:
                return self._fail(episode, "crash", f"no process can be started: {error}")
            episode.channel = channel
            # A JSON text of the size limit, and the longest detail of a fault, fit.
            limit = self._server.setup.max_message_bytes + MAX_DETAIL_BYTES * 6
            episode.frames = FrameReader(limit)
            self._known[episode.number] = episode
            self._selector.register(
                channel, selectors.EVENT_READ, lambda events: self._transfer(episode, events)
            )
        episode.unsent += command.data
        return self._flush(episode)

    def _transfer(self, episode: EpisodeState, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(episode)
        if events & selectors.EVENT_READ and episode.channel is not None:
            self._read_episode(episode)

    def _flush(self, episode: EpisodeState) -> None:
        """Send what the channel accepts, and watch it if something is left."""
        if episode.channel is None:
            return
        try:
            sent = episode.channel.send(episode.unsent) if episode.unsent else 0
        except BlockingIOError:
            sent = 0
        except (BrokenPipeError, ConnectionResetError):
            return  # the end of the channel is read soon
        del episode.unsent[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if episode.unsent else 0)
        key = self._selector.get_key(episode.channel)
        if key.events != events:
            self._selector.modify(episode.channel, events, key.data)

    def _read_episode(self, episode: EpisodeState) -> None:
        assert episode.channel is not None and episode.frames is not None
        try:
            data = episode.channel.recv(1 << 16)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            data = b""
        if not data:
            return self._kill(episode, None)
        try:
            frames = episode.frames.feed(data)
        except FrameTooLongError as error:
            return self._fail(episode, "oversized", f"{error} bytes")
        for kind, _, detail in frames:
            self._receive(episode, kind, detail)
        return None

    def _receive(self, episode: EpisodeState, kind: int, detail: str) -> None:
        if not episode.is_running:
            return self._fail(episode, "invalid", "the process of the environment sent no reply")
        try:
            value = clean_value(json.loads(detail))
            reply = _decode(kind, value, is_opening=episode.is_opening)
        except (ValueError, OverflowError, KeyError, TypeError, RecursionError) as error:
            return self._fail(episode, "invalid", f"unreadable reply: {error!r}")
        if isinstance(reply, EpisodeFault):
            return self._fail(episode, reply.reason, reply.detail)
        return self._finish(episode, reply)

    def _finish(self, episode: EpisodeState, reply: Reply) -> None:
        """Return the reply of a call."""
        self._running.pop(episode.number, None)
        episode.is_running = False
        episode.deadline = float("inf")
        future, episode.future = episode.future, None
        if future is not None:
            _resolve(future, reply)

    def _fail(self, episode: EpisodeState, reason: FaultReason, detail: str) -> None:
        """End an episode with a fault and kill its process."""
        fault = EpisodeFault(reason, detail)
        self._kill(episode, fault)

    def _kill(self, episode: EpisodeState, fault: EpisodeFault | None) -> None:
        """Kill a process. Without a fault, its end decides: see `_finish_episode`."""
        self._hang_up(episode)
        if self._server is not None and episode.number in self._known:
            self._server.kill(episode.number)
        if fault is not None:
            self._set_fault(episode, fault)
        elif not episode.is_dying:
            episode.is_dying = True
            episode.deadline = time.monotonic() + KILL_LIMIT_S
            self._running.setdefault(episode.number, episode)

    def _set_fault(self, episode: EpisodeState, fault: EpisodeFault) -> None:
        if episode.fault is None:
            episode.fault = fault
            if not episode.is_closed:
                self.fault_counts[fault.reason] += 1
        episode.is_dying = False
        self._finish(episode, episode.fault)

    def _hang_up(self, episode: EpisodeState) -> None:
        if episode.channel is not None:
            self._selector.unregister(episode.channel)
            episode.channel.close()
            episode.channel = None

    def _close(self, episode: EpisodeState) -> None:
        """End an episode: an idle environment closes itself, a running one is killed."""
        episode.is_closed = True
        future, episode.future = episode.future, None
        if future is not None:
            _cancel(future)
        self._hang_up(episode)
        if episode.is_running and self._server is not None:
            self._server.kill(episode.number)
        self._running.pop(episode.number, None)
        self._known.pop(episode.number, None)

    def _check_deadlines(self, now: float) -> None:
        """End calls whose time was over before the last replies were read, at `now`."""
        for episode in [e for e in self._running.values() if e.deadline <= now]:
            if episode.is_dying:
                self._set_fault(episode, EpisodeFault("crash", "the process cannot be killed"))
            else:
                self._fail(episode, "timeout", f"no reply within {episode.timeout_s:g} s")
        if self._server is not None and self._server.is_late(now):
            self._lose_server(f"did not start within {START_LIMIT_S:g} s")

    def _wait_s(self, now: float) -> float | None:
        deadlines = [episode.deadline for episode in self._running.values()]
        if self._server is not None and not self._server.is_ready:
            deadlines.append(self._server.deadline)
        if not deadlines:
            return None
        return max(0.0, min(deadlines) - now)

    def _read_server(self, _: int) -> None:
        """Read the first message of the fork server, or its end."""
        if self._server is None:  # lost in the same round of events
            return None
        frames = self._server.process.receive()
        if frames is None:
            code = self._server.process.exit_code()
            return self._lose_server(f"ended with exit code {code}")
        for kind, _number, detail in frames:
            if kind != READY:
                return self._lose_server(detail, MsrlError(detail))
            self._server.is_ready = True
            self._num_killed_starts = 0
            self._finish_start(None)
        return None

    def _finish_start(self, error: Exception | None) -> None:
        for future in self._starting:
            _resolve(future, error)
        self._starting.clear()

    def _read_control(self, _: int) -> None:
        if self._server is None:  # lost in the same round of events
            return
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while data := self._server.control.recv(EXITED.size):
                self._finish_episode(*EXITED.unpack(data))

    def _finish_episode(self, number: int, status: int) -> None:
        episode = self._known.pop(number, None)
        if episode is not None and episode.fault is None and not episode.is_closed:
            self._hang_up(episode)
            self._set_fault(episode, EpisodeFault(_exit_reason(status), _exit_text(status)))

    def _lose_server(self, problem: str, error: Exception | None = None) -> None:
        """End all episodes of a fork server that died; the next call starts another one.

        The start of a server that was killed is repeated. Otherwise, a server that never became
        ready fails the waiting calls too.
        """
        assert self._server is not None
        server, self._server = self._server, None
        was_killed = server.process.was_killed()
        for source in (server.process, server.control):
            self._selector.unregister(source)
        server.stop()
        lost = {**self._known, **self._running}
        self._known.clear()
        for episode in lost.values():
            self._hang_up(episode)
            self._set_fault(episode, EpisodeFault("lost", f"the fork server {problem}"))
        if server.is_ready:
            return
        if was_killed and self._num_killed_starts < MAX_REPEATS:
            self._num_killed_starts += 1
            self._require_server()
        else:
            self._refuse(error, f"the process that loads the environments {problem}")

    def _refuse(self, error: Exception | None, problem: str) -> None:
        """End the waiting calls: with the error of a user's file, else as lost."""
        remedy = "Look for the cause in the environment's file, or in the memory of the machine."
        self._finish_start(error or MsrlError(f"environment: {problem}. {remedy}"))
        while self._waiting:
            command = self._waiting.popleft()
            assert command.episode is not None and command.future is not None
            command.episode.future = None
            _resolve(command.future, error or EpisodeFault("lost", problem))

    def _drain(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(4096)


def _resolve(future: Future[Any], value: object) -> None:
    """Set the result of a future, or its exception, unless its caller cancelled it."""
    with contextlib.suppress(InvalidStateError):
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)


def _cancel(future: Future[Any]) -> None:
    """Cancel a future and wake its waiters."""
    if not future.cancelled() and future.cancel():
        future.set_running_or_notify_cancel()


def _decode(kind: int, value: dict[str, Any], *, is_opening: bool) -> Reply:
    """Return the reply that a frame describes."""
    if kind == FAULT:
        if value["reason"] not in get_args(FaultReason):
            raise ValueError(f"unknown reason {value['reason']!r}")
        return EpisodeFault(value["reason"], str(value["detail"]))
    messages = [Message(m["role"], m["content"], m["fields"]) for m in value["messages"]]
    if is_opening:
        return Opening(messages, value["tools"], value["info"])
    return StepResult(messages, value["reward"], value["done"], value["info"])


def _exit_reason(status: int) -> FaultReason:
    """Return "lost" for a process that was killed by others, else "crash"."""
    was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGTERM)
    return "lost" if status >= 0 and was_killed else "crash"


def _exit_text(status: int) -> str:
    if status < 0:
        return f"the process of the environment cannot be forked: {os.strerror(-status)}"
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return f"the process of the environment was killed by {name}"
    return (
        f"the process of the environment ended with exit code {os.waitstatus_to_exitcode(status)}"
    )
