"""LoRA adapters in mcore checkpoints, in MindSpeed's naming. `peft` has Hugging Face's format.

The format comes from MindSpeed-LLM (`--lora-ckpt-filter`): folders, tracker and files of any mcore
checkpoint (see `mcore`). Each file's `model` holds, for every adapted linear layer, with or without
the base weights:

    {module}.lora_A.default.weight    [r, in], the same on all ranks; of a row-parallel layer this
                                      rank's columns, [r, in / tp]
    {module}.lora_B.default.weight    [out / tp, r], rows as in the weight of the layer; of a
                                      row-parallel layer [out, r], the same on all ranks
    {module}.base_layer.weight|bias   base weight of an adapted layer, if base weights are saved

{module} is a name such as `decoder.layers.0.self_attention.linear_qkv`. The file's `args` has
lora_r, lora_alpha and lora_target_modules; the scale is lora_alpha / lora_r. q, k and v (gate and
up) share one A, because Megatron fuses them into one layer. An adapter of a reward model comes with
its score head, `rm_head.weight`, on the last stage.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from msrl.checkpoint import tensor_layouts as layouts
from msrl.checkpoint.adapters import peft as peft_files
from msrl.checkpoint.adapters.merge import Adapter, Delta
from msrl.checkpoint.adapters.peft import FACTOR, PREFIX, make_delta, read_peft
from msrl.checkpoint.hf.weight_files import some
from msrl.checkpoint.mcore.arguments import load_folder
from msrl.checkpoint.mcore.files import TRACKER, read_rank_file
from msrl.checkpoint.mcore.locate import find_checkpoint
from msrl.checkpoint.source import with_empty_layers
from msrl.checkpoint.torch_files.reader import tensor_spec
from msrl.errors import MsrlError
from msrl.models.families import all_rules
from msrl.models.parallel_layout import Coords, ParallelLayout
from msrl.models.reward_head import HF_WEIGHT, scoring_architecture, with_score
from msrl.models.reward_head import WEIGHT as SCORE_HEAD
from msrl.models.rules import Rule, Sharded
from msrl.models.shape import Shape
from msrl.models.stages import split_chunk_name, stage_tensors


def read_adapter(folder: Path, shape: Shape) -> Adapter:
    """Read the adapter in `folder`, in PEFT's or mcore's format.

    Raises:
        MsrlError: The folder has neither format, is damaged, or needs an unsupported feature.
    """
    if (folder / peft_files.CONFIG).is_file():
        return read_peft(folder)
    if (folder / TRACKER).is_file():
        return read_mcore_lora(folder, shape)
    raise MsrlError(
        f"{folder}: not an adapter (neither {peft_files.CONFIG} of PEFT nor {TRACKER} of mcore "
        "exists)"
    )


@dataclass(frozen=True, slots=True)
class AdapterSettings:
    """Settings that a checkpoint records of its adapters."""

    rank: int
    alpha: float


def adapter_settings(save: Path) -> AdapterSettings:
    """Return the settings of the adapters in an mcore checkpoint.

    Raises:
        MsrlError: They are not recorded.
    """
    path = find_checkpoint(save).files[Coords()]
    return _settings(read_rank_file(path)["args"], path)


def _settings(arguments: object, path: Path) -> AdapterSettings:
    args = vars(arguments)
    rank, alpha = args.get("lora_r"), args.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise MsrlError(
            f"{path}: lora_r and lora_alpha are missing in the arguments, so the scale is unknown"
        )
    return AdapterSettings(rank, float(alpha))


@dataclass(frozen=True, slots=True)
class _AdapterShard:
    """A and B of a layer on one rank."""

    shard: int
    a: Tensor
    b: Tensor


def read_mcore_lora(save: Path, shape: Shape, iteration: int | str | None = None) -> Adapter:
    """Read the adapter in an mcore checkpoint and join its shards.

    The checkpoint may also contain the base weights. `iteration` defaults to the latest.
    """
    checkpoint = find_checkpoint(save, iteration)
    contents = {at: read_rank_file(path) for at, path in checkpoint.files.items()}
    models = {at: _adapter_tensors(content["model"]) for at, content in contents.items()}
    if not any(models.values()):
        raise MsrlError(
            f"{save}: contains no adapter (no tensor is named ...lora_A.default.weight)"
        )
    settings = _settings(contents[Coords()]["args"], checkpoint.files[Coords()])
    rank, alpha = settings.rank, settings.alpha
    layout = with_empty_layers(checkpoint.layout, contents[Coords()]["args"], shape, models)
    layout.check(shape)
    deltas = dict[str, Delta]()
    for rule, shards in _adapted_rules(shape, layout, models, str(save)):
        deltas |= _join_shards(rule, shards, alpha / rank, str(save))
    complete = {at: content["model"] for at, content in contents.items()}
    head = _score_head(layout, complete, shape.hidden_size, str(save))
    other_ranks = {delta.rank for delta in deltas.values()} - {rank}
    if other_ranks:
        raise MsrlError(f"{save}: lora_r={rank}, but it contains ranks {sorted(other_ranks)}")
    adapter = Adapter(str(save), alpha, deltas, head)
    if adapter.has_score_head and not shape.reward_head:
        shape = with_score(shape, scoring_architecture(shape.architecture))
    adapter.check(all_rules(shape))
    return adapter


def _score_head(
    layout: ParallelLayout,
    models: Mapping[Coords, Mapping[str, Tensor]],
    hidden_size: int,
    where: str,
) -> dict[str, Tensor]:
    """Return the score head by its Hugging Face name; nothing without one.

    It is sharded along the hidden channels over the tensor-parallel ranks of the last stage.

    Raises:
        MsrlError: A shard is missing or has another shape.
    """
    shards = {
        at.tp: tensor
        for at, model in models.items()
        for name, tensor in model.items()
        if split_chunk_name(name)[1] == SCORE_HEAD
    }
    if not shards:
        return {}
    size = (1, hidden_size // layout.tp)
    if any(rank not in shards or shards[rank].shape != size for rank in range(layout.tp)):
        shapes = {rank: list(shard.shape) for rank, shard in sorted(shards.items())}
        raise MsrlError(
            f"{where}: {SCORE_HEAD} has the shards {shapes} by tensor-parallel rank, but needs "
            f"{layout.tp} of shape {list(size)}. Restore the file."
        )
    return {HF_WEIGHT: torch.cat([shards[rank] for rank in range(layout.tp)], dim=1)}


def _adapter_tensors(model: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in model.items() if ".lora_" in name}


def adapted_base(save: Path) -> Path | None:
    """Return the folder of the adapter's base model, if the arguments name one that exists."""
    return load_folder(save, read_rank_file(find_checkpoint(save).files[Coords()])["args"])


