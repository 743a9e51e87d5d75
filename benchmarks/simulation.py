"""Simulation of synchronous, asynchronous and partial rollouts on a cluster.

The simulation moves from event to event: a response ends, a group is scored, an update ends. Which
groups start and which are trained is decided by the buffer and the admission of msrl
(`msrl/rollout/runtime`). The devices are models: an engine spends the time to read its weights, and
the keys and values of its responses, on every token; an update spends the FLOPs of its tokens.

B groups per step, G samples per group, policy version v, staleness bound S.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from msrl.rollout.runtime.buffer import GroupBuffer, Ticket

_NEVER = math.inf


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal distribution of response lengths in tokens, cut off at a limit."""

    name: str
    median: float
    sigma: float  # of the logarithm
    limit: int
    source: str

    def draw(self, number: int, count: int) -> list[int]:
        """Return the lengths of the samples of a group, which depend only on its number."""
        random = np.random.Generator(np.random.Philox(key=number))
        draws = self.median * np.exp(self.sigma * random.standard_normal(count))
        return np.clip(draws, 1, self.limit).astype(int).tolist()


LENGTHS = (
    Lengths(
        "GSM8K",
        median=452,
        sigma=0.266,
        limit=1_024,
        source="mean 468 and standard deviation 127 tokens (TAUR-dev/trace_analysis_2)",
    ),
    Lengths(
        "DAPO",
        median=3_000,
        sigma=0.9,
        limit=20_480,
        source="limit of arXiv:2503.14476; median and spread are assumptions",
    ),
    Lengths(
        "long tail",
        median=500,
        sigma=math.log(10) / 2.326,
        limit=16_384,
        source="median 500 and 99th percentile 5,000 tokens; the limit is an assumption",
    ),
)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices and model. The defaults are 16 devices of the class of Ascend 910B and 7B weights."""

    num_devices: int = 16
    memory_bytes_per_s: float = 1.6e12
    flops: float = 354e12
    utilization: float = 0.4  # of the FLOPs, in updates and prefills
    parameters: float = 7e9
    kv_bytes_per_token: float = 57_344  # 28 layers, 4 groups of 128 channels, 2 bytes
    max_running: int = 256  # sequences of one engine
    transfer_s: float = 1.0  # of new weights to the engines

    def token_s(self, num_running: int, context: float) -> float:
        """Return the seconds of one token of every running sequence of an engine."""
        read = 2 * self.parameters + num_running * context * self.kv_bytes_per_token
        return read / self.memory_bytes_per_s

    def prefill_s(self, tokens: float) -> float:
        return 2 * self.parameters * tokens / (self.flops * self.utilization)

    def update_s(self, tokens: float, num_devices: int) -> float:
        """Return the seconds of log-probabilities (2 FLOPs) and an update (6) per parameter."""
        return 8 * self.parameters * tokens / (self.flops * self.utilization * num_devices)


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


MODES = (
    Mode("synchronous", 0),
    Mode("partial, S = 1", 1, is_partial=True),
    Mode("partial, S = 4", 4, is_partial=True),
    Mode("S = 1", 1, is_separate=True),
    Mode("S = 2", 2, is_separate=True),
    Mode("S = 4", 4, is_separate=True),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, samples and rewards of a step; the first steps are not measured."""

    lengths: Lengths
    prompts: int = 64
    samples: int = 8
    reward_s: float = 1.0
    num_steps: int = 40
    num_warmup_steps: int = 8


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of a simulation. Idle fractions are of the devices of each side."""

    num_engines: int
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

    def __init__(self, cluster: Cluster, context: float) -> None:
        self._cluster, self._context = cluster, context
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
        seconds = self._cluster.transfer_s + self._cluster.prefill_s(tokens)
        self._stalled_until = max(self._stalled_until, self._now) + seconds
        return tokens

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._cluster.max_running:
            length, group = self._waiting.popleft()
            item = (self._progress + length, self._progress, group)
            heapq.heappush(self._running, item)

    def _token_s(self) -> float:
        return self._cluster.token_s(len(self._running), self._context)


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

    def __init__(self, cluster: Cluster, work: Workload, mode: Mode, num_engines: int) -> None:
        self._cluster, self._work, self._mode = cluster, work, mode
        self._num_trainers = cluster.num_devices - (num_engines if mode.is_separate else 0)
        context = work.lengths.median * math.exp(work.lengths.sigma**2 / 2) / 2
        self._engines = [SimulatedEngine(cluster, context) for _ in range(num_engines)]
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
        else:
            self._end_sample(self._ends[0][1])
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
            for length in lengths:
                engine.add(length, ticket.number)
            self._schedule(number)

    def _end_sample(self, engine: int) -> None:
        number = self._engine(engine).pop()
        self._schedule(engine)
        group = self._groups[number]
        group.unfinished -= 1
        if not group.unfinished:
            self._buffer.add_generated(group.ticket, group.version)
            heapq.heappush(self._rewards, (self._now + self._work.reward_s, number))

    def _begin_update(self) -> None:
        if self._training_ends != _NEVER or self._version == self._work.num_steps:
            return
        batch = self._buffer.take(self._version)
        if batch is None:
            return
        tokens = sum(item.group.tokens for item in batch)
        seconds = self._cluster.update_s(tokens, self._num_trainers)
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
            tokens_per_s=sums.tokens / seconds,
            trainer_idle=_idle(sums.training_s, seconds),
            engine_idle=_idle(engine_s, seconds * len(self._engines)),
            device_idle=_idle(busy_s, seconds * self._cluster.num_devices),
            staleness=float(np.mean(sums.staleness)),
            max_staleness=max(sums.staleness),
            recomputed=sums.recomputed / sums.tokens,
        )

    def _engine_s(self) -> float:
        """Return the seconds in which engines were busy until now."""
        return sum(self._engine(number).busy_s for number in range(len(self._engines)))


def _idle(busy_s: float, total_s: float) -> float:
    return max(1 - busy_s / total_s, 0.0)  # sums of rounded times may exceed the total


def best(cluster: Cluster, work: Workload, mode: Mode) -> SimulationResult:
    """Return the result with the number of engines that has the highest throughput."""
    counts: Sequence[int] = (cluster.num_devices,)
    step = max(cluster.num_devices // 8, 1)
    if mode.is_separate:
        counts = range(max(cluster.num_devices // 8, 1), cluster.num_devices, step)
    runs = (Simulation(cluster, work, mode, count).run() for count in counts)
    return max(runs, key=lambda result: result.tokens_per_s)


def table(cluster: Cluster, works: Sequence[Workload]) -> Iterator[str]:
    """Yield the lines of a Markdown table of all modes."""
    yield (
        "| lengths | mode | engines of the devices | tokens/s | of synchronous | trainer idle | "
        "engines idle | devices idle | staleness, mean and max | recomputed |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for work in works:
        results = {mode.name: best(cluster, work, mode) for mode in MODES}
        reference = results[MODES[0].name].tokens_per_s
        for mode in MODES:
            yield _row(cluster, work, mode, results[mode.name], reference)


def _row(
    cluster: Cluster, work: Workload, mode: Mode, result: SimulationResult, reference: float
) -> str:
    engines = f"{result.num_engines} of {cluster.num_devices}"
    if not mode.is_separate:
        engines = f"all {cluster.num_devices}, shared"
    cells = (
        work.lengths.name,
        mode.name,
        engines,
        f"{result.tokens_per_s:,.0f}",
        f"{result.tokens_per_s / reference:.2f}",
        f"{result.trainer_idle:.0%}",
        f"{result.engine_idle:.0%}",
        f"{result.device_idle:.0%}",
        f"{result.staleness:.2f}, {result.max_staleness}",
        f"{result.recomputed:.0%}",
    )
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str]) -> int:
    """Print the table of all modes and length distributions."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks simulate", description=__doc__)
    parser.add_argument("--devices", type=int, default=16, help="Number of devices (default: 16).")
    parser.add_argument("--prompts", type=int, default=64, help="Prompts per step (default: 64).")
    parser.add_argument("--samples", type=int, default=8, help="Samples per prompt (default: 8).")
    parser.add_argument("--steps", type=int, default=40, help="Number of steps (default: 40).")
    parser.add_argument(
        "--reward", type=float, default=1.0, help="Seconds to score a group (default: 1)."
    )
    args = parser.parse_args(arguments)
    if min(args.devices - 1, args.prompts, args.samples) < 1 or args.steps < 10 or args.reward < 0:
        parser.error("--devices must be 2 or more, --steps 10 or more, and no number negative")
    works = [
        Workload(lengths, args.prompts, args.samples, args.reward, args.steps)
        for lengths in LENGTHS
    ]
    for line in table(Cluster(num_devices=args.devices), works):
        print(line, flush=True)
    return 0
