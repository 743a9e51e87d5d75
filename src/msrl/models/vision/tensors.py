"""Tensors of vision towers: weight rules, and names in Hugging Face files.

They have the names of the files below `vision_model.`, lie on the first pipeline stage, and are
equal on all tensor-parallel ranks. Sources: `Qwen2VisionTransformerPretrainedModel`,
`Qwen2_5_VisionTransformerPretrainedModel`, `Qwen3VLVisionModel`, `InternVLVisionModel` and
`InternVLMultiModalProjector` of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from msrl.models.rules import Replicated, Rule, Rules
from msrl.models.vision.tower import Kind, Vision

TOWER = "vision_model."
"""Prefix of a tower's tensors in Megatron's names."""


@dataclass(frozen=True, slots=True)
class TowerNames:
    """Names of the modules of a tower. Those of a block are below `blocks`.

    - `positions`: parameter with the learned positions, if there are some. The positions of a tower
      of tiles follow the one of its `class_token`.
    - `qkv`: one layer for queries, keys and values, or one for each.
    - `scales`: parameters that multiply the outputs of attention and feed-forward block.
    - `feed_forward`: linear layers; the last one returns to the input size.
    - `merger`: norm and two linear layers of the projector, below `projector`.
    """

    patches: str = "patch_embed.proj"
    positions: str = ""
    class_token: str = ""
    blocks: str = "blocks"
    norms: tuple[str, str] = ("norm1", "norm2")
    qkv: tuple[str, ...] = ("attn.qkv",)
    qk_norms: tuple[str, str] = ("attn.q_norm", "attn.k_norm")
    attention_output: str = "attn.proj"
    scales: tuple[str, ...] = ()
    feed_forward: tuple[str, ...] = ("mlp.fc1", "mlp.fc2")
    projector: str = "merger"
    merger: tuple[str, str, str] = ("ln_q", "mlp.0", "mlp.2")


_QWEN3 = ("norm", "linear_fc1", "linear_fc2")
_NAMES: dict[Kind, TowerNames] = {
    "qwen2": TowerNames(),
    "qwen2_5": TowerNames(feed_forward=("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
    "qwen3": TowerNames(
        positions="pos_embed.weight",
        feed_forward=("mlp.linear_fc1", "mlp.linear_fc2"),
        merger=_QWEN3,
    ),
    "internvl": TowerNames(
        patches="embeddings.patch_embeddings.projection",
        positions="embeddings.position_embeddings",
        class_token="embeddings.cls_token",
        blocks="encoder.layer",
        norms=("layernorm_before", "layernorm_after"),
        qkv=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        qk_norms=("attention.q_norm", "attention.k_norm"),
        attention_output="attention.projection_layer",
        scales=("lambda_1", "lambda_2"),
        projector="multi_modal_projector",
        merger=("layer_norm", "linear_1", "linear_2"),
    ),
}
_DEEPSTACK = "deepstack_merger_list"
PROJECTOR = (
    *(f"{TOWER}{projector}." for projector in sorted({n.projector for n in _NAMES.values()})),
    f"{TOWER}{_DEEPSTACK}.",
)
"""Prefixes of the tensors of a tower's projector."""


def tower_names(kind: Kind) -> TowerNames:
    """Return the names of the modules of a tower."""
    return _NAMES[kind]


def is_tower(rule: Rule) -> bool:
    """Return True for a tensor of a vision tower."""
    return rule.mcore.startswith(TOWER)


def is_projector(rule: Rule) -> bool:
    """Return True for a tensor that projects a tower's outputs to features."""
    return rule.mcore.startswith(PROJECTOR)


def with_tower_rules(rules: Rules, vision: Vision) -> Rules:
    """Return the rules of a model with its tower, which follow those of the embedding."""
    tower = (
        Rule(f"{TOWER}{name}", (_file_name(name, vision),), Replicated(), (size,))
        for name, size in tower_tensors(vision)
    )
    return replace(rules, first=(*rules.first, *tower))


def file_prefixes(vision: Vision) -> tuple[str, ...]:
    """Return the prefixes of a tower's tensors in Hugging Face files."""
    projector = tower_names(vision.kind).projector
    return tuple(dict.fromkeys((vision.prefix, _file_name(f"{projector}.", vision))))


