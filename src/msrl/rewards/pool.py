"""Pool of processes that run verifiers with a hard wall-clock limit per call.

A worker that exceeds the limit is killed (SIGKILL) and replaced, and so is a worker that crashed.
Only the running call fails: the other calls of its batch run again in another worker. If others
have killed the worker, so does the running call, at most three times.

Workers are plain processes with pipes instead of `multiprocessing` processes. They import neither
the parent's main module nor torch, start in a few tenths of a second, and work under Ray, in
threads and in interactive sessions.
"""

from __future__ import annotations

import os
import selectors
import sys
import threading
import time
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from msrl.errors import MsrlError
from msrl.processes.child import MAX_REPEATS, WorkerProcess
from msrl.processes.messages import READY, Frame
from msrl.rewards.worker import SCORED, Function, Setup

MAX_BATCH = 64
START_LIMIT_S = 120.0
DEFAULT_MEMORY_BYTES = 4 << 30
# Remaining calls of a function are skipped once its failed calls have used up this many time limits
# and it has returned no score.
MIN_LOST_LIMITS = 8
# Minimum cost of a crash as a share of the time limit, because a new process must start.
CRASH_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Call:
    """Call of function number `function` of the pool on one response.

    `images` are the files of the images of the prompt.
    """

    function: int
    response: str
    answer: str
    extra: Mapping[str, str] = field(default_factory=dict[str, str])
    images: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CallResult:
    """Score of a call, or the kind of its failure with the end of the traceback in `detail`.

    A `skipped` call was not made because its function failed too often without returning a score.
    """

    score: float | None
    failure: Literal["timeout", "crash", "error", "skipped"] | None = None
    detail: str = ""


