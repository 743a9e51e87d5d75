"""Settings of the images of a vision-language model, from the files of its folder.

`processor_config.json` (transformers 5, key `image_processor`) comes before
`preprocessor_config.json`. `min_pixels` and `max_pixels` come before `size.shortest_edge` and
`size.longest_edge`, as in transformers. The token ids are those of `config.json`. InternVL has the
tokens before and after an image in its tokenizer only, and cuts images into tiles whatever
`crop_to_patches` of the image processor is (`InternVLProcessorKwargs` of transformers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

from msrl.errors import MALFORMED, MsrlError
from msrl.files import read_text_within
from msrl.models.hf_config import MAX_FILE_BYTES, HfConfig, read_hf_config
from msrl.strict_json import loads

PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
# Models of text that have a vision tower, and why their images are not read.
_TEXT_ONLY = {
    "Gemma3ForConditionalGeneration": "image tokens of Gemma 3 attend in both directions, which is "
    "not supported",
    "Mistral3ForConditionalGeneration": "the vision tower of Mistral 3 is not supported",
}
TILED_PROCESSORS = (
    "GotOcr2ImageProcessor",
    "GotOcr2ImageProcessorFast",
    "GotOcr2ImageProcessorPil",
)
_FILES = ("processor_config.json", "preprocessor_config.json")
_RESAMPLING = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_TOKENS = ("image_token_id", "vision_start_token_id", "vision_end_token_id")
_TILE_MARKS = {"vision_start_token_id": "<img>", "vision_end_token_id": "</img>"}
_MAX_SIDE = 4096  # of a patch or a tile, in pixels
_MAX_TILES = 128
_MAX_TOKENIZER_BYTES = 1 << 28
_FIXED = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "do_center_crop": False,
    "do_pad": False,
}


@dataclass(frozen=True, slots=True)
class VisionSettings:
    """How an image becomes patches and tokens. Numbers of pixels hold after resizing.

    Attributes:
        patch_size: Side of a patch in pixels.
        temporal_patch_size: Frames of a patch, which repeat the image.
        merge_size: Side, in patches, of the square that becomes one token.
        min_pixels: Smallest number of pixels of a resized image.
        max_pixels: Largest number of pixels of a resized image.
        image_mean: Mean of each channel, of values from 0 to 1.
        image_std: Standard deviation of each channel.
        resample: Filter of Pillow by its number; 3 is bicubic.
        image_token_id: Token that represents a square of patches.
        vision_start_token_id: Token before the image tokens of an image.
        vision_end_token_id: Token after them.
        tile: Side of the tiles that an image is cut into, in pixels; 0 for models without tiles.
        min_tiles: Smallest number of tiles, without the one of the whole image.
        max_tiles: Largest number of tiles, without the one of the whole image.
    """

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, float, float]
    image_std: tuple[float, float, float]
    resample: int
    image_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    tile: int = 0
    min_tiles: int = 0
    max_tiles: int = 0

    @property
    def factor(self) -> int:
        """Sides of a resized image are multiples of this number of pixels."""
        return self.patch_size * self.merge_size

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest image."""
        return self.max_pixels // self.factor**2

    def with_limits(self, min_pixels: int | None, max_pixels: int | None) -> VisionSettings:
        """Return the settings with other limits of pixels; None keeps a limit.

        Raises:
            MsrlError: The smallest number exceeds the largest one, or the model has tiles and no
                limit of pixels that is met by any.
        """
        if self.tile:
            return self._with_fewer_tiles(min_pixels, max_pixels)
        low = self.min_pixels if min_pixels is None else min_pixels
        high = self.max_pixels if max_pixels is None else max_pixels
        if low > high:
            raise MsrlError(
                f"min_pixels={low}: exceeds max_pixels={high}. Set preprocess.min_pixels and "
                "preprocess.max_pixels so that it does not."
            )
        return replace(self, min_pixels=low, max_pixels=high)

    def _with_fewer_tiles(self, min_pixels: int | None, max_pixels: int | None) -> VisionSettings:
        """Return the settings with as many tiles as `max_pixels` permits."""
        area = self.tile**2
        if min_pixels is not None:
            raise MsrlError(
                f"preprocess.min_pixels={min_pixels}: has no effect on images that consist of "
                f"tiles of {self.tile} x {self.tile} pixels. Remove it."
            )
        if max_pixels is None:
            return self
        if max_pixels < area:
            raise MsrlError(
                f"preprocess.max_pixels={max_pixels}: a tile of this model has {area} pixels. Set "
                "it to so many or more."
            )
        # Several tiles come with one of the whole image.
        tiles = max(1, max_pixels // area - 1)
        tiles = 1 if max_pixels < 3 * area else min(tiles, self.max_tiles)
        if tiles < self.min_tiles:
            raise MsrlError(
                f"preprocess.max_pixels={max_pixels}: the image processor of the model makes "
                f"{self.min_tiles} tiles of {area} pixels and more. Raise it."
            )
        return replace(self, max_tiles=tiles, max_pixels=_tiled_pixels(self.tile, tiles))

    def as_json(self) -> dict[str, Any]:
        """Return the settings for a manifest."""
        return {
            name: list(cast("tuple[float, ...]", value)) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    def differences(self, other: VisionSettings) -> list[str]:
        """Return the names of the settings that differ."""
        names = (field.name for field in fields(self))
        return [name for name in names if getattr(self, name) != getattr(other, name)]


def from_json(values: Mapping[str, Any]) -> VisionSettings:
    """Return the settings that `as_json` wrote. Further keys are not read.

    Raises:
        ValueError: A setting is missing or has another type.
    """
    try:
        # Data of models without tiles may lack their settings.
        known: dict[str, Any] = {"tile": 0, "min_tiles": 0, "max_tiles": 0, **values}
        read = {field.name: known[field.name] for field in fields(VisionSettings)}
        for name, value in read.items():
            if name in ("image_mean", "image_std"):
                red, green, blue = (float(number) for number in value)
                read[name] = (red, green, blue)
            elif isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} is not a whole number")
        return VisionSettings(**read)
    except MALFORMED as error:
        raise ValueError(f"not the settings of images: {error}") from error


def has_vision(folder: Path) -> bool:
    """Return True if the config.json of a model's folder has a vision tower."""
    return (folder / "config.json").is_file() and "vision_config" in read_hf_config(folder).values


def read_vision_settings(folder: Path) -> VisionSettings:
    """Return the settings of the images of the model in a folder.

    Raises:
        MsrlError: The model has no vision tower, its processor is not supported, or a file is
            missing or malformed.
    """
    if not has_vision(folder):
        raise MsrlError(
            f"{folder}: the model has no vision tower, so it cannot read images. Remove the images "
            "or name a vision-language model."
        )
    config = read_hf_config(folder)
    reason = _TEXT_ONLY.get(config.architecture())
    if reason is not None:
        raise MsrlError(
            f"{folder}: the model reads text only: {reason}. Remove the images or name another "
            "vision-language model."
        )
    tower = _inner(config, "vision_config")
    processor = _read_processor(folder)
    if tower.values.get("model_type") == "internvl_vision" or _is_internvl(config):
        return _tiled_settings(folder, config, processor, tower)
    _check_processor(processor, PROCESSORS)
    low, high = _limits(processor)
    settings = VisionSettings(
        patch_size=_side(processor, "patch_size", 14),
        temporal_patch_size=_side(processor, "temporal_patch_size", 2),
        merge_size=_side(processor, "merge_size", 2),
        min_pixels=low,
        max_pixels=high,
        image_mean=_channels(processor, "image_mean", _CLIP_MEAN),
        image_std=_channels(processor, "image_std", _CLIP_STD),
        resample=_resampling(processor),
        **{name: _token(config, name) for name in _TOKENS},
    )
    _check_tower(processor, settings, tower)
    return settings


def _is_internvl(config: HfConfig) -> bool:
    return config.values.get("model_type") == "internvl"


def _tiled_settings(
    folder: Path, config: HfConfig, processor: HfConfig, tower: HfConfig
) -> VisionSettings:
    """Return the settings of a model whose images consist of tiles."""
    _check_processor(processor, TILED_PROCESSORS)
    size = _inner(processor, "size")
    tile, patch = _side(size, "height", 448), _first_side(tower, "patch_size", 14)
    if tile != _side(size, "width", 448) or tile != _first_side(tower, "image_size", 448):
        processor.fail("size", "must be the square of image_size of the vision tower")
    fewest, most = (processor.count(*pair) for pair in (("min_patches", 1), ("max_patches", 12)))
    if fewest > most or most > _MAX_TILES:
        processor.fail("max_patches", f"must be from min_patches={fewest} to {_MAX_TILES}")
    return VisionSettings(
        patch_size=patch,
        temporal_patch_size=1,
        merge_size=2,
        min_pixels=tile**2,
        max_pixels=_tiled_pixels(tile, most),
        image_mean=_channels(processor, "image_mean", _CLIP_MEAN),
        image_std=_channels(processor, "image_std", _CLIP_STD),
        resample=_resampling(processor),
        image_token_id=_token(config, "image_token_id"),
        **_marks(folder),
        tile=tile,
        min_tiles=fewest,
        max_tiles=most,
    )


def _tiled_pixels(tile: int, tiles: int) -> int:
    """Return the pixels of an image of so many tiles, and of the one of the whole image."""
    return tile**2 * (tiles + (tiles > 1))


def _first_side(tower: HfConfig, key: str, default: int) -> int:
    """Return a number of pixels that config.json names once or twice."""
    value: Any = tower.values.get(key)
    first = cast("list[Any]", value)[:1] if isinstance(value, list) else [value]
    return _side(HfConfig({key: first[0] if first else None}, tower.where), key, default)


def _marks(folder: Path) -> dict[str, int]:
    """Return the tokens before and after an image from the files of the tokenizer."""
    tokens: dict[str, int] = {}
    for name, key in (
        ("tokenizer_config.json", "added_tokens_decoder"),
        ("tokenizer.json", "added_tokens"),
    ):
        tokens |= _added_tokens(folder / name, key)
        if set(_TILE_MARKS.values()) <= tokens.keys():
            return {key: tokens[mark] for key, mark in _TILE_MARKS.items()}
    missing = next(mark for mark in _TILE_MARKS.values() if mark not in tokens)
    raise MsrlError(
        f"{folder}: the tokenizer has no token {missing}, which encloses the tokens of an image. "
        "Restore the files of the tokenizer."
    )


def _added_tokens(file: Path, key: str) -> dict[str, int]:
    """Return the numbers of tokens by their texts, as a file of a tokenizer has them."""
    if not file.is_file():
        return {}
    try:
        values: Any = loads(read_text_within(file, _MAX_TOKENIZER_BYTES))
        entries: Any = values.get(key) or {}
        if isinstance(entries, dict):
            pairs = cast("dict[str, Any]", entries).items()
            return {str(entry["content"]): int(number) for number, entry in pairs}
        return {str(entry["content"]): int(entry["id"]) for entry in entries}
    except (*MALFORMED, OSError) as error:
        raise MsrlError(f"{file}: {key} cannot be read ({error}). Restore the file.") from error


def names_normalization(folder: Path) -> bool:
    """Return True if the file of the image processor has the mean and deviation of channels."""
    return {"image_mean", "image_std"} <= _read_processor(folder).values.keys()


def _read_processor(folder: Path) -> HfConfig:
    """Return the settings of the image processor."""
    for name in _FILES:
        file = folder / name
        if not file.is_file():
            continue
        try:
            values: Any = loads(read_text_within(file, MAX_FILE_BYTES))
        except (ValueError, RecursionError, OSError) as error:
            raise MsrlError(f"{file}: not valid JSON ({error}). Restore the file.") from error
        if not isinstance(values, dict):
            raise MsrlError(f"{file}: must contain a JSON object. Restore the file.")
        read = HfConfig(cast("dict[str, Any]", values), str(file))
        if name == _FILES[1]:
            return read
        if "image_processor" in read.values:
            return _inner(read, "image_processor")
    raise MsrlError(
        f"{folder}: has no {_FILES[1]}, which says how images are resized. Copy it from the "
        "original model."
    )


def _inner(config: HfConfig, key: str) -> HfConfig:
    value = config.values.get(key)
    if not isinstance(value, dict):
        config.fail(key, "must be an object. Restore the file")
    return HfConfig(cast("dict[str, Any]", value), f"{config.where}: {key}")


def _check_processor(processor: HfConfig, supported: tuple[str, ...]) -> None:
    """Refuse other image processors, and steps that this package does not have."""
    processor.refuse("image_processor_type", *supported)
    for key, value in _FIXED.items():
        processor.refuse(key, value)
    if "rescale_factor" in processor.values:
        factor = processor.positive("rescale_factor", 1 / 255)
        if abs(factor * 255 - 1) > 1e-6:
            processor.fail("rescale_factor", "is not supported. Supported: 1/255")


def _limits(processor: HfConfig) -> tuple[int, int]:
    """Return the smallest and the largest number of pixels of a resized image."""
    values = processor.values
    size = _inner(processor, "size") if values.get("size") is not None else HfConfig({}, "")
    limits: list[int] = []
    for key, edge, default in (
        ("min_pixels", "shortest_edge", 56 * 56),
        ("max_pixels", "longest_edge", 28 * 28 * 1280),
    ):
        if values.get(key) is not None:
            limits.append(processor.count(key))
        elif size.values and size.values.get(edge) is None:
            # Qwen2-VL's first files have the names of the limits in `size` too.
            limits.append(size.count(key))
        else:
            limits.append(size.count(edge, default))
    if limits[0] > limits[1]:
        raise MsrlError(
            f"{processor.where}: min_pixels={limits[0]} exceeds max_pixels={limits[1]}. Restore "
            "the file."
        )
    return limits[0], limits[1]


def _side(config: HfConfig, key: str, default: int) -> int:
    value = config.count(key, default)
    if value > _MAX_SIDE:
        config.fail(key, f"exceeds the limit of {_MAX_SIDE}. Restore the file")
    return value


def _channels(
    processor: HfConfig, key: str, default: tuple[float, float, float]
) -> tuple[float, float, float]:
    value: Any = processor.values.get(key)
    numbers = default if value is None else value
    if not isinstance(numbers, list | tuple) or len(cast("list[Any]", numbers)) != 3:
        processor.fail(key, "must be three numbers, one for each channel")
    listed = cast("list[Any]", numbers)
    red, green, blue = (processor.checked_positive(key, number, None) for number in listed)
    return red, green, blue


def _resampling(processor: HfConfig) -> int:
    value: Any = processor.values.get("resample")
    value = 3 if value is None else value
    if isinstance(value, bool) or value not in _RESAMPLING:
        processor.fail("resample", "must be the number of a filter of Pillow, such as 3 (bicubic)")
    return int(value)


def _token(config: HfConfig, key: str) -> int:
    value: Any = config.values.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        config.fail(key, "must be a token id. Restore the file")
    return int(value)


def _check_tower(processor: HfConfig, settings: VisionSettings, tower: HfConfig) -> None:
    """Refuse a processor whose patches differ from the tower's."""
    read = {
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "merge_size": "spatial_merge_size",
    }
    for name, key in read.items():
        value = getattr(settings, name)
        if tower.values.get(key) is not None and tower.count(key) != value:
            raise MsrlError(
                f"{processor.where}: {name}={value}: the vision tower of the model has "
                f"{key}={tower.count(key)}. Copy the processor's file from the original model."
            )
