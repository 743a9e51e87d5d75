"""Vision towers of Qwen2-VL, its successors and InternVL: their shape, as config.json describes it.

A tower turns the patches of images into features of the language model's size, one for each
square of `merge_size` x `merge_size` patches.

Sources: `Qwen2VLVisionConfig`, `Qwen2_5_VLVisionConfig`, `Qwen3VLVisionConfig`,
`InternVLVisionConfig` and `InternVLConfig` of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from msrl.models.hf_config import MAX_LAYERS, HfConfig

Kind = Literal["qwen2", "qwen2_5", "qwen3", "internvl"]


@dataclass(frozen=True, slots=True)
class TrainedParts:
    """Parts of a vision tower that are trained: its blocks, and the projector after them."""

    tower: bool = False
    projector: bool = False


_ACTIVATIONS = {"qwen2": "quick_gelu", "qwen2_5": "silu", "qwen3": "gelu_pytorch_tanh"}
_MAX_SIDE = 4096  # of a tile, in pixels
# Keys of InternVL's tower and projector with the only value that is supported.
_INTERNVL = {
    "hidden_act": "gelu",
    "use_mask_token": False,
    "use_absolute_position_embeddings": True,
    "use_mean_pooling": True,
}
_INTERNVL_PROJECTOR = {
    "downsample_ratio": 0.5,
    "projector_hidden_act": "gelu",
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "default",
}


@dataclass(frozen=True, slots=True)
class Vision:
    """Shape of a vision tower.

    - `kind`: qwen2 has LayerNorms and a plain feed-forward block, qwen2_5 RMS norms and a gated
      one. qwen3 is like qwen2 and has learned positions too. internvl has tiles, learned positions
      instead of rotary ones, and learned scales of the outputs of attention and feed-forward block.
    - `prefix`: prefix of the tensors in Hugging Face files.
    - `merge_size`: patches per side of the square that becomes one feature.
    - `window`, `full_layers`: features per side of an attention window, and the layers without
      windows (qwen2_5). Without a window, a patch attends to all patches of its image.
    - `num_positions`: entries of the square table of learned positions (qwen3).
    - `deepstack`: layers whose outputs also become features. Those of the i-th one are added to the
      image tokens after the i-th layer of the language model (arXiv:2406.04334).
    - `tile`: patches per side of a tile. Images consist of tiles, whose patches attend to each
      other and to a class token. 0: images have any size.
    - `rms_norm`: norms of blocks are RMS norms without biases, with epsilon `norm_eps`.
    - `qkv_bias`, `qk_norm`: biases of queries, keys and values, and RMS norms over all channels of
      queries and keys.

    The numbers of tokens other than `image_token_id` are None if config.json has none.
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
    video_token_id: int | None = None
    vision_start_token_id: int | None = None
    vision_end_token_id: int | None = None
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    num_positions: int = 0
    deepstack: tuple[int, ...] = ()
    tile: int = 0
    rms_norm: bool = False
    norm_eps: float = 1e-6
    qkv_bias: bool = True
    qk_norm: bool = False

    @property
    def has_patch_bias(self) -> bool:
        """True if the projection of patches has a bias."""
        return self.kind in ("qwen3", "internvl")

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Shape of a patch: channels, frames unless images have only one, and pixels."""
        frames = () if self.tile else (self.temporal_patch_size,)
        return (self.in_channels, *frames, self.patch_size, self.patch_size)

    @property
    def projector_size(self) -> int:
        """Outputs of the first linear layer of the projector."""
        return self.out_hidden_size if self.tile else self.merged_size

    @property
    def patch_elements(self) -> int:
        """Numbers of a patch: channels, frames and pixels."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Channels of the patches that become one feature."""
        return self.hidden_size * self.merge_size**2