def _adapted_rules(
    shape: Shape, layout: ParallelLayout, models: Mapping[Coords, Mapping[str, Tensor]], where: str
) -> list[tuple[Rule, list[_AdapterShard]]]:
    """Return the adapted rules, each with its shards.

    Raises:
        MsrlError: Adapter tensors belong to no linear layer, or only some ranks adapt a layer.
    """
    adapted: dict[str, tuple[Rule, dict[int, _AdapterShard]]] = {}
    sizes: dict[str, int] = {}
    for at in layout.ranks():
        layers = _group_by_module(models[at], where)
        for entry in stage_tensors(shape, layout, at):
            ab = layers.pop(entry.name.removesuffix(".weight"), None)
            if ab is None or not entry.name.endswith(".weight"):
                continue
            if set(ab) != {"A", "B"}:
                raise MsrlError(
                    f"{where}, rank {tuple(at)}: {entry.name} has only "
                    f"lora_{next(iter(ab))}, but needs A and B"
                )
            _, shards = adapted.setdefault(entry.rule.mcore, (entry.rule, {}))
            shards.setdefault(entry.shard, _AdapterShard(entry.shard, ab["A"], ab["B"]))
            sizes[entry.rule.mcore] = entry.num_shards
        if layers:
            raise MsrlError(
                f"{where}, rank {tuple(at)}: {len(models[at])} adapter tensors, "
                f"of which {some(sorted(layers))} belong to no layer"
            )
    for name, (_, shards) in adapted.items():
        if len(shards) < sizes[name]:
            raise MsrlError(
                f"{where}: {len(shards)} of {sizes[name]} ranks have an adapter of {name}. "
                "Copy or save the checkpoint again."
            )
    in_order = operator.attrgetter("shard")
    return [(rule, sorted(shards.values(), key=in_order)) for rule, shards in adapted.values()]


def _group_by_module(tensors: Mapping[str, Tensor], where: str) -> dict[str, dict[str, Tensor]]:
    """Return A and B by the name of their layer."""
    modules: dict[str, dict[str, Tensor]] = {}
    adapters: set[str] = set()
    for name, tensor in tensors.items():
        match = FACTOR.fullmatch(name.replace(PREFIX, ""))
        if match is None:
            raise MsrlError(
                f"{where}: {name} is not the A or B of a linear layer. Other adapters cannot be "
                "merged."
            )
        adapters.add(match["adapter"] or "default")
        modules.setdefault(match["module"], {})[match["factor"]] = tensor
    if len(adapters) > 1:
        raise MsrlError(
            f"{where}: contains several adapters ({', '.join(sorted(adapters))}). "
            "Only one can be merged."
        )
    return modules


def _join_shards(
    rule: Rule, shards: list[_AdapterShard], scale: float, where: str
) -> dict[str, Delta]:
    """Return the updates of a rule's Hugging Face tensors; B is laid out like the weight."""
    rows, columns = layouts.shard_shape(rule.layout, rule.shapes, len(shards))
    for shard in shards:
        if (shard.b.shape[0], shard.a.shape[1]) != (rows, columns):
            raise MsrlError(
                f"{where}: the adapter of {rule.mcore} is for a weight of shape "
                f"{[shard.b.shape[0], shard.a.shape[1]]} on each rank, but the model has "
                f"{[rows, columns]}. Use the model that the adapter was trained on."
            )
    row_parallel = isinstance(rule.layout, Sharded) and rule.layout.axis == 1
    replicated = [shard.b if row_parallel else shard.a for shard in shards]
    first = replicated[0]
    if any(
        tensor_spec(t) != tensor_spec(first) or not torch.equal(t, first) for t in replicated[1:]
    ):
        raise MsrlError(
            f"{where}: lora_{'B' if row_parallel else 'A'} of {rule.mcore} differs between ranks, "
            "which must have the same"
        )
    if row_parallel:
        a, b = torch.cat([shard.a for shard in shards], dim=1), (first,)
    else:
        joined = layouts.join(rule.layout, [shard.b for shard in shards])
        a, b = first, layouts.unfuse(rule.layout, joined)
    deltas: dict[str, Delta] = {}
    for name, rows in zip(rule.hf, b, strict=True):
        factors = {"A": a, "B": rows.contiguous()}
        deltas[name] = make_delta(where, name.removesuffix(".weight"), factors, scale)
    return deltas
