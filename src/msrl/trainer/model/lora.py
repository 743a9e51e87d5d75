"""LoRA while training (arXiv:2106.09685): W x becomes W x + s B A x with s = alpha / r; W stays, A [r, in] and B [out, r] are trained.

Tensor-parallel: a column-parallel layer has all of A and its own rows of B, a row-parallel one its own columns of A and all of B, as
`checkpoint/lora_files.py` says of the files; a layer that every rank holds whole has all of both. Adapters stand beside the layers that
they belong to, which keep their names. q, k and v (gate and up) share one A; where only some of them are adapted, the rows of B of the
others stay zero. Every expert of a mixture has its own, on the ranks that hold it.
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
from msrl.errors import MsrlError
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.rules import Layout, Replicated, Sharded
from msrl.models.select import adapter_problem, is_layer
from msrl.models.shape import Shape
from msrl.models.stages import StageTensor, stage_tensors
from msrl.trainer.model.build import mark_expert_copy, mark_shard
from msrl.trainer.settings import Lora

Key = tuple[str, str]  # Megatron's name of the base weight, with global layer numbers, and "A" or "B"


class _Part(torch.nn.Module):
    """One of the two factors; `weight` is its whole content, so that names end as in every adapter file."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)


@dataclass(frozen=True, slots=True)
class Adapted:
    """An adapted layer of this rank."""

    linear: torch.nn.Module
    placed: StageTensor

    def parameter(self, part: str) -> torch.nn.Parameter:
        return getattr(self.linear, f"lora_{part}")["default"].weight

    def name(self, part: str) -> str:
        """The name of a factor among the model's parameters."""
        return factor_name(self.placed, part)


def factor_name(placed: StageTensor, part: str) -> str:
    return f"{placed.name.removesuffix('.weight')}.lora_{part}.default.weight"


def factor_layout(layout: Layout, part: str) -> Layout:
    """How a factor is cut over the ranks of its layer, from how the base weight is."""
    if part == "A":
        return layout if _is_row(layout) else Replicated()
    return Replicated() if _is_row(layout) else layout


def _is_row(layout: Layout) -> bool:
    """Whether a weight is cut along its inputs."""
    return isinstance(layout, Sharded) and layout.axis == 1


