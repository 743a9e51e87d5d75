"""LoRA during training (arXiv:2106.09685).

W x becomes W x + s B A x with s = alpha / r. W is frozen; A [r, in] and B [out, r] are trained.

Under tensor parallelism a column-parallel layer has all of A and its own rows of B, a row-parallel
one its own columns of A and all of B, as in the files of `checkpoint/adapters`; a replicated layer
has all of both. Adapters are submodules of the layers that they adapt, which keep their names. q, k
and v (gate and up) share one A; where only some of them are adapted, the rows of B of the others
stay zero. Every expert of a mixture has its own adapter, on the ranks that hold it. The score head
of a reward model has no adapter; its weight is trained alongside them.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from torch import Tensor

from msrl.checkpoint import tensor_layouts as layouts
from msrl.checkpoint.mcore.files import read_rank_file
from msrl.checkpoint.mcore.locate import find_checkpoint
from msrl.config.sections.train import LoraConfig
from msrl.errors import MsrlError
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.reward_head import WEIGHT as SCORE_HEAD
from msrl.models.rules import Layout, Replicated, Sharded
from msrl.models.select import adapter_problem, is_layer
from msrl.models.shape import Shape
from msrl.models.stages import StageTensor, stage_tensors
from msrl.trainer.model.build import mark_expert_copy, mark_shard

# Megatron's name of the weight, with global layer numbers, and "A", "B" or `COMPLETE`.
Key = tuple[str, str]
COMPLETE = ""  # in place of a factor: the weight itself is trained
_Product = Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # B A x of a layer, x, A and B


class _Factor(torch.nn.Module):
    """One of the two factors; its parameter is called `weight`, as in every adapter file."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


@dataclass(frozen=True, slots=True)
class Adapted:
    """Adapted layer of this rank."""

    linear: torch.nn.Module
    placed: StageTensor

    def parameter(self, factor: str) -> torch.nn.Parameter:
        return getattr(self.linear, f"lora_{factor}")["default"].weight

    def name(self, factor: str) -> str:
        """Return the name of a factor among the model's parameters."""
        return factor_name(self.placed, factor)


def factor_name(placed: StageTensor, factor: str) -> str:
    """Return the name of the factor of a weight among the model's parameters."""
    if factor == COMPLETE:
        return placed.name
    return f"{placed.name.removesuffix('.weight')}.lora_{factor}.default.weight"


def factor_layout(layout: Layout, factor: str) -> Layout:
    """Return the tensor layout of a factor, from the layout of the base weight."""
    if factor == COMPLETE:
        return layout
    if factor == "A":
        return layout if _is_row(layout) else Replicated()
    return Replicated() if _is_row(layout) else layout


def _is_row(layout: Layout) -> bool:
    """Return True if a weight is split along its inputs."""
    return isinstance(layout, Sharded) and layout.axis == 1


def trained_factors(placed: StageTensor) -> tuple[str, ...]:
    """Return the factors that adapter files may have of a weight."""
    return (COMPLETE,) if placed.rule.mcore == SCORE_HEAD else ("A", "B")


