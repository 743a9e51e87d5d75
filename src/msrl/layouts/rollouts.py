"""Predicted seconds of a train-grpo step: generation, passes, updates, weights and idle time.

- A token of n sequences takes an engine the longer of two times: to read its weights and the keys
  and values of n sequences, or for the products of n tokens. To it come two all-reduces per layer
  and the fixed time of a step. A mixture reads the experts that n tokens choose.
- Sequences of an engine end one after the other, so that long ones keep it busy (`simulation.py`).
- Weights travel through the memory of the host, and between machines through the network.
  Transfers from device to device use links instead.
- Without staleness, generation, passes and updates follow each other. With it, they overlap as far
  as the admission of msrl allows.

Rewards, environments, critics and filters are not counted.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msrl.config.schema import Config
from msrl.config.sections.rollout import DEVICE_TRANSFERS
from msrl.layouts.cost import Job
from msrl.layouts.profile import Points, interpolate, interpolate_rows
from msrl.layouts.simulation import (
    LengthSource,
    Mode,
    SimulatedEngine,
    Simulation,
    Workload,
)
from msrl.memory.flops import head_weights, layer_weights
from msrl.memory.states import parameters_per_rank
from msrl.models.kv_cache import kv_bytes_per_token
from msrl.models.parallel_layout import ParallelLayout

_NUM_STEPS, _NUM_WARMUP_STEPS = 6, 2  # of a simulation, more with staleness
_DRAWS = 3  # steps whose generation is averaged
_MAX_GROUPS = 64  # of a simulated step; each may stand for several
_MIN_ENGINES = 4  # of a simulated step, so that one waits for another


@dataclass(frozen=True, slots=True)
class Engines:
    """Engines of a layout: their number, devices of each, and whether they have devices alone."""

    number: int
    tp: int
    is_separate: bool

    @property
    def devices(self) -> int:
        return self.number * self.tp

    def __str__(self) -> str:
        where = "separate" if self.is_separate else "colocated"
        return f"{self.number} x TP {self.tp}, {where}"


@dataclass(frozen=True, slots=True)
class ListedLengths:
    """Lengths of known responses, from which groups draw in turn."""

    name: str
    lengths: Sequence[int]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.lengths)

    def draw(self, number: int, count: int) -> list[int]:
        """Return consecutive lengths, so that all of them occur."""
        start = number * count
        return [self.lengths[(start + index) % len(self.lengths)] for index in range(count)]


@dataclass(frozen=True, slots=True)
class EngineSpeeds:
    """Speeds of one engine. A simulated sequence stands for `weight` sequences.

    Attributes:
        max_running: Largest number of sequences that it runs at the same time.
        transfer_s: Seconds of a transfer of new weights.
        update_s_per_token: Seconds of passes and updates per sampled token of a step.
        step_s: Fixed seconds of a step by number of sequences.
        memory: Bytes per second that a device reads.
        dense_bytes: Bytes of the weights of a device that every step reads.
        expert_bytes: Bytes of all routed experts of a device.
        chosen: Share of the experts that a token chooses.
        cache_bytes: Bytes of keys and values of a token on a device.
        flops: Operations of a token on a device.
        rates: FLOP/s by number of tokens.
        reduce_s: Seconds of all reductions of a step without their bytes.
        reduce_s_per_token: Seconds of the bytes of a token in them.
    """

    max_running: int
    transfer_s: float
    update_s_per_token: float
    step_s: Points
    memory: float
    dense_bytes: float
    expert_bytes: float
    chosen: float
    cache_bytes: float
    flops: float
    rates: Points
    reduce_s: float
    reduce_s_per_token: float
    weight: int = 1

    def token_s(self, num_running: int, context: float) -> float:
        """Return the seconds of one token of every running sequence."""
        tokens = max(num_running * self.weight, 1)
        read = self.dense_bytes + self.expert_bytes * (1 - (1 - self.chosen) ** tokens)
        read += self.cache_bytes * tokens * context
        seconds = max(read / self.memory, self.prefill_s(num_running))
        reduce_s = self.reduce_s + self.reduce_s_per_token * tokens
        return interpolate(self.step_s, tokens) + seconds + reduce_s

    def prefill_s(self, tokens: float) -> float:
        """Return the seconds in which the engine computes keys and values."""
        tokens *= self.weight
        return self.flops * tokens / interpolate(self.rates, tokens) if tokens else 0.0

    def update_s(self, tokens: float, num_devices: int) -> float:
        """Return the seconds of passes and updates of a step with so many sampled tokens."""
        return self.update_s_per_token * tokens * self.weight


def engine_speeds(job: Job, tp: int, max_running: int, transfer_s: float) -> EngineSpeeds:
    """Return the speeds of an engine on `tp` devices."""
    shape, profile, share = job.shape, job.profile, job.profile.efficiency
    weights = [layer_weights(shape, layer) for layer in shape.layers]
    dense = head_weights(shape) + sum(own.mixer + own.feed_forward for own in weights)
    used, moe = sum(own.experts for own in weights), shape.moe
    chosen = 1.0 if moe is None else moe.experts_per_token / moe.num_experts
    width, speeds = shape.hidden_size, profile.speeds
    rates: Points = ((1.0, profile.flops(job.dtype) * share.products.value),)
    step_s: Points = ((1.0, profile.engine_step_s.value),)
    if speeds is not None:
        rows = speeds.products_of(job.dtype)
        if rows is not None:
            sizes = sorted({row[0] for row in rows})
            rates = tuple((size, interpolate_rows(rows, size, width)) for size in sizes)
        step_s = speeds.engine or step_s
    reductions = 2 * shape.num_layers if tp > 1 else 0
    size = 2 * width * job.element_bytes * (1 - 1 / tp)
    return EngineSpeeds(
        max_running,
        transfer_s,
        0.0,
        step_s,
        memory=profile.memory_bytes_per_s.value * share.memory.value,
        dense_bytes=dense / tp * job.element_bytes,
        expert_bytes=used / chosen / tp * job.element_bytes,
        chosen=chosen,
        cache_bytes=kv_bytes_per_token(shape, job.element_bytes, tp),
        flops=2 * (dense + used) / tp,
        rates=rates,
        reduce_s=reductions * profile.collective_s.value,
        reduce_s_per_token=reductions * size / profile.reached_links,
    )


def max_running(job: Job, config: Config, tp: int, longest: int, limit: float) -> int:
    """Return how many sequences an engine runs at once; 0 if its weights or one do not fit.

    `longest` is the largest length of a sequence; others have the mean length. `limit` are the
    bytes of a device that may be used.
    """
    engine, shape = config.rollout.engine, job.shape
    weights = parameters_per_rank(shape, ParallelLayout(tp=tp)) * job.element_bytes
    room = int(job.profile.memory_bytes.value * engine.memory_fraction) - weights
    cache = engine.kv_cache_bytes or room
    per_token = max(kv_bytes_per_token(shape, job.element_bytes, tp), 1)
    if cache < per_token * longest or weights + cache > limit:
        return 0
    return max(min(engine.max_num_seqs, int(cache / (per_token * job.lengths.row))), 1)


def transfer_s(job: Job, config: Config, engines: Engines, nodes: int) -> float:
    """Return the seconds in which new weights reach the engines."""
    profile = job.profile
    size = parameters_per_rank(job.shape, ParallelLayout()) * job.element_bytes
    links, network = profile.reached_links, profile.reached_network
    if config.rollout.weights.transfer in DEVICE_TRANSFERS:
        return size / (network if nodes > 1 else links)
    host = profile.host_bytes_per_s.value
    seconds = size / job.world_size / host + size / engines.tp / host
    return seconds + (size / network if nodes > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Sampled work of a step and how it alternates with updates."""

    prompts: int
    samples: int
    prompt_tokens: float
    responses: LengthSource
    staleness: int
    is_partial: bool

    @property
    def tokens(self) -> float:
        """Sampled tokens of a step."""
        return self.prompts * self.samples * self.responses.mean


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of a step: in total, for which it waits for rollouts, and for new weights."""

    total: float
    waiting: float
    weights: float
    engine_idle: float  # fraction


def in_turn(generation: float, transfer: float, training: float) -> StepTimes:
    """Return the seconds of a step whose generation and training follow each other."""
    total = generation + transfer + training
    return StepTimes(total, generation, transfer, 1 - generation / total)


def step_times(
    schedule: Schedule, engines: Engines, speeds: EngineSpeeds, training_s: float
) -> StepTimes:
    """Return the seconds of an asynchronous step whose passes and updates take `training_s`."""
    num_engines, work, weight = _reduced(schedule, engines)
    work = replace(
        work,
        reward_s=0.0,
        num_steps=_NUM_STEPS + schedule.staleness,
        num_warmup_steps=_NUM_WARMUP_STEPS + schedule.staleness,
    )
    sampled = work.prompts * work.samples * work.lengths.mean * weight
    speeds = replace(_weighted(speeds, weight), update_s_per_token=training_s / sampled)
    mode = Mode("", schedule.staleness, engines.is_separate, schedule.is_partial)
    result = Simulation(speeds, work, mode, num_engines, num_engines + 1).run()
    waiting = max(result.step_s - training_s - speeds.transfer_s, 0.0)
    return StepTimes(result.step_s, waiting, speeds.transfer_s, result.engine_idle)


def generation_s(schedule: Schedule, engines: Engines, speeds: EngineSpeeds) -> float:
    """Return the seconds in which the engines generate the responses of a step."""
    num_engines, work, weight = _reduced(schedule, engines)
    speeds = _weighted(speeds, weight)
    context, seconds = work.prompt_tokens + work.lengths.mean / 2, list[float]()
    for draw in range(_DRAWS):
        simulated = [SimulatedEngine(speeds, context) for _ in range(num_engines)]
        for number in range(work.prompts):
            engine = simulated[number % num_engines]
            engine.prefill(work.prompt_tokens)
            for length in work.lengths.draw(draw * work.prompts + number, work.samples):
                engine.add(length, number)
        seconds.append(max(map(_end, simulated)))
    return statistics.fmean(seconds)


def _weighted(speeds: EngineSpeeds, weight: int) -> EngineSpeeds:
    """Return the speeds of an engine whose simulated sequences stand for several."""
    limit = max(speeds.max_running // weight, 1)
    return replace(speeds, max_running=limit, weight=weight)


def _end(engine: SimulatedEngine) -> float:
    """Return the time at which an engine has no more sequences."""
    now = 0.0
    while engine.load:
        now = engine.next_end()
        engine.advance(now)
        engine.pop()
    return now


def _reduced(schedule: Schedule, engines: Engines) -> tuple[int, Workload, int]:
    """Return a smaller number of engines with their share of the work, and a sequence's weight.

    A share of the engines has the same share of the groups. If these are still many, each stands
    for several.
    """
    common = math.gcd(schedule.prompts, engines.number)
    divisors = [size for size in range(1, common + 1) if common % size == 0]
    share = max((d for d in divisors if engines.number // d >= _MIN_ENGINES), default=1)
    groups = schedule.prompts // share
    weight = math.ceil(groups / _MAX_GROUPS)
    work = Workload(
        schedule.responses,
        math.ceil(groups / weight),
        schedule.samples,
        prompt_tokens=schedule.prompt_tokens,
    )
    return engines.number // share, work, weight
