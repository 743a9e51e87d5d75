"""Processes that run verifiers, each call under a hard wall-clock limit.

A worker that does not answer in time is killed (SIGKILL) and replaced; so is one that crashed. The call it was at fails alone: the
others of its batch run again elsewhere. Workers are plain processes with pipes, not those of `multiprocessing`: they import neither
the parent's main module nor torch, start in a few tenths of a second, and work under Ray, in threads and in interactive sessions.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msrl.errors import MsrlError
from msrl.rewards import worker as protocol
from msrl.rewards.worker import HEADER, READY, SCORED, Function, Setup

MAX_BATCH = 64
START_LIMIT_S = 120.0
DEFAULT_MEMORY_BYTES = 4 << 30
MIN_LOST_LIMITS = 8  # time limits that a function may use up without one score before its remaining calls are skipped
CRASH_SHARE = 0.1  # of the time limit: the least that a crash counts, because a new process has to start


@dataclass(frozen=True, slots=True)
class Call:
    """Run function number `function` of the pool on one response."""

    function: int
    response: str
    answer: str
    extra: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class CallResult:
    """What became of a call: a score, or why there is none, with the end of the traceback in `detail`.

    `skipped`: the call was not made, because its function had failed too often without one score.
    """

    score: float | None
    failure: Literal["timeout", "crash", "error", "skipped"] | None = None
    detail: str = ""


class Pool:
    """`num_workers` processes that run `functions`; a context manager. `memory_bytes` limits each one's address space (0: no limit).

    A call that hits its function's `timeout_s` is a "timeout"; one whose process died (a segmentation fault, the kernel's
    out-of-memory killer) a "crash"; one that raised, MemoryError included, an "error". Calls from several threads take turns.

    A function that hangs on every call must not take hours: once the calls of one `map` have used up several time limits without one
    score, the remaining calls of this function are "skipped".
    """

    def __init__(self, functions: Sequence[Function], num_workers: int, *, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        self._setup = Setup(tuple(functions), tuple(sys.path), memory_bytes)
        self._lock = threading.Lock()
        self._workers = [_Worker(self._setup) for _ in range(num_workers)]
        self._finalizer = weakref.finalize(self, _close_all, self._workers, os.getpid())

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill and reap all workers. May be called again."""
        self._finalizer()

    def map(self, calls: Iterable[Call]) -> tuple[CallResult, ...]:
        """The outcomes in the order of the calls. An interruption closes the pool, as does a worker that cannot start
        (RuntimeError; MsrlError where a user's file is to blame)."""
        with self._lock:
            if not self._finalizer.alive:
                raise RuntimeError("this pool of verifiers is closed")
            try:
                return _Run(tuple(calls), self._workers, self._setup).result()
            except BaseException:  # Ctrl-C, say: workers must not be left with answers that nobody reads
                self.close()
                raise


class _Worker:
    """A process with the calls that it was given and has not answered (the first of them is running)."""

    def __init__(self, setup: Setup) -> None:
        command = [sys.executable, "-m", "msrl.rewards.worker"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in setup.path if p), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, start_new_session=True)
        self.pending: deque[int] = deque()
        self.ready = False
        self.since = time.monotonic()  # when it started, or last answered or was given calls
        self._received = bytearray()
        self._send(setup)

    def give(self, numbers: Sequence[int], calls: Sequence[Call]) -> None:
        self.pending.extend(numbers)
        self.since = time.monotonic()
        self._send([(c.function, c.response, c.answer, c.extra) for c in calls])

    def receive(self) -> list[tuple[int, float, str]] | None:
        """The messages (kind, score, detail) that have arrived since; None at the end of the output, which is the end of the process."""
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            return None
        self.since = time.monotonic()
        self._received += data
        return self._messages()

    def _messages(self) -> list[tuple[int, float, str]]:
        messages: list[tuple[int, float, str]] = []
        start = 0
        while len(self._received) >= start + HEADER.size:
            kind, score, length = HEADER.unpack_from(self._received, start)
            end = start + HEADER.size + length
            if len(self._received) < end:
                break
            messages.append((kind, score, self._received[start + HEADER.size : end].decode("utf-8", "replace")))
            start = end
        del self._received[:start]
        return messages

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def kill(self) -> None:
        """End it and what it started by force, close its pipes and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self.process.wait()

    def exit_code(self) -> int | None:
        """That of a process whose output has ended, so that it is about to; None if it still is not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout=5.0)
        return None

    def _send(self, message: object) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: its output ends too, which is where that is dealt with
            protocol.send(self.process.stdin, message)


