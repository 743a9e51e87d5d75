"""Names of tensors in Megatron's files, and their conversion to msrl's names.

Inside msrl, tensors have the names of Megatron's local layer spec, with experts one by one. Files
may have Transformer Engine's names, and experts fused for grouped matrix products. With the local
spec, all experts of a rank are fused into two tensors, `weight1` and `weight2`; with Transformer
Engine's they stay separate.

Letters: E experts of a rank, H hidden, F feed-forward columns of a rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from msrl.checkpoint.torch_files.reader import Pieces, TensorSpec

_LAYER = r"(?P<layer>(?:model\d+\.)?decoder\.layers\.\d+\.)"
_PARAMETER = re.compile(_LAYER + r"(?P<inner>.+)")
_EXPERT = re.compile(
    _LAYER
    + r"mlp\.experts\.local_experts\.(?P<number>\d+)\."
    + r"(?P<linear>linear_fc[12])\.(?P<kind>weight|bias)"
)
_LATENT = re.compile(_LAYER + r"self_attention\.linear_kv_up_proj\.weight")
_TE_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_PRE_MLP = "pre_mlp_layernorm.weight"
_TE_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    _PRE_MLP: "mlp.linear_fc1.layer_norm_weight",
}
_LOCAL_NORMS = {te: local for local, te in _TE_NORMS.items()}
# First and second component of a joined tensor, and its name.
_SPLIT_LATENTS = {
    "linear_qk_nope": ("linear_qk_rope", "linear_q_up_proj"),
    "linear_kv_nope": ("linear_v", "linear_kv_up_proj"),
}
_FUSED = {"linear_fc1": "weight1", "linear_fc2": "weight2"}


@dataclass(frozen=True, slots=True)
class Naming:
    """Tensor names of a file: Transformer Engine's (`te`), with `grouped` experts, or `legacy`.

    `whole_mixers` selects MindSpeed-LLM's tensors of Qwen3-Next (see `whole_mixers.py`).

    `converter` selects the names that MindSpeed-LLM's converter gives to Transformer Engine's
    layers. The layers of its training (`te`) fuse other norms.
    """

    te: bool = False
    grouped: bool = False
    legacy: bool = False
    converter: bool = False
    whole_mixers: bool = False


LOCAL = Naming()


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor of a file: its name there, and msrl's names of its sources (several if `fused`)."""

    name: str
    sources: tuple[str, ...]
    fused: bool = False


def file_tensors(
    names: Iterable[str], naming: Naming, *, is_mixture: bool = False
) -> list[FileTensor]:
    """Return the tensors of a file for tensors with msrl's `names`, in their order.

    Fused experts follow the last expert of their layer. `is_mixture` is True if any layer of the
    model has experts, which need not be in this file.
    """
    names = list(names)
    unfused_norms = _unfused_norms(names)
    if naming.converter:
        unfused_norms = _unfused_by_converter(names, is_mixture)
    fused = _fused_tensors(names) if naming.grouped and not naming.te else {}
    tensors: list[FileTensor] = []
    for name in names:
        if fused and _EXPERT.fullmatch(name):
            tensors += fused.pop(name, [])
        else:
            tensors.append(FileTensor(_file_name(name, naming, unfused_norms), (name,)))
    return tensors


def _unfused_norms(names: Iterable[str]) -> set[str]:
    """Return norms that Transformer Engine does not fuse with a linear layer.

    They are followed by a router, or by the latents of an attention.
    """
    routers = {
        f"{match['layer']}{_PRE_MLP}" for name in names if (match := _EXPERT.fullmatch(name))
    }
    return routers | {
        f"{match['layer']}input_layernorm.weight"
        for name in names
        if (match := _LATENT.fullmatch(name))
    }


def _unfused_by_converter(names: Iterable[str], is_mixture: bool) -> set[str]:
    """Return norms that MindSpeed-LLM's converter does not fuse with a linear layer.

    It fuses the norm before attention in every layer, and the norm before the feed-forward block
    only in the dense layers of a mixture of experts. Source: `set_model_layer_norm` in
    mindspeed_llm/tasks/checkpoint/convert_hf2mg.py.
    """
    names = list(names)
    if is_mixture:
        return {name for name in _unfused_norms(names) if name.endswith(_PRE_MLP)}
    return {name for name in names if name.endswith(_PRE_MLP)}


def _fused_tensors(names: Iterable[str]) -> dict[str, list[FileTensor]]:
    """Return the fused tensors of each layer's experts, by the name of the last expert tensor."""
    layers: dict[str, dict[str, list[str]]] = {}
    last: dict[str, str] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match:
            layers.setdefault(match["layer"], {}).setdefault(match["linear"], []).append(name)
            last[match["layer"]] = name
    fused: dict[str, list[FileTensor]] = {}
    for layer, linears in layers.items():
        fused[last[layer]] = [
            FileTensor(f"{layer}mlp.experts.{_FUSED[linear]}", tuple(sources), fused=True)
            for linear, sources in linears.items()
        ]
    return fused