class Adapters:
    """Adapters of a model on this rank, and the score head of a reward model."""

    def __init__(
        self,
        model: torch.nn.Module,
        shape: Shape,
        layout: ParallelLayout,
        at: Coords,
        settings: LoraConfig,
        seed: int,
    ) -> None:
        """Freeze the model except for a score head, and add adapters to the target layers.

        Raises MsrlError for a layer that cannot have one.
        """
        assert settings.rank is not None
        self.settings, self._shape, self.rank = settings, shape, settings.rank
        self.scale = settings.alpha / settings.rank
        self._is_initial = False
        # A and B by layer, if they do not start as new ones, whose product is 0.
        self._start: dict[torch.nn.Module, tuple[Tensor, Tensor]] = {}
        model.requires_grad_(False)
        modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
        tensors = stage_tensors(shape, layout, at)
        self.all = tuple(
            Adapted(modules[placed.name.removesuffix(".weight")], placed)
            for placed in tensors
            if is_layer(placed.rule.mcore, placed.rule.hf, settings.targets)
        )
        self._heads = {
            placed: parameters[placed.name] for placed in tensors if placed.rule.mcore == SCORE_HEAD
        }
        for head in self._heads.values():
            head.requires_grad_(True)
        self._by_name = {adapted.placed.name: adapted for adapted in self.all}
        for adapted in self.all:
            self._attach(adapted, seed)

    def _attach(self, adapted: Adapted, seed: int) -> None:
        placed, linear = adapted.placed, adapted.linear
        problem = adapter_problem(placed.rule)
        if problem is not None:
            raise MsrlError(f"train.lora.targets: {placed.rule.mcore} {problem}")
        base: Any = linear.weight
        whole_inputs = base.shape[1] * (placed.num_shards if _is_row(placed.layout) else 1)
        a = _initial(self.rank, whole_inputs, seed, placed.rule.mcore)
        a = layouts.split(factor_layout(placed.layout, "A"), a, placed.num_shards)[placed.shard]
        b = torch.zeros(base.shape[0], self.rank)
        for factor, value in (("A", a), ("B", b)):
            setattr(
                linear,
                f"lora_{factor}",
                torch.nn.ModuleDict({"default": _Factor(value.to(base.device, base.dtype))}),
            )
            _mark(adapted, factor)
        self._mask(adapted)
        linear.register_forward_hook(functools.partial(self._add, self._select_product(placed)))

    def _select_product(self, placed: StageTensor) -> _Product:
        if placed.rule.expert is not None:
            return functools.partial(self._expert_product, is_row=_is_row(placed.layout))
        if isinstance(placed.layout, Replicated):
            return self._replicated_product
        return self._row_product if _is_row(placed.layout) else self._column_product

    def _add(self, product: _Product, linear: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
        """Add the adapter to the output of a layer, which is a tensor or a tensor and a bias."""
        factors = self._factors(linear)
        if factors is None:
            return output
        added = self.scale * product(linear, inputs[0], *factors)
        return (output[0] + added, output[1]) if isinstance(output, tuple) else output + added

    def _mask(self, adapted: Adapted) -> None:
        """Keep the rows of B at zero that belong to layers fused with an adapted one."""
        rule = adapted.placed.rule
        chosen = [
            is_layer(rule.mcore, (), self.settings.targets)
            or is_layer("", (name,), self.settings.targets)
            for name in rule.hf
        ]
        if all(chosen):
            return
        ones = [
            torch.full((size[0], 1), float(is_on))
            for size, is_on in zip(rule.shapes, chosen, strict=True)
        ]
        parameter = adapted.parameter("B")
        mask = layouts.shard(rule.layout, ones, adapted.placed.shard, adapted.placed.num_shards).to(
            parameter.device, parameter.dtype
        )
        parameter.register_hook(lambda grad: grad * mask)

    def _apply_dropout(
        self, linear: torch.nn.Module, x: Tensor, *, is_split: bool, draws: tuple[str, ...] = ()
    ) -> Tensor:
        """Apply dropout before A.

        Ranks with different slices of x draw different numbers, from the generator of Megatron with
        the name `draws`. The default is the generator of tensor-parallel ranks.
        """
        if not (self.settings.dropout and linear.training):
            return x
        if not is_split:
            return F.dropout(x, self.settings.dropout)
        tracker: Any = get_cuda_rng_tracker()
        with tracker.fork(*draws):
            return F.dropout(x, self.settings.dropout)

    def _column_product(self, linear: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        is_split = linear.config.sequence_parallel
        low = F.linear(self._apply_dropout(linear, x, is_split=is_split), a)
        low = (
            gather_from_sequence_parallel_region(low)
            if is_split
            else copy_to_tensor_model_parallel_region(low)
        )
        return F.linear(low, b)

    def _row_product(self, linear: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        low = F.linear(self._apply_dropout(linear, x, is_split=True), a)
        reduce = (
            reduce_scatter_to_sequence_parallel_region
            if linear.config.sequence_parallel
            else reduce_from_tensor_model_parallel_region
        )
        return F.linear(reduce(low), b)

    def _replicated_product(self, linear: Any, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        is_split = linear.config.sequence_parallel
        return F.linear(F.linear(self._apply_dropout(linear, x, is_split=is_split), a), b)

    def _expert_product(
        self, linear: Any, x: Tensor, a: Tensor, b: Tensor, *, is_row: bool
    ) -> Tensor:
        """Return the product of the adapter of an expert.

        The shards of an expert see the same tokens and the dispatcher sums their outputs, so each
        contributes to the gradient of the factor that all of them hold.
        """
        if is_row:
            b = copy_to_tensor_model_parallel_region(b, linear.tp_group)
        else:
            a = copy_to_tensor_model_parallel_region(a, linear.tp_group)
        x = self._apply_dropout(
            linear, x, is_split=True, draws=(get_expert_parallel_rng_tracker_name(),)
        )
        return F.linear(F.linear(x, a), b)

    def _factors(self, linear: Any) -> tuple[Tensor, Tensor] | None:
        """Return the A and B that a layer adds at present; None if it adds nothing."""
        if self._is_initial:
            return self._start.get(linear)
        return linear.lora_A["default"].weight, linear.lora_B["default"].weight

    @contextmanager
    def initial(self) -> Iterator[None]:
        """Run the model as it was before the training inside the block."""
        self._is_initial = True
        try:
            yield
        finally:
            self._is_initial = False

    def factors(self, name: str) -> list[tuple[str, Tensor]]:
        """Return "A" and "B" of a base weight of this rank; nothing without an adapter."""
        adapted = self._by_name.get(name)
        if adapted is None:
            return []
        return [(factor, adapted.parameter(factor).detach()) for factor in "AB"]

    def merged_weight(self, name: str) -> Tensor | None:
        """Return a base weight of this rank plus its adapter, added in float32.

        None for a weight without an adapter.
        """
        adapted = self._by_name.get(name)
        if adapted is None:
            return None
        base: Any = adapted.linear.weight
        product = adapted.parameter("B").detach().float() @ adapted.parameter("A").detach().float()
        return torch.add(base.detach().float(), product, alpha=self.scale).to(base.dtype)

    def trained_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters by name."""
        adapters = {
            adapted.name(factor): adapted.parameter(factor)
            for adapted in self.all
            for factor in "AB"
        }
        return adapters | {placed.name: weight for placed, weight in self._heads.items()}

    def load(self, root: Path, step: int) -> None:
        """Load the trained parameters of a checkpoint of any parallel layout.

        Raises MsrlError if it lacks one or has one of another shape.
        """
        self._load(root, step, needs_head=True)

    def start_from(self, root: Path) -> None:
        """Start from the adapters of the latest checkpoint of an earlier training.

        A score head starts from the head of the checkpoint, if there is one.

        Raises MsrlError if it lacks an adapter or has one of another shape.
        """
        self._load(root, None, needs_head=False)
        for adapted in self.all:
            a, b = (adapted.parameter(factor).detach().clone() for factor in "AB")
            self._start[adapted.linear] = (a, b)

    def _load(self, root: Path, step: int | None, *, needs_head: bool) -> None:
        checkpoint = find_checkpoint(root, step)
        files = {at: read_rank_file(path)["model"] for at, path in checkpoint.files.items()}
        shards = self.reshard(checkpoint.layout, files, str(root), needs_head=needs_head)
        with torch.no_grad():
            for name, value in shards.items():
                self.trained_parameters()[name].copy_(value)

    def reshard(
        self,
        layout: ParallelLayout,
        files: Mapping[Coords, Mapping[str, Tensor]],
        where: str,
        *,
        needs_head: bool = True,
    ) -> dict[str, Tensor]:
        """Return this rank's shards of adapter-like tensors from the files of a layout's ranks.

        The tensors have the names and shards of the trained parameters. Without `needs_head`, a
        score head that is in no file is omitted.

        Raises MsrlError if one is missing or has another shape.
        """
        complete = self._complete_factors(layout, files)
        heads = [h for h in self._heads if needs_head or (h.rule.mcore, COMPLETE) in complete]
        trained = (*(adapted.placed for adapted in self.all), *heads)
        local = {
            factor_name(placed, factor): _own_shard(placed, factor, complete, where)
            for placed in trained
            for factor in trained_factors(placed)
        }
        for name, value in local.items():
            parameter = self.trained_parameters()[name]
            if value.shape != parameter.shape:
                raise MsrlError(
                    f"{where}: {name} has shape {list(value.shape)}, but train.lora requires "
                    f"{list(parameter.shape)}. Set the values of train.lora of that training."
                )
        return local

    def _complete_factors(
        self, layout: ParallelLayout, files: Mapping[Coords, Mapping[str, Tensor]]
    ) -> dict[Key, list[Tensor]]:
        """Return the shards of every factor whose shards are all in the files, in their order."""
        shards: dict[Key, dict[int, Tensor]] = {}
        counts: dict[Key, int] = {}
        for at, tensors in files.items():
            for placed in stage_tensors(self._shape, layout, at):
                for factor in trained_factors(placed):
                    name, key = factor_name(placed, factor), (placed.rule.mcore, factor)
                    if name in tensors:
                        shards.setdefault(key, {})[placed.shard] = tensors[name]
                        counts[key] = placed.num_shards
        complete: dict[Key, list[Tensor]] = {}
        for key, by_shard in shards.items():
            if len(by_shard) == counts[key]:
                complete[key] = [by_shard[shard] for shard in sorted(by_shard)]
        return complete


def _mark(adapted: Adapted, factor: str) -> None:
    """Mark for Megatron how a factor is split, and over which ranks its gradients are summed."""
    parameter, layout, linear = (
        adapted.parameter(factor),
        factor_layout(adapted.placed.layout, factor),
        cast("Any", adapted.linear),
    )
    is_split, is_expert = not isinstance(layout, Replicated), adapted.placed.rule.expert is not None
    vars(parameter).update(allreduce=not is_expert)
    if is_split:
        mark_shard(parameter, int(factor == "A"))
    elif is_expert:
        mark_expert_copy(parameter)
    else:
        vars(parameter).update(sequence_parallel=linear.config.sequence_parallel)


def _own_shard(
    placed: StageTensor, factor: str, shards: Mapping[Key, Sequence[Tensor]], where: str
) -> Tensor:
    """Return a rank's shard of a factor, from all of its shards in another layout."""
    sources = shards.get((placed.rule.mcore, factor))
    if sources is None:
        raise MsrlError(
            f"{where}: no adapter of {placed.rule.mcore}. Set train.lora.targets to those of that "
            "training."
        )
    layout = factor_layout(placed.layout, factor)
    return layouts.split(layout, layouts.join(layout, sources), placed.num_shards)[placed.shard]


def _initial(rank: int, inputs: int, seed: int, name: str) -> Tensor:
    """Return the initial A, [r, in]: uniform in +-1 / sqrt(in), as in PEFT.

    It is the same in every parallel layout.
    """
    generator = torch.Generator(device="cpu").manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(inputs)
    return torch.rand(rank, inputs, generator=generator, device="cpu") * (2 * bound) - bound