def read_vision(
    config: HfConfig,
    kind: Kind,
    prefix: str,
    out_hidden_size: int,
    *,
    first_token: int = 151652,
    has_deepstack: bool = True,
) -> Vision:
    """Return the tower of a vision-language model, whose language model has `out_hidden_size`.

    Absent keys have the defaults of transformers' config classes. `first_token` is the one of
    `vision_start_token_id`. Without `has_deepstack`, a tower of qwen3 has no such layers.

    Raises:
        MsrlError: A value is invalid or not supported.
    """
    tower = _section(config)
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
        vision_start_token_id=_token(config, "vision_start_token_id", first_token),
        vision_end_token_id=_token(config, "vision_end_token_id", first_token + 1),
        image_token_id=_token(config, "image_token_id", first_token + 3),
        video_token_id=_token(config, "video_token_id", first_token + 4),
    )
    _check_sizes(tower, vision, size_key, out_hidden_size)
    if kind == "qwen2_5":
        vision = replace(vision, rms_norm=True)
        window = tower.count("window_size", 112) // vision.merge_size // vision.patch_size
        if not window:
            tower.fail("window_size", "is smaller than the pixels of one feature")
        full = _layers(tower, "fullatt_block_indexes", (7, 15, 23, 31), vision.depth)
        return replace(vision, window=window, full_layers=full)
    if kind == "qwen3":
        positions = tower.count("num_position_embeddings", 2304)
        if not has_deepstack:
            tower.refuse("deepstack_visual_indexes", [])
            return replace(vision, num_positions=positions)
        deepstack = _layers(tower, "deepstack_visual_indexes", (8, 16, 24), vision.depth)
        return replace(vision, num_positions=positions, deepstack=deepstack)
    return vision


def read_tiled_vision(config: HfConfig, out_hidden_size: int) -> Vision:
    """Return the tower of InternVL, whose language model has `out_hidden_size`.

    Raises:
        MsrlError: A value is invalid or not supported.
    """
    tower = _section(config)
    for key, value in _INTERNVL.items():
        tower.refuse(key, value)
    tower.refuse("norm_type", "layer_norm", "rms_norm")
    for key, value in _INTERNVL_PROJECTOR.items():
        config.refuse(key, value)
    patch = _square(tower, "patch_size", 14)
    side = _square(tower, "image_size", 448)
    tile = side // patch
    if side % (2 * patch):
        tower.fail("image_size", f"must be a multiple of {2 * patch}, the pixels of a feature")
    vision = Vision(
        kind="internvl",
        prefix="vision_tower.",
        depth=tower.count("num_hidden_layers", 24),
        hidden_size=tower.count("hidden_size", 1024),
        ffn_hidden_size=tower.count("intermediate_size", 4096),
        num_heads=tower.count("num_attention_heads", 16),
        patch_size=patch,
        temporal_patch_size=1,
        merge_size=2,
        in_channels=tower.count("num_channels", 3),
        out_hidden_size=out_hidden_size,
        rope_theta=1.0,
        image_token_id=_token(config, "image_token_id", 151667),
        tile=tile,
        rms_norm=tower.values.get("norm_type") == "rms_norm",
        norm_eps=tower.positive("layer_norm_eps", 1e-6),
        qkv_bias=tower.flag("attention_bias", False),
        qk_norm=tower.flag("use_qk_norm", False),
    )
    if config.count("image_seq_length", 256) != (tile // 2) ** 2:
        config.fail("image_seq_length", f"must be {(tile // 2) ** 2}, the features of a tile")
    if vision.depth > MAX_LAYERS:
        tower.fail("num_hidden_layers", f"exceeds the limit of {MAX_LAYERS}. Restore the file")
    if vision.hidden_size % vision.num_heads:
        tower.fail("hidden_size", f"must be a multiple of num_attention_heads={vision.num_heads}")
    return vision


def _section(config: HfConfig) -> HfConfig:
    section: object = config.values.get("vision_config") or {}
    if not isinstance(section, dict):
        config.fail("vision_config", "must be a mapping")
    return HfConfig(cast("dict[str, Any]", section), f"{config.where}: vision_config")


def _square(tower: HfConfig, key: str, default: int) -> int:
    """Return the side of a square, which configs name once or twice."""
    value: object = tower.values.get(key)
    value = default if value is None else value
    sides = [*cast("list[object]", value)] if isinstance(value, list | tuple) else [value]
    side = sides[0] if sides else None
    is_square = all(other == side for other in sides) and len(sides) < 3
    if type(side) is not int or not 0 < side <= _MAX_SIDE or not is_square:
        tower.fail(key, f"must be one number of pixels from 1 to {_MAX_SIDE}, or twice the same")
    return side


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