class _Run:
    """One `map`: hands out calls in batches, collects answers, kills and replaces."""

    def __init__(self, calls: Sequence[Call], workers: list[_Worker], setup: Setup) -> None:
        self.calls = calls
        self.workers = workers
        self.setup = setup
        self.waiting = deque(range(len(calls)))
        self.outcomes: dict[int, CallResult] = {}
        self.batch = max(1, min(MAX_BATCH, -(-len(calls) // (4 * len(workers)))))
        self.max_lost_limits = max(MIN_LOST_LIMITS, 2 * len(workers))
        self.lost_s: dict[int, float] = defaultdict(float)  # by function: seconds of failed calls
        self.scored: set[int] = set()  # functions that have given a score
        self.hopeless: set[int] = set()  # functions whose remaining calls are skipped
        self.selector = selectors.DefaultSelector()

    def result(self) -> tuple[CallResult, ...]:
        with self.selector:
            for number, worker in enumerate(self.workers):
                self.selector.register(worker, selectors.EVENT_READ, number)
            while len(self.outcomes) < len(self.calls):
                self._step()
        return tuple(self.outcomes[number] for number in range(len(self.calls)))

    def _step(self) -> None:
        for worker in self.workers:
            self._feed(worker)
        if len(self.outcomes) == len(self.calls):
            return
        limits = [self._deadline(worker) for worker in self.workers]
        events = self.selector.select(min(max(0.0, min(limits) - time.monotonic()), START_LIMIT_S))
        now = time.monotonic()
        heard = {key.data for key, _ in events}
        for number in heard:
            self._collect(number)
        for number, worker in enumerate(self.workers):
            if number not in heard and self._deadline(worker) <= now:
                self._late(number)
        self._stop_hopeless_calls()

    def _feed(self, worker: _Worker) -> None:
        if worker.ready and not worker.pending and self.waiting and worker.process.poll() is None:
            numbers = self._next_batch()
            if numbers:
                worker.give(numbers, [self.calls[n] for n in numbers])

    def _next_batch(self) -> list[int]:
        """Return the next calls to make; calls of hopeless functions are skipped on the way."""
        numbers: list[int] = []
        while self.waiting and len(numbers) < self.batch:
            number = self.waiting.popleft()
            if self.calls[number].function in self.hopeless:
                self.outcomes[number] = CallResult(None, "skipped", "not called: the calls before it failed and took too long")
            else:
                numbers.append(number)
        return numbers

    def _record(self, number: int, outcome: CallResult, seconds: float) -> None:
        """Store an outcome. A function becomes hopeless when failed calls alone have used up `max_lost_limits` time limits."""
        self.outcomes[number] = outcome
        function = self.calls[number].function
        if outcome.score is not None:
            self.scored.add(function)
            return
        self.lost_s[function] += seconds
        limit_s = self.max_lost_limits * self.setup.functions[function].timeout_s
        if function not in self.scored and self.lost_s[function] >= limit_s:
            self.hopeless.add(function)

    def _stop_hopeless_calls(self) -> None:
        """Replace workers that still hold calls of a hopeless function; their other calls run again."""
        if not self.hopeless:
            return
        for number, worker in enumerate(self.workers):
            if any(self.calls[n].function in self.hopeless for n in worker.pending):
                self._replace(number)

    def _deadline(self, worker: _Worker) -> float:
        if not worker.ready:
            return worker.since + START_LIMIT_S
        if not worker.pending:
            return float("inf")
        return worker.since + self.setup.functions[self.calls[worker.pending[0]].function].timeout_s

    def _collect(self, number: int) -> None:
        worker = self.workers[number]
        since = worker.since
        messages = worker.receive()
        if messages is None:
            self._died(number)
            return
        seconds = (worker.since - since) / max(1, len(messages))
        for kind, score, detail in messages:
            if kind == READY:
                worker.ready = True
            elif not worker.ready:
                raise MsrlError(detail)
            else:
                outcome = CallResult(score) if kind == SCORED else CallResult(None, "error", detail)
                self._record(worker.pending.popleft(), outcome, seconds)

    def _late(self, number: int) -> None:
        worker = self.workers[number]
        if not worker.ready:
            raise RuntimeError(f"a process for verifiers did not start within {START_LIMIT_S:g} s")
        function = self.setup.functions[self.calls[worker.pending[0]].function]
        self._fail(number, CallResult(None, "timeout", f"no answer within {function.timeout_s:g} s"), function.timeout_s)

    def _died(self, number: int) -> None:
        worker = self.workers[number]
        if not worker.ready:
            raise RuntimeError(f"a process for verifiers ended at its start with exit code {worker.exit_code()}; see its traceback above")
        self._fail(number, CallResult(None, "crash", "the process of the verifier died"), time.monotonic() - worker.since)

    def _fail(self, number: int, outcome: CallResult, seconds: float) -> None:
        """Record the failure of the call that a worker was at, and replace the worker."""
        worker = self.workers[number]
        if worker.pending:
            call = worker.pending.popleft()
            limit_s = self.setup.functions[self.calls[call].function].timeout_s
            self._record(call, outcome, max(seconds, CRASH_SHARE * limit_s))
        self._replace(number)

    def _replace(self, number: int) -> None:
        """Start a new worker; the calls that the old one has not answered go to the front of the queue."""
        worker = self.workers[number]
        self.selector.unregister(worker)
        worker.kill()
        self.waiting.extendleft(reversed(worker.pending))
        self.workers[number] = _Worker(self.setup)
        self.selector.register(self.workers[number], selectors.EVENT_READ, number)


def _close_all(workers: Sequence[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # a fork of the owner has these objects too, but not these children
        for worker in workers:
            worker.kill()
