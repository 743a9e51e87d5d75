"""Adapters that Megatron's ranks save, in MindSpeed's naming, and adapters of either kind;
`peft_files` has Hugging Face's.

The format of an adapter checkpoint here and in MindSpeed-LLM (`--lora-ckpt-filter`): folders,
tracker and files of any mcore checkpoint (see `mcore`), whose `model` holds for every adapted
linear layer, beside or instead of the base weights,

    {module}.lora_A.default.weight    [r, in]; of a row-parallel layer this rank's columns of A [r,
    in / tp], else alike {module}.lora_B.default.weight    [out / tp, r], rows as in the layer's own
    weight; of a row-parallel layer [out, r], alike {module}.base_layer.weight|bias   the base
    weight of an adapted layer, where base weights are saved too

with {module} as in `decoder.layers.0.self_attention.linear_qkv`, and whose `args` has lora_r,
lora_alpha and lora_target_modules. The scale is lora_alpha / lora_r. q, k and v (gate and up) share
one A, since Megatron fuses them into one layer. A trainer that saves LoRA writes this.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from msrl.checkpoint import tensor_layouts as layouts
from msrl.checkpoint.adapters import peft as peft_files
from msrl.checkpoint.adapters.merge import Adapter, Delta
from msrl.checkpoint.adapters.peft import FACTOR, PREFIX, delta_of, read_peft
from msrl.checkpoint.hf.weight_files import some
from msrl.checkpoint.mcore.arguments import loaded_from
from msrl.checkpoint.mcore.files import TRACKER, read_rank_file
from msrl.checkpoint.mcore.locate import find_checkpoint
from msrl.checkpoint.source import with_empty_layers
from msrl.checkpoint.torch_files.reader import spec_of
from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.rules import Rule, Sharded
from msrl.models.shape import Shape
from msrl.models.stages import stage_tensors


def read_adapter(folder: Path, shape: Shape) -> Adapter:
    """The adapter in `folder`, PEFT's or mcore's. Raises MsrlError when it is neither, damaged, or
    asks for what is not supported.
    """
    if (folder / peft_files.CONFIG).is_file():
        return read_peft(folder)
    if (folder / TRACKER).is_file():
        return read_mcore_lora(folder, shape)
    raise MsrlError(
        f"{folder}: no adapter; there is neither {peft_files.CONFIG} (PEFT) nor {TRACKER} (mcore)"
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """One rank's A and B of a layer."""

    shard: int
    a: Tensor
    b: Tensor


def read_mcore_lora(save: Path, shape: Shape, iteration: int | None = None) -> Adapter:
    """The adapter in an mcore checkpoint, alone or beside the base weights, joined over its ranks;
    of its newest iteration unless told.
    """
    found = find_checkpoint(save, iteration)
    contents = {at: read_rank_file(path) for at, path in found.files.items()}
    models = {
        at: {name: t for name, t in content["model"].items() if ".lora_" in name}
        for at, content in contents.items()
    }
    if not any(models.values()):
        raise MsrlError(
            f"{save}: there is no adapter in it (no tensor is named ...lora_A.default.weight)"
        )
    args = vars(next(iter(contents.values()))["args"])
    rank, alpha = args.get("lora_r"), args.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise MsrlError(
            f"{next(iter(found.files.values()))}: its arguments lack lora_r and lora_alpha, so the scale is not known"
        )
    cut = with_empty_layers(found.cut, contents[Coords()]["args"], shape, models)
    cut.check(shape)
    deltas = dict[str, Delta]()
    for rule, parts in _adapted(shape, cut, models, str(save)):
        deltas |= _joined(rule, parts, alpha / rank, str(save))
    wrong = {delta.rank for delta in deltas.values()} - {rank}
    if wrong:
        raise MsrlError(f"{save}: says lora_r={rank}, but holds adapters of rank {sorted(wrong)}")
    adapter = Adapter(str(save), float(alpha), deltas, {})
    adapter.check(all_rules(shape))
    return adapter


