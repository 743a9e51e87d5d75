"""How a model is cut over ranks: tensor, pipeline, virtual-pipeline and expert parallelism, as numbers that every stage shares.

Letters: p pipeline stage, v virtual stage (chunk) of a rank, S layers of a chunk. Positions count the layers of the pipeline, empty ones
included; layers count those of the model. Chunk v of stage p holds the positions from (v * pp + p) * S on (Megatron's interleaved
schedule, arXiv:2104.04473, section 2.2). Meanings of the options are those of Megatron's and MindSpeed's arguments.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from msrl.errors import ManyErrors
from msrl.models.families import num_experts, rules_for
from msrl.models.rules import GateUp, Qkv, Rule, Sharded
from msrl.models.shape import Shape


class Coords(NamedTuple):
    """Where a rank stands in a cut: the three numbers in the name of its checkpoint file."""

    tp: int = 0
    pp: int = 0
    ep: int = 0


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The sizes of a cut.

    `vpp`: layers per virtual stage, as `num_layers_per_virtual_pipeline_stage`; None: a stage is one block.
    `num_layer_list`: layers of each stage; None: equal stages. `noop_layers`: positions that hold no layer.
    `ep`: ranks that the experts are spread over. `etp`: ranks that one expert is cut over; None: tp.
    `moe_tp_extend_ep`: whole experts spread over ep * tp ranks, in files numbered by ep (MindSpeed's).
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    num_layer_list: tuple[int, ...] | None = None
    noop_layers: tuple[int, ...] = ()
    ep: int = 1
    etp: int | None = None
    moe_tp_extend_ep: bool = False

    def trained(self) -> ParallelLayout:
        """The cut by which Megatron's own ranks hold the same parts: it knows no `moe_tp_extend_ep`, only whole experts over more ranks."""
        if not self.moe_tp_extend_ep:
            return self
        return dataclasses.replace(self, ep=self.ep * self.tp, etp=1 if self.tp > 1 else None, moe_tp_extend_ep=False)

    # Ranks

    @property
    def etp_size(self) -> int:
        """Ranks that one expert is cut over."""
        return 1 if self.moe_tp_extend_ep else self.etp or self.tp

    @property
    def num_expert_groups(self) -> int:
        """Into how many parts the experts of a layer are dealt out."""
        return self.ep * self.tp if self.moe_tp_extend_ep else self.ep

    @property
    def ranks_per_stage(self) -> int:
        """Ranks that hold one pipeline stage once; the rest of a world is data parallel."""
        return math.lcm(self.tp, self.etp_size * self.num_expert_groups)

    @property
    def ranks_per_model(self) -> int:
        return self.ranks_per_stage * self.pp

    def ranks_per_replica(self, cp: int) -> int:
        """Ranks that train one copy of the model where `cp` of them share the tokens of a sequence; experts are spread over these too."""
        return self.pp * math.lcm(self.tp * cp, self.etp_size * self.num_expert_groups)

    def ranks(self) -> tuple[Coords, ...]:
        """The coordinates of all ranks that hold a part of their own, in the order (pp, rank of the stage); each has a file."""
        return tuple(self.coords(p, rank) for p in range(self.pp) for rank in range(self.ranks_per_stage))

    def coords(self, pp_rank: int, rank: int) -> Coords:
        """Where rank number `rank` of a stage stands: tensor-parallel ranks are neighbours, and so are those of an expert."""
        divisor = self.tp if self.moe_tp_extend_ep else self.etp_size
        return Coords(rank % self.tp, pp_rank, rank // divisor % self.ep)

    def expert_group(self, at: Coords) -> int:
        """Which part of the experts a rank holds."""
        return at.ep * self.tp + at.tp if self.moe_tp_extend_ep else at.ep

    def expert_tp_rank(self, at: Coords) -> int:
        """Which part of each of its experts a rank holds."""
        return at.tp % self.etp_size

    # Layers

    def num_positions(self, num_layers: int) -> int:
        return num_layers + len(self.noop_layers)

    def positions(self, num_layers: int) -> tuple[int | None, ...]:
        """The layer at each position of the pipeline; None for an empty one."""
        empty, numbers = frozenset(self.noop_layers), iter(range(num_layers))
        return tuple(None if position in empty else next(numbers) for position in range(self.num_positions(num_layers)))

    def num_chunks(self, num_layers: int) -> int:
        """Virtual stages of a rank; 1 without them."""
        return 1 if self.vpp is None else self.num_positions(num_layers) // self.pp // self.vpp

    def chunks(self, num_layers: int, pp_rank: int) -> tuple[tuple[int | None, ...], ...]:
        """The layers of each virtual stage of a rank, in order, as numbers of the model's layers; None is an empty one."""
        layers = self.positions(num_layers)
        return tuple(tuple(layers[start:end]) for start, end in self._blocks(num_layers, pp_rank))

    def _blocks(self, num_layers: int, pp_rank: int) -> list[tuple[int, int]]:
        """First and last-but-one position of each chunk."""
        if self.num_layer_list is not None:
            start = sum(self.num_layer_list[:pp_rank])
            return [(start, start + self.num_layer_list[pp_rank])]
        size = self.vpp or self.num_positions(num_layers) // self.pp
        starts = [(v * self.pp + pp_rank) * size for v in range(self.num_chunks(num_layers))]
        return [(start, start + size) for start in starts]

    # Whether it fits

    def check(self, shape: Shape) -> None:
        """Raises ManyErrors that names every size which does not fit the model."""
        found = [f"{field}={self.text(field)}: {message}" for field, message in self.problems(shape)]
        if found:
            raise ManyErrors(found)

    def problems(self, shape: Shape) -> Iterator[tuple[str, str]]:
        """(field, what is wrong with it) for everything that does not fit the model."""
        yield from self._tensor_problems(shape)
        yield from self._layer_problems(shape.num_layers)
        yield from self._expert_problems(shape)

    def _tensor_problems(self, shape: Shape) -> Iterator[tuple[str, str]]:
        rules = [rule.unpacked for rule in _distinct(shape) if rule.expert is None]
        sizes = [("query groups", layout.num_groups) for layout, _ in rules if isinstance(layout, Qkv)]
        sizes += [("query groups", layout.units) for layout, _ in rules if isinstance(layout, Sharded) and layout.units is not None]
        sizes += [("attention heads", shape.num_attention_heads)]
        sizes += [("ffn columns", shapes[0][0]) for layout, shapes in rules if isinstance(layout, GateUp)]
        for what, size in dict.fromkeys(sizes):
            if size % self.tp:
                yield "tp", f"must divide the model's {size} {what}"

    def _layer_problems(self, num_layers: int) -> Iterator[tuple[str, str]]:
        if self.num_layer_list is not None:
            yield from self._list_problems(num_layers)
            return
        positions = self.num_positions(num_layers)
        if len(set(self.noop_layers)) < len(self.noop_layers) or not all(0 <= position < positions for position in self.noop_layers):
            yield "noop_layers", f"must be different positions from 0 to {positions - 1}, the empty ones counted"
        layers = f"{num_layers} layers" + (f" and {len(self.noop_layers)} empty ones" if self.noop_layers else "")
        if positions % self.pp:
            yield "pp", f"must divide the model's {layers}"
        elif self.vpp is not None:
            yield from self._virtual_problems(positions // self.pp)

    def _virtual_problems(self, per_stage: int) -> Iterator[tuple[str, str]]:
        assert self.vpp is not None
        if self.pp == 1:
            yield "vpp", "needs several pipeline stages; set pp above 1, or leave it out"
        elif per_stage % self.vpp:
            yield "vpp", f"layers per virtual stage must divide the {per_stage} layers of each of the {self.pp} stages"
        elif self.vpp == per_stage:
            yield "vpp", f"is all of the {per_stage} layers of a stage; fewer make virtual stages, or leave it out"

    def _list_problems(self, num_layers: int) -> Iterator[tuple[str, str]]:
        assert self.num_layer_list is not None
        if self.vpp is not None:
            yield "num_layer_list", "stands beside vpp, which needs equal stages; set only one of them"
        if self.noop_layers:
            yield "num_layer_list", "stands beside noop_layers; set only one of them"
        if len(self.num_layer_list) != self.pp:
            yield "num_layer_list", f"has {len(self.num_layer_list)} stages, but pp={self.pp}"
        if min(self.num_layer_list, default=0) < 1:
            yield "num_layer_list", "must give every stage at least one layer"
        if sum(self.num_layer_list) != num_layers:
            yield "num_layer_list", f"has the sum {sum(self.num_layer_list)}, but the model has {num_layers} layers"

    def _expert_problems(self, shape: Shape) -> Iterator[tuple[str, str]]:
        experts = num_experts(shape)
        if not experts:
            asked = {"ep": self.ep > 1, "etp": self.etp is not None, "moe_tp_extend_ep": self.moe_tp_extend_ep}
            yield from ((field, "the model has no experts; leave it out") for field, is_set in asked.items() if is_set)
            return
        if experts % self.num_expert_groups:
            times = f" times tp={self.tp}" if self.moe_tp_extend_ep else ""
            yield "ep", f"{times.removeprefix(' ')} must divide the model's {experts} experts".lstrip()
        if self.moe_tp_extend_ep and self.etp is not None:
            yield "etp", "has no effect beside moe_tp_extend_ep, which leaves experts whole; set only one of them"
        if self.tp % self.etp_size:
            yield "etp", f"must divide tp={self.tp}"
        rules = [rule.unpacked for rule in _distinct(shape) if rule.expert is not None]
        sizes = {shapes[0][0] for layout, shapes in rules if isinstance(layout, GateUp)}
        for size in sorted(sizes):
            if size % self.etp_size:
                yield "tp" if self.etp is None else "etp", f"must divide the model's {size} expert ffn columns"

    # As text and JSON

    def text(self, field: str) -> str:
        """The value of a field as it would be typed."""
        value: object = getattr(self, field)
        return ",".join(map(str, cast("tuple[int, ...]", value))) if isinstance(value, tuple) else str(value)

    def __str__(self) -> str:
        """`tp 2, pp 2`, and whatever else is not at its default."""
        others = [f for f in dataclasses.fields(ParallelLayout) if f.name not in ("tp", "pp") and getattr(self, f.name) != f.default]
        return ", ".join([f"tp {self.tp}", f"pp {self.pp}", *(f"{f.name} {self.text(f.name)}" for f in others)])

    def as_json(self) -> dict[str, Any]:
        """The fields of a ParallelLayout, for a manifest; `ParallelLayout.from_json` reads them."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(ParallelLayout)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> ParallelLayout:
        """The cut that `as_json` wrote; fields that are absent have their defaults, others are left alone."""
        known = {field.name for field in dataclasses.fields(ParallelLayout)}
        kept: dict[str, Any] = {}
        for name, value in values.items():
            if name in known:
                kept[name] = tuple(cast("list[int]", value)) if isinstance(value, list) else value
        return ParallelLayout(**kept)


WHOLE = ParallelLayout()
"""One rank holds everything."""


def _distinct(shape: Shape) -> tuple[Rule, ...]:
    """One rule of every kind in the layers of a model: experts and layers that are alike count once."""
    layers = {id(layer): layer for layer in rules_for(shape).layers}.values()
    kinds = {(rule.layout, rule.shapes, rule.expert is None): rule for layer in layers for rule in layer}
    return tuple(kinds.values())