def _file_name(name: str, vision: Vision) -> str:
    """Return the name of a tower's tensor in Hugging Face files.

    The projector of InternVL is beside the tower.
    """
    projector = tower_names(vision.kind).projector
    is_beside = vision.kind == "internvl" and name.startswith(f"{projector}.")
    return name if is_beside else f"{vision.prefix}{name}"


def tower_tensors(vision: Vision) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a tower's tensors in the order of the network."""
    hidden, names = vision.hidden_size, tower_names(vision.kind)
    if names.class_token:
        yield names.class_token, (1, 1, hidden)
    yield f"{names.patches}.weight", (hidden, *vision.patch_shape)
    if vision.has_patch_bias:
        yield f"{names.patches}.bias", (hidden,)
    if names.positions:
        yield names.positions, position_shape(vision)
    for layer in range(vision.depth):
        for name, size in _block_tensors(vision):
            yield f"{names.blocks}.{layer}.{name}", size
    patch_norm = vision.merged_size if vision.tile else hidden
    yield from _merger_tensors(vision, f"{names.projector}.", patch_norm)
    for number in range(len(vision.deepstack)):
        yield from _merger_tensors(vision, f"{_DEEPSTACK}.{number}.", vision.merged_size)


def position_shape(vision: Vision) -> tuple[int, ...]:
    """Return the shape of the learned positions."""
    if vision.tile:
        return (1, 1 + vision.tile**2, vision.hidden_size)
    return (vision.num_positions, vision.hidden_size)


def _block_tensors(vision: Vision) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn, names = vision.hidden_size, vision.ffn_hidden_size, tower_names(vision.kind)
    for name in names.norms:
        yield from _norm(name, hidden, has_bias=not vision.rms_norm)
    for name in names.qkv:
        size = 3 * hidden // len(names.qkv)
        yield from _linear(name, size, hidden, has_bias=vision.qkv_bias)
    for name in names.qk_norms if vision.qk_norm else ():
        yield from _norm(name, hidden, has_bias=False)
    yield from _linear(names.attention_output, hidden, hidden)
    for name in names.scales:
        yield name, (hidden,)
    *inner, last = names.feed_forward
    for name in inner:
        yield from _linear(name, ffn, hidden)
    yield from _linear(last, hidden, ffn)


def _merger_tensors(
    vision: Vision, prefix: str, norm_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    norm, first, second = tower_names(vision.kind).merger
    yield from _norm(f"{prefix}{norm}", norm_size, has_bias=vision.tile > 0 or not vision.rms_norm)
    yield from _linear(f"{prefix}{first}", vision.projector_size, vision.merged_size)
    yield from _linear(f"{prefix}{second}", vision.out_hidden_size, vision.projector_size)


def _norm(name: str, size: int, *, has_bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (size,)
    if has_bias:
        yield f"{name}.bias", (size,)


def _linear(
    name: str, outputs: int, inputs: int, *, has_bias: bool = True
) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    if has_bias:
        yield f"{name}.bias", (outputs,)


_Tensor = TypeVar("_Tensor")
# Names of transformers' modules, and those of the published files
_RENAMED = {
    "visual.": (("model.visual.", "visual."), ("model.language_model.", "model.")),
    "model.visual.": (("visual.", "model.visual."),),
    "vision_tower.": (
        ("model.vision_tower.", "vision_tower."),
        ("model.multi_modal_projector.", "multi_modal_projector."),
        ("model.language_model.", "language_model.model."),
        ("lm_head.", "language_model.lm_head."),
    ),
}


def published_names(tensors: Mapping[str, _Tensor], vision: Vision) -> dict[str, _Tensor]:
    """Return the tensors of a file under the names of the published files.

    transformers reads two forms and has written both, such as `visual.*` and `model.*`, and like
    its modules `model.visual.*` and `model.language_model.*`.
    """

    def published(name: str) -> str:
        for other, prefix in _RENAMED[vision.prefix]:
            if name.startswith(other):
                return prefix + name.removeprefix(other)
        return name

    return {published(name): tensor for name, tensor in tensors.items()}
