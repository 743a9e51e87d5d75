"""Vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: shape, weight rules and names in files.

A tower turns the patches of pictures into features of the language model's size, one for each
square of `merge_size` x `merge_size` patches. Its tensors have the names of the Hugging Face files
below `vision_model.`, lie on the first pipeline stage, and are equal on all tensor-parallel ranks.

Sources: `Qwen2VisionTransformerPretrainedModel`, `Qwen2_5_VisionTransformerPretrainedModel` and
`Qwen3VLVisionModel` of transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

from msrl.models.hf_config import MAX_LAYERS, HfConfig
from msrl.models.rules import Replicated, Rule, Rules

TOWER = "vision_model."
"""Prefix of a tower's tensors in Megatron's names."""
_MERGERS = (f"{TOWER}merger.", f"{TOWER}deepstack_merger_list.")
_IMAGE_TOKEN, _VIDEO_TOKEN, _START, _END = 151655, 151656, 151652, 151653

Kind = Literal["qwen2", "qwen2_5", "qwen3"]
_ACTIVATIONS = {"qwen2": "quick_gelu", "qwen2_5": "silu", "qwen3": "gelu_pytorch_tanh"}


@dataclass(frozen=True, slots=True)
class Vision:
    """Shape of a vision tower.

    - `kind`: qwen2 has LayerNorms and a plain feed-forward block, qwen2_5 RMS norms and a gated
      one. qwen3 is like qwen2 and has learned positions too.
    - `prefix`: prefix of the tensors in Hugging Face files.
    - `merge_size`: patches per side of the square that becomes one feature.
    - `window`, `full_layers`: features per side of an attention window, and the layers without
      windows (qwen2_5). Without a window, a patch attends to all patches of its picture.
    - `num_positions`: entries of the square table of learned positions (qwen3).
    - `deepstack`: layers whose outputs also become features. Those of the i-th one are added to the
      image tokens after the i-th layer of the language model (arXiv:2406.04334).
    """

    kind: Kind
    prefix: str
    depth: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    in_channels: int
    out_hidden_size: int
    rope_theta: float
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    num_positions: int = 0
    deepstack: tuple[int, ...] = ()

    @property
    def patch_elements(self) -> int:
        """Numbers of a patch: channels, frames and pixels."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Channels of the patches that become one feature."""
        return self.hidden_size * self.merge_size**2


def read_vision(config: HfConfig, kind: Kind, prefix: str, out_hidden_size: int) -> Vision:
    """Return the tower of a vision-language model, whose language model has `out_hidden_size`.

    Absent keys have the defaults of transformers' config classes.

    Raises:
        MsrlError: A value is invalid or not supported.
    """
    section: object = config.values.get("vision_config") or {}
    if not isinstance(section, dict):
        config.fail("vision_config", "must be a mapping")
    tower = HfConfig(cast("dict[str, Any]", section), f"{config.where}: vision_config")
    tower.refuse("hidden_act", _ACTIVATIONS[kind])
    size_key = "embed_dim" if kind == "qwen2" else "hidden_size"
    hidden = tower.count(size_key, {"qwen2": 1280, "qwen2_5": 3584, "qwen3": 1152}[kind])
    vision = Vision(
        kind=kind,
        prefix=prefix,
        depth=tower.count("depth", 27 if kind == "qwen3" else 32),
        hidden_size=hidden,
        ffn_hidden_size=_ffn_hidden_size(tower, kind, hidden),
        num_heads=tower.count("num_heads", 16),
        patch_size=tower.count("patch_size", 16 if kind == "qwen3" else 14),
        temporal_patch_size=tower.count("temporal_patch_size", 2),
        merge_size=tower.count("spatial_merge_size", 2),
        in_channels=tower.count("in_channels", 3),
        out_hidden_size=tower.count("hidden_size" if kind == "qwen2" else "out_hidden_size", 3584),
        rope_theta=_rope_theta(tower),
        image_token_id=_token(config, "image_token_id", _IMAGE_TOKEN),
        video_token_id=_token(config, "video_token_id", _VIDEO_TOKEN),
        vision_start_token_id=_token(config, "vision_start_token_id", _START),
        vision_end_token_id=_token(config, "vision_end_token_id", _END),
    )
    _check_sizes(tower, vision, size_key, out_hidden_size)
    if kind == "qwen2_5":
        window = tower.count("window_size", 112) // vision.merge_size // vision.patch_size
        if not window:
            tower.fail("window_size", "is smaller than the pixels of one feature")
        full = _layers(tower, "fullatt_block_indexes", (7, 15, 23, 31), vision.depth)
        return replace(vision, window=window, full_layers=full)
    if kind == "qwen3":
        positions = tower.count("num_position_embeddings", 2304)
        deepstack = _layers(tower, "deepstack_visual_indexes", (8, 16, 24), vision.depth)
        return replace(vision, num_positions=positions, deepstack=deepstack)
    return vision


def _ffn_hidden_size(tower: HfConfig, kind: Kind, hidden: int) -> int:
    if kind == "qwen2":
        return int(hidden * tower.positive("mlp_ratio", 4))
    return tower.count("intermediate_size", 3420 if kind == "qwen2_5" else 4304)


def _rope_theta(tower: HfConfig) -> float:
    """Return the base of the rotary embedding by row and column, which transformers 5 writes."""
    table: object = tower.values.get("rope_parameters") or {}
    if not isinstance(table, dict):
        tower.fail("rope_parameters", "must be a mapping")
    values = cast("dict[str, Any]", table)
    if values.get("rope_type", "axial") != "axial":
        tower.fail("rope_parameters", "is not supported. Supported: rope_type axial")
    return tower.checked_positive("rope_parameters.rope_theta", values.get("rope_theta"), 10000.0)


