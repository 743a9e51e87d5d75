"""Search of the layouts of a training that the checks allow, that fit, and that are fastest.

Layouts are predicted first. In the order of their predictions, the existing checks and the
existing memory estimate decide which of them a run could have.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, dropwhile
from typing import Any

from msrl.checks.validate import find_layout_errors
from msrl.config.loader import Resolved
from msrl.config.schema import Config
from msrl.config.sections.train import ParallelConfig, RecomputeConfig, TrainConfig
from msrl.layouts.cost import CostModel, Job, Prediction
from msrl.layouts.rollouts import Engines
from msrl.memory.estimate import Memory, training_memory, with_engine
from msrl.models.shape import Shape
from msrl.plan.derived import dp_size, layout_from, replica_size, world_size
from msrl.plan.roles import placed_roles
from msrl.plan.run_plan import RunPlan
from msrl.platforms import get
from msrl.rollout.engine import sleep_level

USABLE_MEMORY = 0.9  # the rest is for kernels, communication and fragmentation
_MIN_TOKENS = 2048  # of a sequence on a context-parallel rank: fewer are not worth the transfers
_MAX_MICRO_BATCH_TOKENS = 1 << 15
_MAX_VIRTUAL = 4  # virtual stages of a rank
_SIZES = ("tp", "pp", "cp", "ep", "etp")
_RECOMPUTATIONS = ("none", "selective", "full")
_PARALLEL = "train.parallel"
_MICRO_BATCH = "train.micro_batch"
_RECOMPUTE = "train.recompute"
ENGINE_TP = "rollout.engine.tp"
ENGINE_DEVICES = "cluster.roles.rollout.devices"
KEYS = (
    *(f"{_PARALLEL}.{name}" for name in ("tp", "pp", "vpp", "cp", "cp_algo", "ep", "etp")),
    _MICRO_BATCH,
    _RECOMPUTE,
    ENGINE_TP,
    ENGINE_DEVICES,
)
"""Keys that a search chooses. It sets `sp` and `num_layer_list` to go with them."""


@dataclass(frozen=True, slots=True)
class Devices:
    """Machines and their devices, as in 4x8."""

    nodes: int
    per_node: int

    @property
    def total(self) -> int:
        return self.nodes * self.per_node

    def __str__(self) -> str:
        return f"{self.nodes}x{self.per_node}"


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout with its predicted step, and the memory of its fullest device.

    Of train-grpo it has the engines, the devices of the training and the engines' idle share.
    """

    train: TrainConfig
    update: Prediction
    memory: Memory
    engines: Engines | None = None
    devices: Devices | None = None
    engine_idle: float = 0.0