class Pool:
    """Context manager of `num_workers` processes that run `functions`.

    `memory_bytes` limits the address space of each process beyond the size of its loaded functions;
    0 disables the limit. Calls from several threads run one after another. A call fails in one of
    these ways:

    - "timeout": it exceeded the `timeout_s` of its function.
    - "crash": its process died, for example by a segmentation fault, or was killed repeatedly.
    - "error": it raised an exception, including MemoryError.
    - "skipped": the failed calls of the function in this `map` used up several time limits without
      one score, so its remaining calls are not made. Otherwise a function that hangs on every call
      would take hours.
    """

    def __init__(
        self,
        functions: Sequence[Function],
        num_workers: int,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        self._setup = Setup(tuple(functions), tuple(sys.path), memory_bytes)
        self._lock = threading.Lock()
        self._workers = [_Worker(self._setup) for _ in range(num_workers)]
        self._finalizer = weakref.finalize(self, _close_all, self._workers, os.getpid())

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Wait until all workers have loaded their functions. `map` does not require this call.

        Raises:
            MsrlError: A user's file cannot be loaded.
        """
        with self._lock:
            try:
                _MapRun((), self._workers, self._setup).start()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Kill and reap all workers. Repeated calls have no effect."""
        self._finalizer()

    def map(self, calls: Iterable[Call]) -> tuple[CallResult, ...]:
        """Make the calls and return their results in the same order.

        An interruption or a worker that cannot start closes the pool.

        Raises:
            RuntimeError: The pool is closed, or a worker cannot start.
            MsrlError: A user's file cannot be loaded.
        """
        with self._lock:
            if not self._finalizer.alive:
                raise RuntimeError("this pool of verifiers is closed")
            try:
                return _MapRun(tuple(calls), self._workers, self._setup).run()
            except BaseException:  # for example Ctrl-C: workers would keep unread answers
                self.close()
                raise


class _Worker(WorkerProcess):
    """Worker process with its pending calls, of which the first one is running."""

    def __init__(self, setup: Setup) -> None:
        self.pending: deque[int] = deque()
        self.ready = False
        self.since = time.monotonic()  # time of the start, the last answer or the last submission
        super().__init__("msrl.rewards.worker", setup, setup.path)

    def submit(self, numbers: Sequence[int], calls: Sequence[Call]) -> None:
        self.pending.extend(numbers)
        self.since = time.monotonic()
        self.send([(c.function, c.response, c.answer, c.extra, c.images) for c in calls])

    def receive(self) -> list[Frame] | None:
        """Return the new frames (kind, score, detail), or None at the end of the output."""
        messages = super().receive()
        if messages is not None:
            self.since = time.monotonic()
        return messages


class _MapRun:
    """Execution of one `Pool.map`: submits calls in batches, collects results, replaces workers."""

    def __init__(self, calls: Sequence[Call], workers: list[_Worker], setup: Setup) -> None:
        self.calls = calls
        self.workers = workers
        self.setup = setup
        self.waiting = deque(range(len(calls)))
        self.results: dict[int, CallResult] = {}
        self.batch = max(1, min(MAX_BATCH, -(-len(calls) // (4 * len(workers)))))
        self.max_lost_limits = max(MIN_LOST_LIMITS, 2 * len(workers))
        self.lost_s: dict[int, float] = defaultdict(float)  # seconds of failed calls by function
        self.scored: set[int] = set()  # functions that returned a score
        self.stopped: set[int] = set()  # functions whose remaining calls are skipped
        self.repeats: Counter[int | None] = Counter()  # by call whose worker was killed, or start
        self.selector = selectors.DefaultSelector()

    def run(self) -> tuple[CallResult, ...]:
        with self.selector:
            self._register()
            while len(self.results) < len(self.calls):
                self._step()
        return tuple(self.results[number] for number in range(len(self.calls)))

    def start(self) -> None:
        """Wait until all workers are ready."""
        with self.selector:
            self._register()
            while not all(worker.ready for worker in self.workers):
                self._receive()

    def _register(self) -> None:
        for number, worker in enumerate(self.workers):
            self.selector.register(worker, selectors.EVENT_READ, number)

    def _step(self) -> None:
        for worker in self.workers:
            self._feed(worker)
        if len(self.results) < len(self.calls):
            self._receive()
            self._stop_running_calls()

    def _receive(self) -> None:
        """Wait for answers, the end of a worker or a time limit, and handle them."""
        limits = [self._deadline(worker) for worker in self.workers]
        now = time.monotonic()  # before the answers are read: a late reader loses no answer
        events = self.selector.select(min(max(0.0, min(limits) - now), START_LIMIT_S))
        ready = {key.data for key, _ in events}
        for number in ready:
            self._collect(number)
        for number, worker in enumerate(self.workers):
            if number not in ready and self._deadline(worker) <= now:
                self._handle_timeout(number)

    def _feed(self, worker: _Worker) -> None:
        if worker.ready and not worker.pending and self.waiting and worker.process.poll() is None:
            numbers = self._next_batch()
            if numbers:
                worker.submit(numbers, [self.calls[n] for n in numbers])

    def _next_batch(self) -> list[int]:
        """Return the numbers of the next calls; record calls of stopped functions as skipped."""
        numbers: list[int] = []
        while self.waiting and len(numbers) < self.batch:
            number = self.waiting.popleft()
            if self.calls[number].function in self.stopped:
                detail = "not called: earlier calls failed and took too long"
                self.results[number] = CallResult(None, "skipped", detail)
            else:
                numbers.append(number)
        return numbers

    def _record(self, number: int, result: CallResult, seconds: float) -> None:
        """Store a result, and stop a function whose failed calls took too long without a score."""
        self.results[number] = result
        function = self.calls[number].function
        if result.score is not None:
            self.scored.add(function)
            return
        self.lost_s[function] += seconds
        limit_s = self.max_lost_limits * self.setup.functions[function].timeout_s
        if function not in self.scored and self.lost_s[function] >= limit_s:
            self.stopped.add(function)

    def _stop_running_calls(self) -> None:
        """Replace workers with pending calls of a stopped function; their other calls run again."""
        if not self.stopped:
            return
        for number, worker in enumerate(self.workers):
            if any(self.calls[n].function in self.stopped for n in worker.pending):
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
            self._handle_crash(number)
            return
        seconds = (worker.since - since) / max(1, len(messages))
        for kind, score, detail in messages:
            if kind == READY:
                worker.ready = True
            elif not worker.ready:
                raise MsrlError(detail)
            elif kind == SCORED:
                self._record(worker.pending.popleft(), CallResult(score), seconds)
            else:
                self._record(worker.pending.popleft(), CallResult(None, "error", detail), seconds)

    def _handle_timeout(self, number: int) -> None:
        worker = self.workers[number]
        if not worker.ready:
            raise self._start_error(f"did not start within {START_LIMIT_S:g} s")
        function = self.setup.functions[self.calls[worker.pending[0]].function]
        result = CallResult(None, "timeout", f"no answer within {function.timeout_s:g} s")
        self._fail(number, result, function.timeout_s)

    def _handle_crash(self, number: int) -> None:
        """Replace a worker that died. Its running call fails, or is repeated if it was killed."""
        worker = self.workers[number]
        running = worker.pending[0] if worker.pending else None
        if worker.was_killed() and self.repeats[running] < MAX_REPEATS:
            self.repeats[running] += 1
            return self._replace(number)
        if not worker.ready:
            raise self._start_error(f"ended with exit code {worker.exit_code()} while it started")
        result = CallResult(None, "crash", "the process of the verifier died")
        return self._fail(number, result, time.monotonic() - worker.since)

    def _start_error(self, problem: str) -> Exception:
        """Return the error for a worker that does not start, probably due to a user's file."""
        files = [function.file for function in self.setup.functions if function.file is not None]
        if files:
            return MsrlError(
                f"reward.sources: {', '.join(files)}: the process that loads this file {problem}. "
                "Check that the file can be imported."
            )
        return RuntimeError(f"a verifier process {problem}; see its traceback above")

    def _fail(self, number: int, result: CallResult, seconds: float) -> None:
        """Record the failure of a worker's running call, and replace the worker."""
        worker = self.workers[number]
        if worker.pending:
            call = worker.pending.popleft()
            limit_s = self.setup.functions[self.calls[call].function].timeout_s
            self._record(call, result, max(seconds, CRASH_SHARE * limit_s))
        self._replace(number)

    def _replace(self, number: int) -> None:
        """Replace a worker and move its pending calls to the front of the queue."""
        worker = self.workers[number]
        self.selector.unregister(worker)
        worker.kill()
        self.waiting.extendleft(reversed(worker.pending))
        self.workers[number] = _Worker(self.setup)
        self.selector.register(self.workers[number], selectors.EVENT_READ, number)


def _close_all(workers: Sequence[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # a fork inherits these objects, but the workers are not its children
        for worker in workers:
            worker.kill()