def _token(config: HfConfig, key: str, default: int) -> int:
    value: object = config.values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        config.fail(key, "must be the number of a token")
    return value


def _layers(tower: HfConfig, key: str, default: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """Return the numbers of layers below a key."""
    value: object = tower.values.get(key)
    value = default if value is None else value
    numbers = [*cast("list[object]", value)] if isinstance(value, list | tuple) else [None]
    chosen = [x for x in numbers if type(x) is int and 0 <= x < depth]
    if len(chosen) < len(numbers) or len(set(chosen)) < len(chosen):
        tower.fail(key, f"must be a list of different layers from 0 to {depth - 1}")
    return tuple(chosen)


def _check_sizes(tower: HfConfig, vision: Vision, size_key: str, out_hidden_size: int) -> None:
    if vision.depth > MAX_LAYERS:
        tower.fail("depth", f"exceeds the limit of {MAX_LAYERS}. Restore the file")
    if vision.hidden_size % (4 * vision.num_heads):
        tower.fail(
            size_key,
            f"must be a multiple of {4 * vision.num_heads}, four channels for each of "
            f"num_heads={vision.num_heads}",
        )
    if vision.out_hidden_size != out_hidden_size:
        key = "hidden_size" if vision.kind == "qwen2" else "out_hidden_size"
        tower.fail(key, f"differs from hidden_size={out_hidden_size} of the language model")


def is_tower(rule: Rule) -> bool:
    """Return True for a tensor of a vision tower."""
    return rule.mcore.startswith(TOWER)


def is_projector(rule: Rule) -> bool:
    """Return True for a tensor that projects a tower's outputs to features."""
    return rule.mcore.startswith(_MERGERS)


def with_tower_rules(rules: Rules, vision: Vision) -> Rules:
    """Return the rules of a model with its tower, which follow those of the embedding."""
    tower = (
        Rule(f"{TOWER}{name}", (f"{vision.prefix}{name}",), Replicated(), (size,))
        for name, size in tower_tensors(vision)
    )
    return replace(rules, first=(*rules.first, *tower))


def tower_tensors(vision: Vision) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of a tower's tensors in the order of the network."""
    hidden = vision.hidden_size
    patch = (vision.temporal_patch_size, vision.patch_size, vision.patch_size)
    yield "patch_embed.proj.weight", (hidden, vision.in_channels, *patch)
    if vision.kind == "qwen3":
        yield "patch_embed.proj.bias", (hidden,)
        yield "pos_embed.weight", (vision.num_positions, hidden)
    for layer in range(vision.depth):
        for name, size in _block_tensors(vision):
            yield f"blocks.{layer}.{name}", size
    yield from _merger_tensors(vision, "merger.", hidden)
    for number in range(len(vision.deepstack)):
        yield from _merger_tensors(vision, f"deepstack_merger_list.{number}.", vision.merged_size)


def _block_tensors(vision: Vision) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn = vision.hidden_size, vision.ffn_hidden_size
    has_bias = vision.kind != "qwen2_5"
    yield from _norm("norm1", hidden, has_bias=has_bias)
    yield from _norm("norm2", hidden, has_bias=has_bias)
    yield from _linear("attn.qkv", 3 * hidden, hidden)
    yield from _linear("attn.proj", hidden, hidden)
    *inner, last = feed_forward_names(vision.kind)
    for name in inner:
        yield from _linear(f"mlp.{name}", ffn, hidden)
    yield from _linear(f"mlp.{last}", hidden, ffn)


def feed_forward_names(kind: Kind) -> tuple[str, ...]:
    """Return the names of the linear layers of a block; the last one returns to its input size."""
    names: dict[Kind, tuple[str, ...]] = {
        "qwen2": ("fc1", "fc2"),
        "qwen2_5": ("gate_proj", "up_proj", "down_proj"),
        "qwen3": ("linear_fc1", "linear_fc2"),
    }
    return names[kind]


def merger_names(kind: Kind) -> tuple[str, str, str]:
    """Return the names of a merger's norm and its two linear layers."""
    return ("norm", "linear_fc1", "linear_fc2") if kind == "qwen3" else ("ln_q", "mlp.0", "mlp.2")


def _merger_tensors(
    vision: Vision, prefix: str, norm_size: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    norm, first, second = merger_names(vision.kind)
    merged = vision.merged_size
    yield from _norm(f"{prefix}{norm}", norm_size, has_bias=vision.kind != "qwen2_5")
    yield from _linear(f"{prefix}{first}", merged, merged)
    yield from _linear(f"{prefix}{second}", vision.out_hidden_size, merged)


def _norm(name: str, size: int, *, has_bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (size,)
    if has_bias:
        yield f"{name}.bias", (size,)


def _linear(name: str, outputs: int, inputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


_Tensor = TypeVar("_Tensor")


def published_names(tensors: Mapping[str, _Tensor], vision: Vision) -> dict[str, _Tensor]:
    """Return the tensors of a file under the names of the published files.

    transformers reads two forms and has written both: Qwen2-VL and Qwen2.5-VL as `visual.*` and
    `model.*`, or like its modules as `model.visual.*` and `model.language_model.*`.
    """
    if vision.prefix == "visual.":
        renamed = (("model.visual.", "visual."), ("model.language_model.", "model."))
    else:
        renamed = (("visual.", "model.visual."),)

    def published(name: str) -> str:
        for other, prefix in renamed:
            if name.startswith(other):
                return prefix + name.removeprefix(other)
        return name

    return {published(name): tensor for name, tensor in tensors.items()}