class Search:
    """Search of the layouts of one training on some devices.

    `kept` names keys of `KEYS` whose value in the configuration holds for all layouts.
    """

    def __init__(
        self,
        resolved: Resolved,
        plan: RunPlan,
        job: Job,
        devices: Devices,
        kept: frozenset[str] = frozenset(),
    ) -> None:
        self._resolved, self._plan, self._job, self._kept = resolved, plan, job, kept
        self._config = _on_devices(resolved.config, devices)
        self._devices, self.model = devices, CostModel(job)
        self.limit = USABLE_MEMORY * job.profile.memory_bytes.value
        self._errors, self._num_candidates, self._is_any_legal = list[str](), 0, False

    def best(self, number: int) -> list[Layout]:
        """Return the fastest layouts that the checks allow and that fit.

        They have different sizes: of equal ones, only the fastest is returned.
        """
        layouts = dict[tuple[object, ...], Layout]()
        for train, update in self._by_time():
            sizes = tuple(getattr(train.parallel, name) for name in _SIZES)
            if sizes in layouts:
                continue
            layout = self._legal(train, update)
            if layout is not None and layout.memory.peak <= self.limit:
                layouts[sizes] = layout
            if len(layouts) == number:
                break
        return [*layouts.values()]

    @property
    def devices(self) -> Devices:
        """Devices of the training."""
        return self._devices

    def own(self) -> Layout | None:
        """Return the layout of the configuration; None if it is not legal there or cannot fit."""
        train, parallel = self._config.train, self._config.train.parallel
        ranks = layout_from(parallel).ranks_per_replica(parallel.cp)
        if self._job.world_size % ranks or self.model.least_bytes(train, saved=False) > self.limit:
            return None
        return self._legal(train, self.model.update(train))

    @property
    def errors(self) -> list[str]:
        """Why the checks allowed no candidate; empty if they allowed some, or memory was too small.

        These are the errors of the configuration's own layout, if it has some.
        """
        if self._is_any_legal or (self._num_candidates and not self._errors):
            return []
        resolved = replace(self._resolved, config=self._config)
        own = find_layout_errors(resolved, self._with(self._config))
        kept = ", ".join(sorted(self._kept))
        sizes = f"{self._devices} devices: no sizes divide them and keep {kept}"
        return own or self._errors or [sizes]

    def _legal(self, train: TrainConfig, update: Prediction) -> Layout | None:
        """Return the layout with its memory if the checks allow it, else None."""
        config = self._config.model_copy(update={"train": train})
        plan = self._with(config)
        errors = find_layout_errors(replace(self._resolved, config=config), plan)
        if errors:
            self._errors = errors
            return None
        self._is_any_legal = True
        platform = get(self._job.profile.platform)
        memory = training_memory(plan, temporary_elements=platform.elements_at_once)
        if plan.has_engines:
            memory = with_engine(
                memory,
                plan,
                total=int(self._job.profile.memory_bytes.value),
                is_shared=platform.shares_main_memory,
                sleeps=sleep_level(config.rollout.engine, platform) > 0,
            )
        return Layout(train, update, memory)

    def _with(self, config: Config) -> RunPlan:
        """Return the plan with another layout."""
        parallel = config.train.parallel
        return replace(
            self._plan,
            config=config,
            layout=layout_from(parallel),
            world_size=world_size(config),
            dp_size=dp_size(config),
            replica_size=replica_size(config),
            roles=placed_roles(config, self._plan.command),
        )

    def _by_time(self) -> Iterator[tuple[TrainConfig, Prediction]]:
        """Yield the candidates that may fit, from the fastest one on.

        Candidates with more recomputation than needed are slower, so that they follow once the one
        with less has had its turn.
        """
        numbers = count()
        heap = list[tuple[float, int, Prediction, list[TrainConfig]]]()

        def push(trains: list[TrainConfig]) -> None:
            least = self.model.least_bytes
            if rest := list(dropwhile(lambda train: least(train) > self.limit, trains)):
                update = self.model.update(rest[0])
                heapq.heappush(heap, (update.seconds, next(numbers), update, rest))

        for parallel in self._parallel():
            train = self._config.train.model_copy(update={"parallel": parallel})
            self._num_candidates += 1
            if self.model.least_bytes(train, saved=False) <= self.limit:
                for changed in self._micro_batches(train):
                    push(self._recomputing(changed))
        while heap:
            _, _, update, (train, *others) = heapq.heappop(heap)
            yield train, update
            push(others)

    def _choices(self, name: str, values: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Return the value of a kept key, or else all values."""
        if f"{_PARALLEL}.{name}" in self._kept:
            return (getattr(self._config.train.parallel, name),)
        return values()

    def _parallel(self) -> Iterator[ParallelConfig]:
        """Yield parallel layouts whose sizes divide the devices."""
        world, shape = self._job.world_size, self._job.shape
        for tp in self._choices("tp", lambda: _divisors(self._devices.per_node)):
            if world % tp:
                continue
            ranks = world // tp
            sizes = self._choices("pp", lambda ranks=ranks: _divisors(ranks, shape.num_layers))
            for pp in sizes:
                if ranks % pp:
                    continue
                for base in self._contexts(tp, pp):
                    yield from self._experts(base)

    def _contexts(self, tp: int, pp: int) -> Iterator[ParallelConfig]:
        world = self._job.world_size
        most = int(max(self._job.lengths.row // _MIN_TOKENS, 1))
        parallel = self._config.train.parallel
        layers = _layer_list(self._job.shape, pp)
        stages: dict[str, Any] = {"tp": tp, "pp": pp, "sp": tp > 1}
        stages |= {"num_layer_list": layers, "noop_layers": ()}
        for cp in self._choices("cp", lambda: _divisors(world // tp // pp, most)):
            if world // tp // pp % cp:
                continue
            names = ("allgather", "ulysses", "ring") if cp > 1 else ("allgather",)
            for name in self._choices("cp_algo", lambda names=names: names):
                algorithm = {"cp": cp, "cp_algo": name}
                for vpp in self._choices("vpp", lambda: _virtual_sizes(self._job.shape, pp)):
                    yield parallel.model_copy(update={**stages, **algorithm, "vpp": vpp})

    def _experts(self, base: ParallelConfig) -> Iterator[ParallelConfig]:
        moe = self._job.shape.moe
        if moe is None:
            yield base
            return
        ranks = self._job.world_size // base.pp
        tensor = (1, base.tp) if base.tp > 1 else (None,)
        for etp in self._choices("etp", lambda: tensor):
            most = ranks // (etp or base.tp)
            for ep in self._choices("ep", lambda most=most: _divisors(moe.num_experts, most)):
                if ranks % (ep * (etp or base.tp)) == 0:
                    yield base.model_copy(update={"ep": ep, "etp": etp})

    def _micro_batches(self, train: TrainConfig) -> Iterator[TrainConfig]:
        if train.max_tokens_per_micro_batch is not None or _MICRO_BATCH in self._kept:
            yield train
            return
        dp = self._job.world_size // (train.parallel.tp * train.parallel.pp * train.parallel.cp)
        size = 1
        while self._job.rows % (dp * size) == 0:
            yield train.model_copy(update={"micro_batch": size})
            size *= 2
            if size * self._job.lengths.row > _MAX_MICRO_BATCH_TOKENS:
                return

    def _recomputing(self, train: TrainConfig) -> list[TrainConfig]:
        """Return a candidate with each kind of recomputation, from the least on."""
        if _RECOMPUTE in self._kept:
            return [train]
        kinds = _RECOMPUTATIONS if self._job.shape.mla is None else ("none", "full")
        return [
            train.model_copy(update={"recompute": RecomputeConfig(granularity=kind)})  # pyright: ignore[reportArgumentType]
            for kind in kinds
        ]


def _on_devices(config: Config, devices: Devices) -> Config:
    """Return the configuration on other devices, of a cluster that exists by then."""
    changes: dict[str, Any] = {"nodes": devices.nodes, "devices_per_node": devices.per_node}
    if devices.nodes > 1 and config.cluster.address is None:
        changes["address"] = "HOST:6344"
    return config.model_copy(update={"cluster": config.cluster.model_copy(update=changes)})


def _divisors(number: int, most: int | None = None) -> list[int]:
    """Return the divisors of a number up to `most`.

    >>> _divisors(12, 5)
    [1, 2, 3, 4]
    """
    last = number if most is None else min(most, number)
    return [size for size in range(1, last + 1) if number % size == 0]


def _virtual_sizes(shape: Shape, pp: int) -> list[int | None]:
    """Return the numbers of layers of a virtual stage; None for no virtual stages."""
    if pp == 1 or shape.num_layers % pp:
        return [None]
    layers = shape.num_layers // pp
    numbers = range(2, _MAX_VIRTUAL + 1)
    return [None, *(layers // number for number in numbers if layers % number == 0)]


def _layer_list(shape: Shape, pp: int) -> tuple[int, ...] | None:
    """Return layers of stages if they cannot be equal: the first and last stages have fewer.

    They hold the embedding and the output layer, too.
    """
    if shape.num_layers % pp == 0:
        return None
    size = math.ceil(shape.num_layers / pp)
    missing = size * pp - shape.num_layers
    order = [stage for pair in zip(range(pp - 1, -1, -1), range(pp), strict=True) for stage in pair]
    fewer = list(dict.fromkeys(order))[:missing]
    return tuple(size - (stage in fewer) for stage in range(pp))
