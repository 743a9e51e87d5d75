"""Names of tensors in Megatron's files, and the forms that differ from ours.

Inside msrl tensors have the names of Megatron's local layer spec, with experts one by one. Files
may have Transformer Engine's names, and experts fused for grouped matrix products: by the local
spec all of a rank's in one tensor, `weight1` and `weight2`, by Transformer Engine's still one by
one. Letters: E experts of a rank, H hidden, F feed-forward columns of a rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from msrl.checkpoint.torch_files.reader import Pieces, TensorSpec

_LAYER = r"(?P<layer>(?:model\d+\.)?decoder\.layers\.\d+\.)"
_PARAMETER = re.compile(_LAYER + r"(?P<rest>.+)")
_EXPERT = re.compile(
    _LAYER
    + r"mlp\.experts\.local_experts\.(?P<number>\d+)\.(?P<linear>linear_fc[12])\.(?P<kind>weight|bias)"
)
_LATENT = re.compile(_LAYER + r"self_attention\.linear_kv_up_proj\.weight")
_TE_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_TE_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}
_LOCAL_NORMS = {te: local for local, te in _TE_NORMS.items()}
_FUSED = {"linear_fc1": "weight1", "linear_fc2": "weight2"}


@dataclass(frozen=True, slots=True)
class Naming:
    """How a file names its tensors: by Transformer Engine's layer spec (`te`), with `grouped`
    experts, or as `legacy` models did.
    """

    te: bool = False
    grouped: bool = False
    legacy: bool = False


LOCAL = Naming()


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: its name there, and our names of what it is made of, of which there are
    several for fused experts.
    """

    name: str
    sources: tuple[str, ...]
    fused: bool = False


def entries(names: Iterable[str], naming: Naming) -> list[Entry]:
    """What a file has for a rank's tensors, given by our names, in their order; fused experts come
    after the last of their layer.
    """
    names = list(names)
    alone = _norms_alone(names)
    fused = _fused(names) if naming.grouped and not naming.te else {}
    found: list[Entry] = []
    for name in names:
        if fused and _EXPERT.fullmatch(name):
            found += fused.pop(name, [])
        else:
            found.append(Entry(_file_name(name, naming, alone), (name,)))
    return found


def _norms_alone(names: Iterable[str]) -> set[str]:
    """Norms that Transformer Engine does not fuse with a linear layer: what follows them is a
    router, or the latents of an attention.
    """
    routers = {
        f"{match['layer']}pre_mlp_layernorm.weight"
        for name in names
        if (match := _EXPERT.fullmatch(name))
    }
    return routers | {
        f"{match['layer']}input_layernorm.weight"
        for name in names
        if (match := _LATENT.fullmatch(name))
    }


def _fused(names: Iterable[str]) -> dict[str, list[Entry]]:
    """The fused tensors of each layer's experts by the name of the layer's last one."""
    layers: dict[str, dict[str, list[str]]] = {}
    last: dict[str, str] = {}
    for name in names:
        match = _EXPERT.fullmatch(name)
        if match:
            layers.setdefault(match["layer"], {}).setdefault(match["linear"], []).append(name)
            last[match["layer"]] = name
    return {
        last[layer]: [
            Entry(f"{layer}mlp.experts.{_FUSED[linear]}", tuple(sources), fused=True)
            for linear, sources in linears.items()
        ]
        for layer, linears in layers.items()
    }


def _file_name(name: str, naming: Naming, alone: set[str]) -> str:
    """The name in a file of a tensor that is not fused. `alone`: norms that keep their names."""
    match = _PARAMETER.fullmatch(name)
    if match is None or not naming.te or name in alone:
        return name
    layer, rest = match["layer"], match["rest"]
    expert = _EXPERT.fullmatch(name)
    if expert and naming.grouped:
        return f"{layer}mlp.experts.{expert['linear']}.{expert['kind']}{expert['number']}"
    return layer + _TE_NORMS.get(rest, rest)


def local_name(name: str) -> str:
    """Our name of a tensor that is not fused, whichever spelling is given."""
    match = _PARAMETER.fullmatch(name)
    if match is None:
        return name
    rest = _TE_EXPERT.sub(r"mlp.experts.local_experts.\3.\1.\2", match["rest"])
    return match["layer"] + _LOCAL_NORMS.get(rest, rest)


def specs_of(found: Iterable[Entry], specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Types and shapes of a file's tensors from those of ours."""
    return {entry.name: _spec(entry, [specs[name] for name in entry.sources]) for entry in found}


def _spec(entry: Entry, sources: Sequence[TensorSpec]) -> TensorSpec:
    return _fused_spec(entry.name, sources) if entry.fused else sources[0]


def _fused_spec(name: str, experts: Sequence[TensorSpec]) -> TensorSpec:
    rows, columns = experts[0].shape
    shape = (
        (columns, len(experts) * rows)
        if name.endswith(_FUSED["linear_fc1"])
        else (len(experts) * columns, rows)
    )
    return TensorSpec(experts[0].dtype, shape)


def repacked(
    tensors: Iterable[tuple[str, Pieces]], found: Iterable[Entry]
) -> Iterator[tuple[str, Pieces]]:
    """A file's tensors, in its order, from ours; of fused experts one at a time is in memory."""
    waiting: dict[str, Pieces] = {}
    given = iter(tensors)
    for entry in found:
        while any(name not in waiting for name in entry.sources):
            name, pieces = next(given)
            waiting[name] = pieces
        sources = [waiting.pop(name) for name in entry.sources]
        yield entry.name, fused_experts(entry.name, sources) if entry.fused else sources[0]


def fused_experts(name: str, experts: list[Pieces]) -> Pieces:
    """`weight1` [H, E * 2F] of fc1's [2F, H], `weight2` [E * F, H] of fc2's [H, F]; in memory [E,
    H, 2F] and [E, F, H].
    """
    return Pieces(
        _fused_spec(name, [expert.spec for expert in experts]),
        (torch.cat(list(expert.parts)).t() for expert in experts),
    )


def unfused(name: str, tensor: Tensor, num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Our tensors of a fused one, by our names; views where they can be. `num_experts` is E."""
    prefix, _, which = name.rpartition(".")
    linear = next(linear for linear, fused in _FUSED.items() if fused == which)
    stacked = (
        tensor.reshape(num_experts, tensor.shape[0], -1)
        if linear == "linear_fc1"
        else tensor.unflatten(0, (num_experts, -1))
    )
    yield from (
        (f"{prefix}.local_experts.{number}.{linear}.weight", part.t())
        for number, part in enumerate(stacked)
    )


def is_fused(name: str) -> bool:
    """Whether a file's tensor holds all experts of a rank."""
    match = _PARAMETER.fullmatch(name)
    return match is not None and match["rest"] in {
        f"mlp.experts.{which}" for which in _FUSED.values()
    }
