"""Global names of tensors in Megatron's distributed checkpoints: no rank, no stage, only the place
in the whole model.

Layers that are all alike are stacked along a leading axis (`decoder.layers.mlp.linear_fc2.weight`
[L, H, F]); where they differ each has a name of its own (Megatron's `non_homogeneous_layers`).
Experts of a layer are stacked always. A norm has the name that Transformer Engine gives it inside
the linear layer that follows. Of latent attention Megatron-core keeps apart what MindSpeed's names,
which are ours, join, and its local layer spec leaves norms by themselves. Letters: L layers, E
experts, H hidden, F feed-forward. Source: `sharded_state_dict` of megatron-core 0.16's
TransformerBlock, SequentialMLP and MLASelfAttention, and its layer specs.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from msrl.checkpoint.torch_files.reader import Pieces, TensorSpec
from msrl.models.families import num_experts
from msrl.models.shape import Shape

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_INPUT, _PRE_MLP = "input_layernorm.weight", "pre_mlp_layernorm.weight"
_FUSED = {_INPUT: "self_attention.linear_qkv.layer_norm_weight", _PRE_MLP: "mlp.linear_fc1.layer_norm_weight"}
_LATENT_FUSED = {
    _PRE_MLP: _FUSED[_PRE_MLP],
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
_JOINED = "self_attention.linear_qkv.weight"


@dataclass(frozen=True, slots=True)
class GlobalPosition:
    """Where a tensor lies in a global one: at `index` of the leading axes, whose sizes are
    `extents`.
    """

    key: str
    index: tuple[int, ...] = ()
    extents: tuple[int, ...] = ()


def parts_of(name: str, shape: Shape) -> dict[str, int]:
    """The tensors that Megatron-core has in place of one with our name, and the rows of each;
    nothing but itself is an empty dict.
    """
    if shape.mla is None or not name.endswith(f".{_JOINED}"):
        return {}
    mla, prefix = shape.mla, name.removesuffix("linear_qkv.weight")
    queries = ("linear_q_proj", shape.num_attention_heads * shape.head_dim)
    if mla.q_lora_rank is not None:
        queries = ("linear_q_down_proj", mla.q_lora_rank)
    latent = ("linear_kv_down_proj", mla.kv_lora_rank + mla.rope_head_dim)
    return {f"{prefix}{linear}.weight": rows for linear, rows in (queries, latent)}


def apart(name: str, tensor: Pieces, shape: Shape) -> Iterator[tuple[str, Pieces]]:
    """A tensor of ours as Megatron-core has it: its parts (see `parts_of`), views of what it
    consists of, or itself.
    """
    parts = parts_of(name, shape)
    if not parts:
        yield name, tensor
        return
    left = deque(tensor.parts)
    for part, rows in parts.items():
        taken, missing = [], rows
        while missing:
            piece = left.popleft()
            taken.append(piece[:missing])
            if len(piece) > missing:
                left.appendleft(piece[missing:])
            missing -= len(taken[-1])
        yield part, Pieces(TensorSpec(tensor.spec.dtype, (rows, *tensor.spec.shape[1:])), taken)


def specs_apart(specs: Mapping[str, TensorSpec], shape: Shape) -> dict[str, TensorSpec]:
    """Types and shapes of what `apart` makes of a model's tensors."""
    found: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        parts = parts_of(name, shape)
        found |= {part: TensorSpec(spec.dtype, (rows, *spec.shape[1:])) for part, rows in parts.items()} or {name: spec}
    return found


def is_stacked(shape: Shape) -> bool:
    """Whether the model's layers are all alike, so that Megatron stacks them."""
    return shape.moe is None or all(shape.moe.layers)


def place_of(name: str, shape: Shape, *, te: bool) -> GlobalPosition:
    """Where a tensor with one of our names (global layer and expert numbers) is written; `te`: for
    Transformer Engine's layers.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return GlobalPosition(name)
    layer, rest = int(match[1]), match[2]
    return _place(layer, _spelled(layer, rest, shape, te), shape, stacked=is_stacked(shape))


def places_of(name: str, shape: Shape) -> Iterator[GlobalPosition]:
    """Everywhere that a tensor may lie in a checkpoint, the likeliest first: layers stacked or not,
    norms fused or not.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        yield GlobalPosition(name)
        return
    layer, rest = int(match[1]), match[2]
    fused = _FUSED if shape.mla is None else _LATENT_FUSED
    spellings = [rest, *([fused[rest]] if rest in fused else [])]
    for stacked in (is_stacked(shape), not is_stacked(shape)):
        yield from (_place(layer, spelling, shape, stacked=stacked) for spelling in spellings)


def extra_states(name: str, place: GlobalPosition, *, te: bool) -> Iterator[str]:
    """Keys of the extra state (of fp8 recipes; nothing without one) that a module's reader asks for
    beside the weight at `place`.
    """
    module, _, leaf = place.key.rpartition(".")
    is_norm = module.endswith("layernorm") or leaf == "layer_norm_weight"
    if leaf == "weight" and (module.rpartition(".")[2].startswith("linear_") or (te and is_norm)):
        yield f"{module}._extra_state/{_fragment(place)}"
    if te and name.endswith("self_attention.linear_proj.weight"):
        yield f"{module.removesuffix('linear_proj')}core_attention._extra_state/{_fragment(place)}"


def _fragment(place: GlobalPosition) -> str:
    """Which of how many parts an object is, as Megatron writes it: `shard_0.1_4.8`."""
    index, extents = (".".join(map(str, numbers)) for numbers in (place.index or (0,), place.extents or (1,)))
    return f"shard_{index}_{extents}"


def _place(layer: int, rest: str, shape: Shape, *, stacked: bool) -> GlobalPosition:
    prefix = "decoder.layers." if stacked else f"decoder.layers.{layer}."
    index, extents = ((layer,), (shape.num_layers,)) if stacked else ((), ())
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        return GlobalPosition(prefix + rest, index, extents)
    return GlobalPosition(f"{prefix}mlp.experts.experts.{expert[2]}", (*index, int(expert[1])), (*extents, num_experts(shape)))


def _spelled(layer: int, rest: str, shape: Shape, te: bool) -> str:
    """The name inside a layer: what Megatron's own two layer specs fuse with the linear layer that
    follows.
    """
    if te and rest == _PRE_MLP and shape.moe is not None and shape.moe.layers[layer]:
        return rest  # a router follows, not a linear layer
    if shape.mla is not None:
        return _LATENT_FUSED.get(rest, rest) if te else rest
    return _FUSED.get(rest, rest)


def stored_spec(place: GlobalPosition, spec: TensorSpec) -> TensorSpec:
    """Type and shape of a part as it is stored: with an axis of one for each that it is stacked
    along.
    """
    return TensorSpec(spec.dtype, (*(1 for _ in place.index), *spec.shape))