def _file_name(name: str, naming: Naming, unfused_norms: set[str]) -> str:
    """Return the name in a file of a tensor that is not fused; `unfused_norms` keep their names."""
    match = _PARAMETER.fullmatch(name)
    if match is None or not naming.te or name in unfused_norms:
        return name
    layer, inner = match["layer"], match["inner"]
    expert = _EXPERT.fullmatch(name)
    if expert and naming.grouped:
        return f"{layer}mlp.experts.{expert['linear']}.{expert['kind']}{expert['number']}"
    return layer + _TE_NORMS.get(inner, inner)


def local_name(name: str) -> str:
    """Return msrl's name of a tensor that is not fused, from either spelling."""
    match = _PARAMETER.fullmatch(name)
    if match is None:
        return name
    inner = _TE_EXPERT.sub(r"mlp.experts.local_experts.\3.\1.\2", match["inner"])
    return match["layer"] + _LOCAL_NORMS.get(inner, inner)


def file_specs(
    targets: Iterable[FileTensor], specs: Mapping[str, TensorSpec]
) -> dict[str, TensorSpec]:
    """Return types and shapes of a file's tensors from types and shapes of msrl's tensors."""
    return {entry.name: _file_spec(entry, specs) for entry in targets}


def _file_spec(entry: FileTensor, specs: Mapping[str, TensorSpec]) -> TensorSpec:
    sources = [specs[name] for name in entry.sources]
    return _fused_spec(entry.name, sources) if entry.fused else sources[0]


def _fused_spec(name: str, experts: Sequence[TensorSpec]) -> TensorSpec:
    rows, columns = experts[0].shape
    shape = (len(experts) * columns, rows)
    if name.endswith(_FUSED["linear_fc1"]):
        shape = (columns, len(experts) * rows)
    return TensorSpec(experts[0].dtype, shape)


def join_split_latents(tensors: Mapping[str, Tensor], num_heads: int) -> dict[str, Tensor]:
    """Return a rank's tensors with the up projections of latent attention joined.

    With MindSpeed's --mla-mm-split, a file has the rows with and without position of all heads in
    one tensor each, and the rows of keys and values. msrl's tensors have both rows of a head next
    to each other. `num_heads` is the number of heads on the rank.

    Raises:
        RuntimeError: The rows do not divide into heads.
    """
    joined = dict(tensors)
    for name in tensors:
        prefix, _, linear = name.removesuffix(".weight").rpartition(".")
        if linear not in _SPLIT_LATENTS:
            continue
        second, target = _SPLIT_LATENTS[linear]
        rows = [joined.pop(name), joined.pop(f"{prefix}.{second}.weight")]
        by_head = [row.unflatten(0, (num_heads, -1)) for row in rows]
        joined[f"{prefix}.{target}.weight"] = torch.cat(by_head, dim=1).flatten(0, 1)
    return joined


def has_split_latents(names: Iterable[str]) -> bool:
    """Return True if a file was written with MindSpeed's --mla-mm-split."""
    return any(name.endswith(".linear_qk_nope.weight") for name in names)


def repack(
    tensors: Iterable[tuple[str, Pieces]], targets: Iterable[FileTensor]
) -> Iterator[tuple[str, Pieces]]:
    """Yield a file's tensors, in its order; one fused expert at a time is in memory."""
    available: dict[str, Pieces] = {}
    remaining = iter(tensors)
    for entry in targets:
        while any(name not in available for name in entry.sources):
            name, pieces = next(remaining)
            available[name] = pieces
        sources = [available.pop(name) for name in entry.sources]
        yield entry.name, fuse_experts(entry.name, sources) if entry.fused else sources[0]


def fuse_experts(name: str, experts: list[Pieces]) -> Pieces:
    """Return `weight1` [H, E * 2F] of fc1's [2F, H], or `weight2` [E * F, H] of fc2's [H, F].

    In memory they are [E, H, 2F] and [E, F, H].
    """
    return Pieces(
        _fused_spec(name, [expert.spec for expert in experts]),
        (torch.cat(list(expert.tensors)).t() for expert in experts),
        partial(_refuse_nonfinite, experts),
    )


def _refuse_nonfinite(experts: Iterable[Pieces]) -> None:
    """Check every expert for NaN and infinity, because the fused data does not name it."""
    for expert in experts:
        if expert.refuse_nonfinite is not None:
            expert.refuse_nonfinite()


def unfuse_experts(name: str, tensor: Tensor, num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a fused one under msrl's names; `num_experts` is E.

    They are views where possible.
    """
    prefix, _, fused_name = name.rpartition(".")
    linear = next(linear for linear, fused in _FUSED.items() if fused == fused_name)
    stacked = (
        tensor.reshape(num_experts, tensor.shape[0], -1)
        if linear == "linear_fc1"
        else tensor.unflatten(0, (num_experts, -1))
    )
    yield from (
        (f"{prefix}.local_experts.{number}.{linear}.weight", expert.t())
        for number, expert in enumerate(stacked)
    )


def is_fused(name: str) -> bool:
    """Return True if a file's tensor contains all experts of a rank."""
    match = _PARAMETER.fullmatch(name)
    if match is None:
        return False
    return match["inner"] in {f"mlp.experts.{fused_name}" for fused_name in _FUSED.values()}
