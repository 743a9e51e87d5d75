"""Layouts of train-grpo: the devices of ranks and engines, and the predicted steps of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from msrl.config.loader import Resolved
from msrl.config.schema import Config
from msrl.layouts.cost import Job, Lengths
from msrl.layouts.profile import Profile
from msrl.layouts.rollouts import (
    Engines,
    Schedule,
    engine_speeds,
    generation_s,
    in_turn,
    max_running,
    step_times,
    transfer_s,
)
from msrl.layouts.search import ENGINE_DEVICES, ENGINE_TP, Devices, Layout, Search
from msrl.layouts.simulation import LengthSource
from msrl.memory.states import logits_bytes
from msrl.plan.derived import (
    needs_old_logprobs,
    num_separate_devices,
    samples_per_update,
    updates_per_step,
)
from msrl.plan.run_plan import RunPlan
from msrl.platforms import get

_TRAINING_SHARES = (0.25, 0.5, 0.75)  # of the devices, where engines have separate ones


@dataclass(frozen=True, slots=True)
class GrpoRequest:
    """Devices, their profile, keys whose value holds, and the lengths of a step."""

    devices: Devices
    profile: Profile
    kept: frozenset[str]
    prompt_tokens: float
    responses: LengthSource


class GrpoSearch:
    """Search of the layouts of one placement: devices of the training, and engines."""

    def __init__(
        self, resolved: Resolved, plan: RunPlan, request: GrpoRequest, engines: Engines
    ) -> None:
        self._request, self.engines = request, engines
        devices = _training_devices(request.devices, engines)
        config = _with_engines(resolved.config, engines)
        self._plan = replace(plan, config=config)
        self._job = _job(self._plan, request, devices)
        self.search = Search(
            replace(resolved, config=config), self._plan, self._job, devices, request.kept
        )
        rollout = config.rollout
        num_prefills = 1 if rollout.engine.prefix_cache else rollout.samples_per_prompt
        self._schedule = Schedule(
            rollout.prompts_per_step,
            rollout.samples_per_prompt,
            request.prompt_tokens * num_prefills,
            request.responses,
            rollout.asynchronous.max_staleness,
            rollout.asynchronous.partial,
        )
        running = max_running(self._job, config, engines.tp, plan.max_model_len, self.search.limit)
        seconds = transfer_s(self._job, config, engines, request.devices.nodes)
        self._speeds = engine_speeds(self._job, engines.tp, running, seconds)

    @property
    def is_possible(self) -> bool:
        """Whether an engine holds the weights and the keys of a sequence."""
        return self._speeds.max_running > 0

    @cached_property
    def generation_s(self) -> float:
        """Seconds in which the engines generate the responses of a step."""
        return generation_s(self._schedule, self.engines, self._speeds)

    def best(self, number: int) -> list[Layout]:
        """Return the layouts whose training is fastest, with predicted steps."""
        return [self.timed(layout) for layout in self.search.best(number)]

    def timed(self, layout: Layout) -> Layout:
        """Return a layout whose update is predicted with that of the whole step."""
        config, update = self._plan.config, layout.update
        count = updates_per_step(config)
        parts = {name: count * seconds for name, seconds in update.parts.items()}
        passes = int(needs_old_logprobs(config)) + int(self._plan.has_reference_on_ranks)
        forward_s = self.search.model.forward_s(layout.train)
        epochs = config.train.updates.epochs  # each has the rows of the step
        parts["log-probabilities"] = passes * forward_s * count / epochs
        training_s = sum(parts.values())
        if self._schedule.staleness:
            times = step_times(self._schedule, self.engines, self._speeds, training_s)
        else:
            times = in_turn(self.generation_s, self._speeds.transfer_s, training_s)
        parts |= {"generation": times.waiting, "weight transfer": times.weights}
        tokens = self._schedule.prompts * self._schedule.samples * self._job.lengths.row
        # What the simulation adds to its stages, such as the wait for the first groups.
        parts["idle"] = max(times.total - sum(parts.values()), 0.0)
        return replace(
            layout,
            update=replace(update, parts=parts, tokens=tokens),
            engines=self.engines,
            devices=self.search.devices,
            engine_idle=times.engine_idle,
        )


def placements(
    resolved: Resolved, plan: RunPlan, request: GrpoRequest
) -> Iterator[list[GrpoSearch]]:
    """Yield the searches of every placement, those with the fastest engines first."""
    for num_engine_devices in _engine_devices(resolved.config, request):
        searches = [
            GrpoSearch(resolved, plan, request, engines)
            for engines in _engines(resolved.config, plan, request, num_engine_devices)
        ]
        possible = [search for search in searches if search.is_possible]
        yield sorted(possible, key=lambda search: search.generation_s)


def own_placement(resolved: Resolved, plan: RunPlan, request: GrpoRequest) -> GrpoSearch | None:
    """Return the search with the engines of the configuration; None if they are impossible."""
    config, tp = resolved.config, resolved.config.rollout.engine.tp
    separate = num_separate_devices(config.cluster.roles.rollout)
    if separate >= request.devices.total or (separate % request.devices.per_node and separate):
        return None
    devices = separate or request.devices.total
    number = config.rollout.engine.dp or devices // tp
    if number < 1:
        return None
    search = GrpoSearch(resolved, plan, request, Engines(number, tp, separate > 0))
    return search if search.is_possible else None


def _engine_devices(config: Config, request: GrpoRequest) -> Sequence[int]:
    """Return the numbers of separate devices of engines; 0 for those of the training."""
    if ENGINE_DEVICES in request.kept:
        return (num_separate_devices(config.cluster.roles.rollout),)
    options, devices = config.rollout.asynchronous, request.devices
    total, unit = devices.total, devices.per_node if devices.nodes > 1 else 1
    units = total // unit
    sizes = sorted({round(units * share) for share in _TRAINING_SHARES} - {0, units})
    separate = [total - size * unit for size in sizes]
    if options.is_on:
        return (0,) if options.partial else separate
    return (0, *separate)


def _engines(
    config: Config, plan: RunPlan, request: GrpoRequest, num_separate: int
) -> Iterator[Engines]:
    devices = num_separate or request.devices.total
    engine, heads = config.rollout.engine, plan.shape.num_attention_heads
    sizes = [engine.tp] if ENGINE_TP in request.kept else range(1, request.devices.per_node + 1)
    for tp in sizes:
        if request.devices.per_node % tp == 0 and heads % tp == 0 and devices >= tp:
            number = engine.dp or devices // tp
            if number * tp <= devices:
                yield Engines(number, tp, num_separate > 0)


def _training_devices(devices: Devices, engines: Engines) -> Devices:
    """Return the devices that the engines leave to the training."""
    if not engines.is_separate:
        return devices
    if devices.nodes == 1:
        return Devices(1, devices.per_node - engines.devices)
    return Devices(devices.nodes - -(-engines.devices // devices.per_node), devices.per_node)


def _with_engines(config: Config, engines: Engines) -> Config:
    engine = config.rollout.engine.model_copy(update={"tp": engines.tp})
    if engine.ep > 1:  # all devices of an engine share its experts
        engine = engine.model_copy(update={"ep": engines.tp})
    rollout = config.rollout.model_copy(update={"engine": engine})
    devices = engines.devices if engines.is_separate else None
    role = config.cluster.roles.rollout.model_copy(update={"devices": devices})
    roles = config.cluster.roles.model_copy(update={"rollout": role})
    cluster = config.cluster.model_copy(update={"roles": roles})
    return config.model_copy(update={"rollout": rollout, "cluster": cluster})


def _job(plan: RunPlan, request: GrpoRequest, devices: Devices) -> Job:
    responses, device = request.responses.mean, get(request.profile.platform)
    row = request.prompt_tokens + responses
    return Job(
        shape=plan.shape,
        profile=request.profile,
        lengths=Lengths(row, row, responses / row, request.responses.name),
        dtype=plan.dtype,
        logits_bytes=logits_bytes(plan),
        world_size=devices.total,
        devices_per_node=devices.per_node,
        rows=samples_per_update(plan.config),
        overlaps=device.overlap_communication,
        is_queued=not device.shares_main_memory,
        num_frozen=int(plan.has_reference_on_ranks and plan.train.lora.rank is None),
    )