class Adapters:
    """All adapters of a model on this rank."""

    def __init__(self, model: torch.nn.Module, shape: Shape, cut: ParallelLayout, at: Coords, settings: Lora, seed: int) -> None:
        """Freeze the model and put adapters beside the chosen layers. Raises MsrlError when a target chooses nothing."""
        self.settings, self._shape = settings, shape
        self._is_on = True
        model.requires_grad_(False)
        modules = dict(model.named_modules())
        self.all = tuple(
            Adapted(modules[placed.name.removesuffix(".weight")], placed)
            for placed in stage_tensors(shape, cut, at)
            if is_layer(placed.rule.mcore, placed.rule.hf, settings.targets)
        )
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
        a = _initial(self.settings.rank, whole_inputs, seed, placed.rule.mcore)
        a = layouts.split(factor_layout(placed.layout, "A"), a, placed.num_shards)[placed.shard]
        b = torch.zeros(base.shape[0], self.settings.rank)
        for part, value in (("A", a), ("B", b)):
            setattr(linear, f"lora_{part}", torch.nn.ModuleDict({"default": _Part(value.to(base.device, base.dtype))}))
            _mark(adapted, part)
        self._mask(adapted)
        linear.register_forward_hook(self._hook_of(placed))

    def _hook_of(self, placed: StageTensor) -> Callable[[Any, tuple[Tensor, ...], Any], Any]:
        if placed.rule.expert is not None:
            return functools.partial(self._expert_hook, is_row=_is_row(placed.layout))
        if isinstance(placed.layout, Replicated):
            return self._whole_hook
        return self._row_hook if _is_row(placed.layout) else self._column_hook

    def _mask(self, adapted: Adapted) -> None:
        """Keep the rows of B at zero that belong to layers which are fused with an adapted one."""
        rule = adapted.placed.rule
        chosen = [is_layer(rule.mcore, (), self.settings.targets) or is_layer("", (name,), self.settings.targets) for name in rule.hf]
        if all(chosen):
            return
        ones = [torch.full((size[0], 1), float(is_on)) for size, is_on in zip(rule.shapes, chosen, strict=True)]
        parameter = adapted.parameter("B")
        mask = layouts.shard(rule.layout, ones, adapted.placed.shard, adapted.placed.num_shards).to(parameter.device, parameter.dtype)
        parameter.register_hook(lambda grad: grad * mask)

    def _dropped(self, linear: torch.nn.Module, x: Tensor, *, is_split: bool, draws: tuple[str, ...] = ()) -> Tensor:
        """Dropout in front of A. Ranks that hold different parts of x draw different numbers: from Megatron's generator named by `draws`,
        which is that of tensor-parallel ranks unless told.
        """
        if not (self.settings.dropout and linear.training):
            return x
        if not is_split:
            return F.dropout(x, self.settings.dropout)
        tracker: Any = get_cuda_rng_tracker()
        with tracker.fork(*draws):
            return F.dropout(x, self.settings.dropout)

    def _column_hook(self, linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        if not self._is_on:
            return output
        is_split = linear.config.sequence_parallel
        low = F.linear(self._dropped(linear, inputs[0], is_split=is_split), linear.lora_A["default"].weight)
        low = gather_from_sequence_parallel_region(low) if is_split else copy_to_tensor_model_parallel_region(low)
        return output[0] + self.settings.scale * F.linear(low, linear.lora_B["default"].weight), output[1]

    def _row_hook(self, linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        if not self._is_on:
            return output
        low = F.linear(self._dropped(linear, inputs[0], is_split=True), linear.lora_A["default"].weight)
        reduce = reduce_scatter_to_sequence_parallel_region if linear.config.sequence_parallel else reduce_from_tensor_model_parallel_region
        return output[0] + self.settings.scale * F.linear(reduce(low), linear.lora_B["default"].weight), output[1]

    def _whole_hook(self, linear: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not self._is_on:
            return output
        low = F.linear(self._dropped(linear, inputs[0], is_split=linear.config.sequence_parallel), linear.lora_A["default"].weight)
        return output + self.settings.scale * F.linear(low, linear.lora_B["default"].weight)

    def _expert_hook(self, linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any], *, is_row: bool) -> tuple[Tensor, Any]:
        """The parts of an expert see the same tokens, and the dispatcher sums their outputs; so each has a share of the gradient of the
        factor that all of them hold.
        """
        if not self._is_on:
            return output
        a, b = linear.lora_A["default"].weight, linear.lora_B["default"].weight
        if is_row:
            b = copy_to_tensor_model_parallel_region(b, linear.tp_group)
        else:
            a = copy_to_tensor_model_parallel_region(a, linear.tp_group)
        x = self._dropped(linear, inputs[0], is_split=True, draws=(get_expert_parallel_rng_tracker_name(),))
        return output[0] + self.settings.scale * F.linear(F.linear(x, a), b), output[1]

    @contextmanager
    def off(self) -> Iterator[None]:
        """The base model, as long as the block lasts."""
        self._is_on = False
        try:
            yield
        finally:
            self._is_on = True

    def merged(self, name: str) -> Tensor | None:
        """A base weight of this rank with its adapter added, the sum taken in float32; None for a weight without one."""
        adapted = self._by_name.get(name)
        if adapted is None:
            return None
        base: Any = adapted.linear.weight
        product = adapted.parameter("B").detach().float() @ adapted.parameter("A").detach().float()
        return torch.add(base.detach().float(), product, alpha=self.settings.scale).to(base.dtype)

    def named(self) -> dict[str, torch.nn.Parameter]:
        """The trained parameters by name."""
        return {adapted.name(part): adapted.parameter(part) for adapted in self.all for part in "AB"}

    def load(self, root: Path, step: int) -> None:
        """Take the adapters of a checkpoint of any layout. Raises MsrlError when it has not exactly these."""
        found = find_checkpoint(root, step)
        files = {at: read_rank_file(path)["model"] for at, path in found.files.items()}
        with torch.no_grad():
            for name, value in self.recut(found.layout, files, str(root)).items():
                self.named()[name].copy_(value)

    def recut(self, cut: ParallelLayout, files: Mapping[Coords, Mapping[str, Tensor]], where: str) -> dict[str, Tensor]:
        """This rank's part of tensors that are named and cut like adapters, from the files of all ranks of a cut.

        Raises MsrlError when one is missing or has another shape.
        """
        shards: dict[Key, dict[int, Tensor]] = {}
        counts: dict[Key, int] = {}
        for at, tensors in files.items():
            for placed in stage_tensors(self._shape, cut, at):
                for part in "AB":
                    if factor_name(placed, part) in tensors:
                        key = (placed.rule.mcore, part)
                        shards.setdefault(key, {})[placed.shard] = tensors[factor_name(placed, part)]
                        counts[key] = placed.num_shards
        whole = {key: [found[shard] for shard in sorted(found)] for key, found in shards.items() if len(found) == counts[key]}
        mine = {a.name(part): _own(a.placed, part, whole, where) for a in self.all for part in "AB"}
        for name, parameter in self.named().items():
            if mine[name].shape != parameter.shape:
                raise MsrlError(f"{where}: {name} is {list(mine[name].shape)}, but train.lora makes it {list(parameter.shape)}")
        return mine


def _mark(adapted: Adapted, part: str) -> None:
    """Tell Megatron how a factor is cut, and among whom its gradients are summed."""
    parameter, layout, linear = adapted.parameter(part), factor_layout(adapted.placed.layout, part), cast("Any", adapted.linear)
    is_cut, is_expert = not isinstance(layout, Replicated), adapted.placed.rule.expert is not None
    vars(parameter).update(allreduce=not is_expert)
    if is_cut:
        mark_shard(parameter, int(part == "A"))
    elif is_expert:
        mark_expert_copy(parameter)
    else:
        vars(parameter).update(sequence_parallel=linear.config.sequence_parallel)


def _own(placed: StageTensor, part: str, shards: Mapping[Key, Sequence[Tensor]], where: str) -> Tensor:
    """A rank's part of a factor, from all of its shards in another cut."""
    found = shards.get((placed.rule.mcore, part))
    if found is None:
        raise MsrlError(f"{where}: has no adapter of {placed.rule.mcore}; train.lora.targets must be those that it was trained with")
    layout = factor_layout(placed.layout, part)
    return layouts.split(layout, layouts.join(layout, found), placed.num_shards)[placed.shard]


def _initial(rank: int, inputs: int, seed: int, name: str) -> Tensor:
    """A's first values, [r, in], the same in every layout: uniform in +-1 / sqrt(in), as PEFT has them."""
    generator = torch.Generator(device="cpu").manual_seed((seed << 32) ^ zlib.crc32(name.encode()))
    bound = 1 / math.sqrt(inputs)
    return torch.rand(rank, inputs, generator=generator, device="cpu") * (2 * bound) - bound
