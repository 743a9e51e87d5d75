"""Parallel layout of a model: tensor, pipeline, virtual-pipeline and expert parallelism.

Letters: p pipeline stage, v virtual stage (model chunk) of a rank, S layers of a virtual stage.
Positions count the slots for layers in the pipeline, including empty ones; layer numbers count the
model's layers. Virtual stage v of pipeline stage p holds the positions from (v * pp + p) * S on
(Megatron's interleaved schedule, arXiv:2104.04473, section 2.2). The options have the meaning of
Megatron's and MindSpeed's arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from msrl.errors import ManyErrors
from msrl.models.families import num_experts, rules_for
from msrl.models.rules import GateUp, Grouped, Rule, Sharded
from msrl.models.shape import Shape


class Coords(NamedTuple):
    """Coordinates of a rank in a parallel layout. The name of its checkpoint file contains them."""

    tp: int = 0
    pp: int = 0
    ep: int = 0


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Sizes of a parallel layout.

    - `vpp`: layers per virtual stage, as in `num_layers_per_virtual_pipeline_stage`. None: no
      virtual stages.
    - `num_layer_list`: layers of each stage. None: stages of equal size.
    - `noop_layers`: positions that hold no layer.
    - `ep`: number of ranks that the experts are distributed over.
    - `etp`: number of ranks that one expert is sharded over. None: tp.
    - `moe_tp_extend_ep`: distribute unsharded experts over ep * tp ranks, in files numbered by ep
      (MindSpeed's option).
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    num_layer_list: tuple[int, ...] | None = None
    noop_layers: tuple[int, ...] = ()
    ep: int = 1
    etp: int | None = None
    moe_tp_extend_ep: bool = False

    def for_megatron(self) -> ParallelLayout:
        """Return the layout for Megatron that places the same shards on every rank.

        Megatron has no `moe_tp_extend_ep`; the equivalent is a larger ep with unsharded experts.
        """
        if not self.moe_tp_extend_ep:
            return self
        return dataclasses.replace(
            self, ep=self.ep * self.tp, etp=1 if self.tp > 1 else None, moe_tp_extend_ep=False
        )

    # Ranks

    @property
    def etp_size(self) -> int:
        """Number of ranks that one expert is sharded over."""
        return 1 if self.moe_tp_extend_ep else self.etp or self.tp

    @property
    def num_expert_groups(self) -> int:
        """Number of groups that the experts of a layer are divided into."""
        return self.ep * self.tp if self.moe_tp_extend_ep else self.ep

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks that hold one copy of a pipeline stage; all others are data parallel."""
        return math.lcm(self.tp, self.etp_size * self.num_expert_groups)

    @property
    def ranks_per_model(self) -> int:
        return self.ranks_per_stage * self.pp

    def ranks_per_replica(self, cp: int) -> int:
        """Return the number of ranks that train one model replica, given the context-parallel size.

        Experts are distributed over the context-parallel ranks too.
        """
        return self.pp * math.lcm(self.tp * cp, self.etp_size * self.num_expert_groups)

    def ranks(self) -> tuple[Coords, ...]:
        """Return the coordinates of all ranks that hold a distinct shard.

        They are ordered by (pp, rank within the stage). Each rank has a checkpoint file.
        """
        return tuple(
            self.coords(p, rank) for p in range(self.pp) for rank in range(self.ranks_per_stage)
        )

    def coords(self, pp_rank: int, rank: int) -> Coords:
        """Return the coordinates of rank number `rank` of a stage.

        Tensor-parallel ranks are adjacent, and so are the ranks of an expert.
        """
        divisor = self.tp if self.moe_tp_extend_ep else self.etp_size
        return Coords(rank % self.tp, pp_rank, rank // divisor % self.ep)

    def expert_group(self, at: Coords) -> int:
        """Return the number of the group of experts that a rank holds."""
        return at.ep * self.tp + at.tp if self.moe_tp_extend_ep else at.ep

    def expert_tp_rank(self, at: Coords) -> int:
        """Return the index of the shard that a rank holds of each of its experts."""
        return at.tp % self.etp_size

    # Layers

    def num_positions(self, num_layers: int) -> int:
        return num_layers + len(self.noop_layers)

    def positions(self, num_layers: int) -> tuple[int | None, ...]:
        """Return the layer at each position of the pipeline; None for an empty position."""
        empty, numbers = frozenset(self.noop_layers), iter(range(num_layers))
        return tuple(
            None if position in empty else next(numbers)
            for position in range(self.num_positions(num_layers))
        )

    def num_chunks(self, num_layers: int) -> int:
        """Return the number of virtual stages of a rank; 1 without virtual pipeline parallelism."""
        return 1 if self.vpp is None else self.num_positions(num_layers) // self.pp // self.vpp

    def chunks(self, num_layers: int, pp_rank: int) -> tuple[tuple[int | None, ...], ...]:
        """Return the layers of each virtual stage of a rank, as global layer numbers.

        An empty position is None.
        """
        layers = self.positions(num_layers)
        return tuple(tuple(layers[start:end]) for start, end in self._blocks(num_layers, pp_rank))

    def _blocks(self, num_layers: int, pp_rank: int) -> list[tuple[int, int]]:
        """Return the first position of each virtual stage and the position after its last one."""
        if self.num_layer_list is not None:
            start = sum(self.num_layer_list[:pp_rank])
            return [(start, start + self.num_layer_list[pp_rank])]
        size = self.vpp or self.num_positions(num_layers) // self.pp
        starts = [(v * self.pp + pp_rank) * size for v in range(self.num_chunks(num_layers))]
        return [(start, start + size) for start in starts]

    # Validation

    def check(self, shape: Shape) -> None:
        """Check that every size fits the model.

        Raises:
            ManyErrors: One message for each size that does not.
        """
        messages = [
            f"{field}={self.text(field)}: {message}" for field, message in self.problems(shape)
        ]
        if messages:
            raise ManyErrors(messages)

    def problems(self, shape: Shape) -> Iterator[tuple[str, str]]:
        """Yield (field, problem) for every field that does not fit the model."""
        yield from self._tensor_problems(shape)
        yield from self._layer_problems(shape.num_layers)
        yield from self._expert_problems(shape)

    def _tensor_problems(self, shape: Shape) -> Iterator[tuple[str, str]]:
        groups: list[tuple[str, int]] = []
        columns: list[tuple[str, int]] = []
        for rule in _distinct(shape):
            if rule.expert is not None:
                continue
            layout, shapes = rule.unpacked
            if isinstance(layout, Grouped):
                groups.append((layout.unit, layout.num_groups))
            elif isinstance(layout, Sharded) and layout.units is not None:
                groups.append((layout.unit, layout.units))
            elif isinstance(layout, GateUp):
                columns.append(("ffn columns", shapes[0][0]))
        sizes = [*groups, ("attention heads", shape.num_attention_heads), *columns]
        for unit, size in dict.fromkeys(sizes):
            if size % self.tp:
                yield "tp", f"must divide the model's {size} {unit}"

    def _layer_problems(self, num_layers: int) -> Iterator[tuple[str, str]]:
        if self.num_layer_list is not None:
            yield from self._list_problems(num_layers)
            return
        positions = self.num_positions(num_layers)
        is_repeated = len(set(self.noop_layers)) < len(self.noop_layers)
        if is_repeated or not all(0 <= position < positions for position in self.noop_layers):
            yield (
                "noop_layers",
                f"must be distinct positions from 0 to {positions - 1}, counting empty ones",
            )
        layers = f"{num_layers} layers" + (
            f" and {len(self.noop_layers)} empty ones" if self.noop_layers else ""
        )
        if positions % self.pp:
            yield "pp", f"must divide the model's {layers}, unless num_layer_list is set"
        elif self.vpp is not None:
            yield from self._virtual_problems(positions // self.pp)

    def _virtual_problems(self, per_stage: int) -> Iterator[tuple[str, str]]:
        assert self.vpp is not None
        if self.pp == 1:
            yield "vpp", "requires several pipeline stages. Set pp above 1, or remove vpp"
        elif per_stage % self.vpp:
            yield (
                "vpp",
                f"layers per virtual stage must divide the {per_stage} layers of each of the "
                f"{self.pp} pipeline stages",
            )
        elif self.vpp == per_stage:
            yield (
                "vpp",
                f"equals the {per_stage} layers of a stage, so there are no virtual stages. "
                "Lower it, or remove it",
            )

    def _list_problems(self, num_layers: int) -> Iterator[tuple[str, str]]:
        assert self.num_layer_list is not None
        if self.vpp is not None:
            yield (
                "num_layer_list",
                "conflicts with vpp, which requires stages of equal size. Set only one of them",
            )
        if self.noop_layers:
            yield "num_layer_list", "conflicts with noop_layers. Set only one of them"
        if len(self.num_layer_list) != self.pp:
            yield "num_layer_list", f"has {len(self.num_layer_list)} stages, but pp={self.pp}"
        if min(self.num_layer_list, default=0) < 1:
            yield "num_layer_list", "must assign at least one layer to every stage"
        if sum(self.num_layer_list) != num_layers:
            yield (
                "num_layer_list",
                f"adds up to {sum(self.num_layer_list)}, but the model has {num_layers} layers",
            )

    def _expert_problems(self, shape: Shape) -> Iterator[tuple[str, str]]:
        experts = num_experts(shape)
        if not experts:
            is_set = {
                "ep": self.ep > 1,
                "etp": self.etp is not None,
                "moe_tp_extend_ep": self.moe_tp_extend_ep,
            }
            for field, has_value in is_set.items():
                if has_value:
                    yield field, "the model has no experts. Remove this option"
            return
        if experts % self.num_expert_groups:
            factor = f"times tp={self.tp} " if self.moe_tp_extend_ep else ""
            yield "ep", f"{factor}must divide the model's {experts} experts"
        if self.moe_tp_extend_ep and self.etp is not None:
            yield (
                "etp",
                "conflicts with moe_tp_extend_ep, which does not shard experts. Set only one "
                "of them",
            )
        if self.tp % self.etp_size:
            yield "etp", f"must divide tp={self.tp}"
        expert_tensors = [rule.unpacked for rule in _distinct(shape) if rule.expert is not None]
        sizes = {shapes[0][0] for layout, shapes in expert_tensors if isinstance(layout, GateUp)}
        for size in sorted(sizes):
            if size % self.etp_size:
                yield (
                    "tp" if self.etp is None else "etp",
                    f"must divide the model's {size} expert ffn columns",
                )

    # Text and JSON

    def text(self, field: str) -> str:
        """Return the value of a field as a user would type it."""
        value: object = getattr(self, field)
        return (
            ",".join(map(str, cast("tuple[int, ...]", value)))
            if isinstance(value, tuple)
            else str(value)
        )

    def __str__(self) -> str:
        """Return `tp 2, pp 2`, followed by the other fields that do not have their default."""
        options = [f"tp {self.tp}", f"pp {self.pp}"]
        for field in dataclasses.fields(ParallelLayout)[2:]:
            if getattr(self, field.name) != field.default:
                options.append(f"{field.name} {self.text(field.name)}")
        return ", ".join(options)

    def as_json(self) -> dict[str, Any]:
        """Return the fields for a manifest, to be read by `ParallelLayout.from_json`."""
        return {
            field.name: getattr(self, field.name) for field in dataclasses.fields(ParallelLayout)
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> ParallelLayout:
        """Return the layout that `as_json` wrote.

        Absent fields have their default; unknown keys are ignored.
        """
        known = {field.name for field in dataclasses.fields(ParallelLayout)}
        fields: dict[str, Any] = {}
        for name, value in values.items():
            if name in known:
                fields[name] = tuple(cast("list[int]", value)) if isinstance(value, list) else value
        return ParallelLayout(**fields)


SINGLE_RANK = ParallelLayout()
"""Layout in which one rank holds the entire model."""


@functools.lru_cache(maxsize=8)
def _distinct(shape: Shape) -> tuple[Rule, ...]:
    """Return one rule of every kind in the layers of a model.

    Identical experts and layers are represented once.
    """
    layers = {id(layer): layer for layer in rules_for(shape).layers}.values()
    kinds = {
        (rule.layout, rule.shapes, rule.expert is None): rule for layer in layers for rule in layer
    }
    return tuple(kinds.values())