def adapted_base(save: Path) -> Path | None:
    """The folder of the base model of an mcore adapter checkpoint, where its arguments name one
    that is still there.
    """
    return loaded_from(save, read_rank_file(find_checkpoint(save).files[Coords()])["args"])


def _adapted(
    shape: Shape, cut: ParallelLayout, models: Mapping[Coords, Mapping[str, Tensor]], where: str
) -> list[tuple[Rule, list[_Part]]]:
    """The adapted rules, each with the parts of its shards.

    Raises MsrlError for adapter tensors that belong to no linear layer, and for a layer that some
    ranks have an adapter of and others lack.
    """
    found: dict[str, tuple[Rule, dict[int, _Part]]] = {}
    sizes: dict[str, int] = {}
    for at in cut.ranks():
        layers, left = _by_module(models[at], where), dict(models[at])
        for placed in stage_tensors(shape, cut, at):
            ab = layers.pop(placed.name.removesuffix(".weight"), None)
            if ab is None or not placed.name.endswith(".weight"):
                continue
            if set(ab) != {"A", "B"}:
                raise MsrlError(
                    f"{where}, rank {tuple(at)}: {placed.name} has lora_{next(iter(ab))} alone; it needs A and B"
                )
            found.setdefault(placed.rule.mcore, (placed.rule, {}))[1].setdefault(
                placed.shard, _Part(placed.shard, ab["A"], ab["B"])
            )
            sizes[placed.rule.mcore] = placed.num_shards
        if layers:
            raise MsrlError(
                f"{where}, rank {tuple(at)}: {len(left)} adapter tensors, of which {some(sorted(layers))} belong to no layer"
            )
    for name, (_, parts) in found.items():
        if len(parts) < sizes[name]:
            raise MsrlError(
                f"{where}: {len(parts)} of {sizes[name]} ranks have an adapter of {name}; copy or save the checkpoint again"
            )
    return [(rule, [parts[shard] for shard in sorted(parts)]) for rule, parts in found.values()]


def _by_module(tensors: Mapping[str, Tensor], where: str) -> dict[str, dict[str, Tensor]]:
    """A and B by the name of their layer."""
    found: dict[str, dict[str, Tensor]] = {}
    adapters: set[str] = set()
    for name, tensor in tensors.items():
        match = FACTOR.fullmatch(name.replace(PREFIX, ""))
        if match is None:
            raise MsrlError(
                f"{where}: {name} is not the A or B of a linear layer, which is all that can be merged"
            )
        adapters.add(match["adapter"] or "default")
        found.setdefault(match["module"], {})[match["part"]] = tensor
    if len(adapters) > 1:
        raise MsrlError(
            f"{where}: holds several adapters ({', '.join(sorted(adapters))}); one can be merged"
        )
    return found


def _joined(rule: Rule, parts: list[_Part], scale: float, where: str) -> dict[str, Delta]:
    """The deltas of a rule's Hugging Face tensors: B is laid out like the weight, A like its input.
    """
    row_parallel = isinstance(rule.layout, Sharded) and rule.layout.axis == 1
    whole = [part.b if row_parallel else part.a for part in parts]
    if any(spec_of(t) != spec_of(whole[0]) or not torch.equal(t, whole[0]) for t in whole[1:]):
        raise MsrlError(
            f"{where}: ranks disagree on lora_{'B' if row_parallel else 'A'} of {rule.mcore}, which they share"
        )
    if row_parallel:
        a, b = torch.cat([part.a for part in parts], dim=1), (whole[0],)
    else:
        a, b = (
            whole[0],
            layouts.unfuse(rule.layout, layouts.join(rule.layout, [part.b for part in parts])),
        )
    return {
        name: delta_of(where, name.removesuffix(".weight"), {"A": a, "B": part.contiguous()}, scale)
        for name, part in zip(rule.hf, b, strict=True)
    }
