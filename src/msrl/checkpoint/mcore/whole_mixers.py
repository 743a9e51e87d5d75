"""MindSpeed-LLM's tensors of Qwen3-Next's mixers: whole on every rank, as in Hugging Face's files.

Source: MindSpeed-LLM c77308a1, mindspeed_llm/tasks/checkpoint, the branches of `qkv_type` mix. q, k
and v are separate, and the tensors of a delta network have Hugging Face's names. The other tensors
of a layer are as in all its files.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor

from msrl.checkpoint import tensor_layouts as layouts
from msrl.checkpoint.torch_files.reader import Pieces, TensorSpec
from msrl.checkpoint.weights import WeightSource
from msrl.errors import MsrlError
from msrl.models.shape import Shape
from msrl.models.stages import StageTensor

_MIXER = "self_attention."
_MARKS = (f"{_MIXER}in_proj_qkvz.weight", f"{_MIXER}q_proj.weight")


def refuse_other_models(shape: Shape, tp: int) -> None:
    """Raise MsrlError if MindSpeed-LLM has no such names for a model or cannot use them."""
    if shape.delta is None or not shape.delta.is_fused:
        raise MsrlError(
            f"--names mindspeed: MindSpeed-LLM has other names for the mixers of Qwen3-Next only, "
            f"and this is {shape.architecture}. Omit it."
        )
    if tp > 1:
        raise MsrlError(
            f"--names mindspeed: MindSpeed-LLM does not shard the mixers of Qwen3-Next, but "
            f"--tp is {tp}. Set it to 1."
        )


def has_whole_mixers(names: Collection[str]) -> bool:
    """Return True if a rank's tensors have these names."""
    return any(name.endswith(_MARKS) for name in names)


def shard_mixers(model: Mapping[str, Tensor], placed: Iterable[StageTensor]) -> dict[str, Tensor]:
    """Return a rank's tensors with the rank's shards of its mixers, under msrl's names.

    `placed` are the tensors that the rank should have. A tensor of another size stays as it is.
    """
    result = dict(model)
    for entry in placed:
        names = _whole_names(entry)
        sizes = [tuple(result[name].shape) for name in names if name in result]
        if names and sizes == list(entry.rule.shapes):
            whole = [result.pop(name) for name in names]
            result[entry.name] = layouts.shard(entry.layout, whole, entry.shard, entry.num_shards)
    return result


def whole_mixers(
    source: WeightSource, placed: Iterable[StageTensor], tensors: Iterable[tuple[str, Pieces]]
) -> Iterator[tuple[str, Pieces]]:
    """Yield a rank's tensors with whole mixers; `tensors` are those of `placed`, in its order."""
    for entry, (name, pieces) in zip(placed, tensors, strict=True):
        names = _whole_names(entry)
        if not names:
            yield name, pieces
            continue
        whole = source.hf_pieces(entry.rule)
        for own_name, size, own in zip(names, entry.rule.shapes, whole, strict=True):
            spec = TensorSpec(pieces.spec.dtype, size)
            yield own_name, source.checked_pieces(entry.rule, spec, own)


def _whole_names(entry: StageTensor) -> list[str]:
    """Return MindSpeed-LLM's names of a mixer's tensor; none for another tensor."""
    prefix, mark, _ = entry.name.partition(_MIXER)
    if not mark:
        return []
    delta = [name.rpartition(".linear_attn.")[2] for name in entry.rule.hf]
    if delta[0] != entry.rule.hf[0]:
        return [f"{prefix}{mark}{name}" for name in delta]
    if len(entry.rule.hf) == 1:
        return [entry.name]
    return [f"{prefix}{mark}{name.rpartition('.self_attn.')[2]}" for name in entry.rule.hf]
