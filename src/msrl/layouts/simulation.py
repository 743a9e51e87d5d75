"""Simulation of synchronous, asynchronous and partial rollouts on a cluster.

The simulation moves from event to event: a response ends, a group is scored, an update ends. Which
groups start and which are trained is decided by the buffer and the admission of msrl
(`msrl/rollout/runtime`). A `SpeedModel` says how fast engines and updates are.

B groups per step, G samples per group, policy version v, staleness bound S.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from msrl.rollout.runtime.buffer import GroupBuffer, Ticket

_NEVER = math.inf


@dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """Log-normal distribution of response lengths in tokens, cut off at a limit."""

    name: str
    median: float
    sigma: float  # of the logarithm
    limit: int
    source: str

    @property
    def mean(self) -> float:
        """The mean length without the limit."""
        return self.median * math.exp(self.sigma**2 / 2)

    def draw(self, number: int, count: int) -> list[int]:
        """Return the lengths of the samples of a group, which depend only on its number."""
        random = np.random.Generator(np.random.Philox(key=number))
        draws = self.median * np.exp(self.sigma * random.standard_normal(count))
        return np.clip(draws, 1, self.limit).astype(int).tolist()


class LengthSource(Protocol):
    """LogNormalLengths of responses in tokens."""

    @property
    def name(self) -> str: ...

    @property
    def mean(self) -> float: ...

    def draw(self, number: int, count: int) -> list[int]:
        """Return the lengths of the samples of a group, which depend only on its number."""
        ...


class SpeedModel(Protocol):
    """SpeedModel of an engine and of an update."""

    @property
    def max_running(self) -> int:
        """Largest number of sequences that an engine runs at the same time."""
        ...

    @property
    def transfer_s(self) -> float:
        """Seconds of a transfer of new weights to the engines."""
        ...

    def token_s(self, num_running: int, context: float) -> float:
        """Return the seconds of one token of every running sequence of an engine."""
        ...

    def prefill_s(self, tokens: float) -> float:
        """Return the seconds in which an engine computes keys and values of known tokens."""
        ...

    def update_s(self, tokens: float, num_devices: int) -> float:
        """Return the seconds of an update on so many training devices."""
        ...


@dataclass(frozen=True, slots=True)
class Mode:
    """Schedule of generation and training.

    Attributes:
        name: Name in tables.
        staleness: Staleness bound.
        is_separate: True if engines and trainer have separate devices.
        is_partial: True if engines keep unfinished responses while the policy trains.
    """

    name: str
    staleness: int
    is_separate: bool = False
    is_partial: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, samples and rewards of a step; the first steps are not measured."""

    lengths: LengthSource
    prompts: int = 64
    samples: int = 8
    reward_s: float = 1.0
    num_steps: int = 40
    num_warmup_steps: int = 8
    prompt_tokens: float = 0.0  # that an engine computes once per group


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of a simulation. Idle fractions are of the devices of each side."""

    num_engines: int
    step_s: float
    tokens_per_s: float
    trainer_idle: float
    engine_idle: float
    device_idle: float  # of all devices
    staleness: float
    max_staleness: int
    recomputed: float  # share of the generated tokens


class SimulatedEngine:
    """Engine that gives one token after the other to all its running sequences.

    `_progress` counts the tokens that a sequence which runs from the beginning would have.
    """

    def __init__(self, speeds: SpeedModel, context: float) -> None:
        self._speeds, self._context = speeds, context
        self._progress = self._now = self._stalled_until = 0.0
        self._running: list[tuple[float, float, int]] = []  # (end, start, group) by progress
        self._waiting: deque[tuple[int, int]] = deque()  # (length, group)
        self.is_paused = False
        self.busy_s = 0.0

    @property
    def load(self) -> int:
        return len(self._running) + len(self._waiting)

    def add(self, length: int, group: int) -> None:
        self._waiting.append((length, group))
        self._admit()

    def prefill(self, tokens: float) -> None:
        """Stop for the keys and values of new prompts."""
        start = max(self._stalled_until, self._now)
        self._stalled_until = start + self._speeds.prefill_s(tokens)

    def next_end(self) -> float:
        """Return the time at which the next sequence ends."""
        if self.is_paused or not self._running:
            return _NEVER
        start = max(self._now, self._stalled_until)
        return start + (self._running[0][0] - self._progress) * self._token_s()

    def advance(self, now: float) -> None:
        """Generate until `now`, before which no sequence ends."""
        if self._running and not self.is_paused:
            start = max(self._now, min(self._stalled_until, now))
            self._progress += (now - start) / self._token_s()
            self.busy_s += now - self._now
        self._now = now

    def pop(self) -> int:
        """Remove the sequence that ends now; return its group."""
        end, _, group = heapq.heappop(self._running)
        self._progress = end
        self._admit()
        return group

    def load_weights(self) -> float:
        """Stop for new weights and for the keys of running sequences; return their tokens."""
        tokens = sum(self._progress - start for _, start, _ in self._running)
        seconds = self._speeds.transfer_s + self._speeds.prefill_s(tokens)
        self._stalled_until = max(self._stalled_until, self._now) + seconds
        return tokens

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._speeds.max_running:
            length, group = self._waiting.popleft()
            item = (self._progress + length, self._progress, group)
            heapq.heappush(self._running, item)

    def _token_s(self) -> float:
        return self._speeds.token_s(len(self._running), self._context)


@dataclass(slots=True)
class _Group:
    """Group in generation. `version` sampled its first tokens."""

    ticket: Ticket
    version: int
    tokens: int
    unfinished: int


@dataclass(slots=True)
class _Measured:
    """Sums over the measured steps."""

    start: float = 0.0
    tokens: int = 0
    training_s: float = 0.0
    engine_s: float = 0.0
    recomputed: float = 0.0
    staleness: list[int] = field(default_factory=list[int])


class Simulation:
    """One run of a mode with a number of engines, each on one device."""

    def __init__(
        self, speeds: SpeedModel, work: Workload, mode: Mode, num_engines: int, num_devices: int
    ) -> None:
        self._speeds, self._work, self._mode = speeds, work, mode
        self._num_devices = num_devices
        self._num_trainers = num_devices - (num_engines if mode.is_separate else 0)
        context = work.prompt_tokens + work.lengths.mean / 2
        self._engines = [SimulatedEngine(speeds, context) for _ in range(num_engines)]
        self._buffer = GroupBuffer[_Group](work.prompts, mode.staleness)
        self._groups = dict[int, _Group]()
        self._rewards = list[tuple[float, int]]()  # (time, group)
        self._training_ends = _NEVER
        self._ends = list[tuple[float, int, int]]()  # (time, engine, its number of changes)
        self._changes = [0] * num_engines
        self._now, self._version = 0.0, 0
        self._sums = _Measured()

    def run(self) -> SimulationResult:
        """Simulate all steps."""
        self._issue()
        while self._version < self._work.num_steps:
            self._next_event()
        return self._result()

    def _next_event(self) -> None:
        while self._ends and self._changes[self._ends[0][1]] != self._ends[0][2]:
            heapq.heappop(self._ends)  # the engine has changed since
        end = self._ends[0][0] if self._ends else _NEVER
        reward = self._rewards[0][0] if self._rewards else _NEVER
        self._now = min(end, reward, self._training_ends)
        if self._now == _NEVER:
            raise RuntimeError("the simulation waits for nothing")
        if self._now == self._training_ends:
            self._end_update()
        elif self._now == reward:
            _, number = heapq.heappop(self._rewards)
            group = self._groups.pop(number)
            self._buffer.add_scored(group.ticket, group)
        elif not self._end_sample(self._ends[0][1]):
            return  # the group still runs, so that the buffer has not changed
        self._issue()
        self._begin_update()

    def _engine(self, number: int) -> SimulatedEngine:
        """Return an engine, advanced to the present, whose next end will be computed again."""
        self._engines[number].advance(self._now)
        return self._engines[number]

    def _schedule(self, number: int) -> None:
        """Compute the next end of an engine that has changed."""
        self._changes[number] += 1
        end = self._engines[number].next_end()
        if end != _NEVER:
            heapq.heappush(self._ends, (end, number, self._changes[number]))

    def _issue(self) -> None:
        """Start the groups that the admission allows, each on the engine with the fewest."""
        for ticket in self._buffer.issue(self._version):
            lengths = self._work.lengths.draw(ticket.number, self._work.samples)
            group = _Group(ticket, self._version, sum(lengths), len(lengths))
            self._groups[ticket.number] = group
            loads = [engine.load for engine in self._engines]
            number = loads.index(min(loads))
            engine = self._engine(number)
            engine.prefill(self._work.prompt_tokens)
            for length in lengths:
                engine.add(length, ticket.number)
            self._schedule(number)

    def _end_sample(self, engine: int) -> bool:
        """End the next sample of an engine; return True if its group is generated."""
        number = self._engine(engine).pop()
        self._schedule(engine)
        group = self._groups[number]
        group.unfinished -= 1
        if group.unfinished:
            return False
        self._buffer.add_generated(group.ticket, group.version)
        heapq.heappush(self._rewards, (self._now + self._work.reward_s, number))
        return True

    def _begin_update(self) -> None:
        if self._training_ends != _NEVER or self._version == self._work.num_steps:
            return
        batch = self._buffer.take(self._version)
        if batch is None:
            return
        tokens = sum(item.group.tokens for item in batch)
        seconds = self._speeds.update_s(tokens, self._num_trainers)
        self._training_ends = self._now + seconds
        self._sums.tokens += tokens
        self._sums.training_s += seconds
        self._sums.staleness += [self._version - item.oldest_version for item in batch]
        if not self._mode.is_separate:
            for number in range(len(self._engines)):
                self._engine(number).is_paused = True
                self._schedule(number)

    def _end_update(self) -> None:
        self._training_ends = _NEVER
        self._version += 1
        for number in range(len(self._engines)):
            engine = self._engine(number)
            engine.is_paused = False
            self._sums.recomputed += engine.load_weights()
            self._schedule(number)
        if self._version == self._work.num_warmup_steps:
            self._sums = _Measured(start=self._now, engine_s=self._engine_s())

    def _result(self) -> SimulationResult:
        sums, seconds = self._sums, self._now - self._sums.start
        engine_s = self._engine_s() - sums.engine_s
        busy_s = engine_s + sums.training_s * self._num_trainers
        return SimulationResult(
            num_engines=len(self._engines),
            step_s=seconds / (self._work.num_steps - self._work.num_warmup_steps),
            tokens_per_s=sums.tokens / seconds,
            trainer_idle=_idle(sums.training_s, seconds),
            engine_idle=_idle(engine_s, seconds * len(self._engines)),
            device_idle=_idle(busy_s, seconds * self._num_devices),
            staleness=float(np.mean(sums.staleness)),
            max_staleness=max(sums.staleness),
            recomputed=sums.recomputed / sums.tokens,
        )

    def _engine_s(self) -> float:
        """Return the seconds in which engines were busy until now."""
        return sum(self._engine(number).busy_s for number in range(len(self._engines)))


def _idle(busy_s: float, total_s: float) -> float:
    return max(1 - busy_s / total_s, 0.0)  # sums of rounded times may exceed the total
