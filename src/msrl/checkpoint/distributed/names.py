"""Global tensor names in Megatron's distributed checkpoints, independent of rank and stage.

Letters: L layers, E experts, H hidden, F feed-forward.

- If all layers are alike, they are stacked along a leading axis
  (`decoder.layers.mlp.linear_fc2.weight` [L, H, F]). Otherwise each layer has its own tensors
  (Megatron's `non_homogeneous_layers`).
- The experts of a layer are always stacked.
- A norm has the name that Transformer Engine gives it inside the linear layer that follows. Latent
  attention with the local layer spec keeps separate norms.
- Megatron-core splits the down projections of latent attention, which msrl joins as MindSpeed does.

Source: `sharded_state_dict` of megatron-core 0.16's TransformerBlock, SequentialMLP and
MLASelfAttention, and its layer specs.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from msrl.checkpoint.torch_files.reader import Pieces, TensorSpec
from msrl.models.families import num_experts
from msrl.models.shape import Shape

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_INPUT, _PRE_MLP = "input_layernorm.weight", "pre_mlp_layernorm.weight"
_FUSED = {
    _INPUT: "self_attention.linear_qkv.layer_norm_weight",
    _PRE_MLP: "mlp.linear_fc1.layer_norm_weight",
}
_LATENT_FUSED = {
    _PRE_MLP: _FUSED[_PRE_MLP],
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
}
_JOINED = "self_attention.linear_qkv.weight"


@dataclass(frozen=True, slots=True)
class GlobalPosition:
    """Position of a tensor in a global one: `index` into leading axes of sizes `extents`."""

    key: str
    index: tuple[int, ...] = ()
    extents: tuple[int, ...] = ()


def split_names(name: str, shape: Shape) -> dict[str, int]:
    """Return the names and rows of the tensors that Megatron-core stores for one of msrl's tensors.

    The result is empty for a tensor that is stored unchanged.
    """
    if shape.mla is None or not name.endswith(f".{_JOINED}"):
        return {}
    mla, prefix = shape.mla, name.removesuffix("linear_qkv.weight")
    queries = ("linear_q_proj", shape.num_attention_heads * shape.head_dim)
    if mla.q_lora_rank is not None:
        queries = ("linear_q_down_proj", mla.q_lora_rank)
    latent = ("linear_kv_down_proj", mla.kv_lora_rank + mla.rope_head_dim)
    return {f"{prefix}{linear}.weight": rows for linear, rows in (queries, latent)}


def split_joined(name: str, tensor: Pieces, shape: Shape) -> Iterator[tuple[str, Pieces]]:
    """Yield a tensor as Megatron-core stores it: its components (see `split_names`), or itself.

    The components are views of the pieces of the tensor.
    """
    components = split_names(name, shape)
    if not components:
        yield name, tensor
        return
    remaining = deque(tensor.tensors)
    for component, rows in components.items():
        pieces, missing = list[Tensor](), rows
        while missing:
            piece = remaining.popleft()
            pieces.append(piece[:missing])
            if len(piece) > missing:
                remaining.appendleft(piece[missing:])
            missing -= len(pieces[-1])
        spec = TensorSpec(tensor.spec.dtype, (rows, *tensor.spec.shape[1:]))
        yield component, Pieces(spec, pieces, tensor.refuse_nonfinite)


def split_specs(specs: Mapping[str, TensorSpec], shape: Shape) -> dict[str, TensorSpec]:
    """Return types and shapes of the tensors that `split_joined` yields."""
    result: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        components = split_names(name, shape) or {name: spec.shape[0] if spec.shape else 0}
        for component, rows in components.items():
            is_split = component != name
            size = (rows, *spec.shape[1:]) if is_split else spec.shape
            result[component] = TensorSpec(spec.dtype, size)
    return result


def is_stacked(shape: Shape) -> bool:
    """Return True if all layers of the model are alike, so that Megatron stacks them."""
    return shape.has_equal_layers


def global_position(name: str, shape: Shape, *, te: bool) -> GlobalPosition:
    """Return the position where a tensor is written; `te`: for Transformer Engine's layers.

    `name` is msrl's name, with global layer and expert numbers.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return GlobalPosition(name)
    layer = int(match[1])
    inner = _name_in_layer(layer, match[2], shape, te)
    return _layer_position(layer, inner, shape, stacked=is_stacked(shape))


def possible_positions(name: str, shape: Shape) -> Iterator[GlobalPosition]:
    """Yield the positions where a tensor may be stored, the most likely first.

    Layers may be stacked or separate, norms fused or separate.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        yield GlobalPosition(name)
        return
    layer, inner = int(match[1]), match[2]
    fused = _FUSED if shape.mla is None else _LATENT_FUSED
    spellings = [inner, *([fused[inner]] if inner in fused else [])]
    for stacked in (is_stacked(shape), not is_stacked(shape)):
        for spelling in spellings:
            yield _layer_position(layer, spelling, shape, stacked=stacked)


def extra_states(name: str, position: GlobalPosition, *, te: bool) -> Iterator[str]:
    """Yield the keys of extra state that a module's reader expects in addition to the weight.

    Extra state belongs to fp8 recipes and is empty without one.
    """
    module, _, leaf = position.key.rpartition(".")
    is_norm = module.endswith("layernorm") or leaf == "layer_norm_weight"
    if leaf == "weight" and (module.rpartition(".")[2].startswith("linear_") or (te and is_norm)):
        yield f"{module}._extra_state/{_fragment(position)}"
    if te and name.endswith("self_attention.linear_proj.weight"):
        attention = module.removesuffix("linear_proj")
        yield f"{attention}core_attention._extra_state/{_fragment(position)}"


def _fragment(position: GlobalPosition) -> str:
    """Return index and sizes of an object's shard as Megatron writes them: `shard_0.1_4.8`."""
    index, extents = (
        ".".join(map(str, numbers))
        for numbers in (position.index or (0,), position.extents or (1,))
    )
    return f"shard_{index}_{extents}"


def _layer_position(layer: int, inner: str, shape: Shape, *, stacked: bool) -> GlobalPosition:
    prefix = "decoder.layers." if stacked else f"decoder.layers.{layer}."
    index, extents = ((layer,), (shape.num_layers,)) if stacked else ((), ())
    expert = _EXPERT.fullmatch(inner)
    if expert is None:
        return GlobalPosition(prefix + inner, index, extents)
    key = f"{prefix}mlp.experts.experts.{expert[2]}"
    return GlobalPosition(key, (*index, int(expert[1])), (*extents, num_experts(shape)))


def _name_in_layer(layer: int, inner: str, shape: Shape, te: bool) -> str:
    """Return the name inside a layer; Megatron's layer specs fuse norms with linear layers."""
    if te and inner == _PRE_MLP and shape.mixture_layers[layer]:
        return inner  # a router follows, which is not a linear layer
    if shape.mla is not None:
        return _LATENT_FUSED.get(inner, inner) if te else inner
    return _FUSED.get(inner, inner)


def stored_spec(position: GlobalPosition, spec: TensorSpec) -> TensorSpec:
    """Return type and stored shape of a chunk: each stacked axis has size 1."""
    return TensorSpec(spec.dtype, (*(1 for _ in position.index), *spec.shape))
