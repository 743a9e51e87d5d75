"""Stages of an image before the decoder layers, on the ranks and in transformers.

The stages of one image, in order: normalized patches, blocks of the vision tower, features, and
positions of all tokens. P patches, F features, T tokens.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl.diagnose.recorder import Recorder, first_output
from msrl.errors import MsrlError
from msrl.limits import print_note
from msrl.models.shape import Shape
from msrl.packages import missing_package
from msrl.rollout.engine import EngineImages
from msrl.types import Floats, Image, Ints, MicroBatch, PlacedImage
from msrl.vision.settings import VisionSettings, read_vision_settings
from msrl.vision.sizes import grid_of, image_tokens

if TYPE_CHECKING:
    from torch import Tensor, nn

    from msrl.models.vision.tower import Vision
    from msrl.trainer.model.vision.features import ImageLoader

PIXELS, FEATURES, POSITIONS = "pixels", "features", "positions"
_SQUARES = (6.4, 9.3)  # of the image: several windows, and sides that are no multiples
_WORDS = (5, 7)  # text tokens before and after the image


@dataclass(frozen=True, slots=True)
class ImageProbe:
    """Sequence with one image, and the settings of its pixels."""

    token_ids: Ints  # [T]
    image: PlacedImage
    settings: VisionSettings

    @property
    def batch(self) -> MicroBatch:
        """Micro-batch of the sequence alone."""
        ends = np.array([0, len(self.token_ids)], np.int32)
        no_loss = np.zeros(len(self.token_ids), np.bool_)
        return MicroBatch(self.token_ids, self.token_ids, no_loss, ends, images=(self.image,))

    @property
    def engine_images(self) -> EngineImages:
        """Limits of an engine that reads this image only."""
        rows, columns = self.image.image.grid[1:]
        num_pixels = rows * columns * self.settings.patch_size**2
        return EngineImages(1, self.settings.with_limits(None, num_pixels))


def image_probe(shape: Shape, folder: Path) -> ImageProbe | None:
    """Return a sequence with an image; None without a vision tower or an image processor.

    Images that consist of tiles are not compared either.
    """
    vision = shape.vision
    if vision is None or vision.image_token_id >= shape.vocab_size:
        return None
    if vision.tile:
        print_note("images are not compared: those of this model consist of tiles")
        return None
    try:
        settings = read_vision_settings(folder)
        data = _image_file(settings.patch_size * settings.merge_size)
    except MsrlError as error:
        print_note(f"images are not compared: {error}")
        return None
    except ModuleNotFoundError as error:
        print_note(f"images are not compared. {missing_package(error) or error}")
        return None
    return _probe(vision, shape.vocab_size, data, settings)


def _image_file(unit: int) -> bytes:
    """Return an encoded image of smooth colors, so that its size has to change."""
    from PIL import Image as Pillow

    height, width = (round(count * unit) for count in _SQUARES)
    rows, columns = np.mgrid[:height, :width]
    waves = [np.sin(rows / (7 + 5 * c)) * np.cos(columns / (11 - 3 * c)) for c in range(3)]
    colors = np.stack(waves, -1) * 120 + 128
    file = io.BytesIO()
    Pillow.fromarray(colors.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def _probe(vision: Vision, num_words: int, data: bytes, settings: VisionSettings) -> ImageProbe:
    from msrl.vision.pixels import image_size

    grid = grid_of(*image_size(data), settings)
    special = {
        vision.vision_start_token_id,
        vision.image_token_id,
        vision.vision_end_token_id,
        vision.video_token_id,
    }
    words = [word for word in range(min(num_words, 100)) if word not in special]
    before, after = words[: _WORDS[0]], words[_WORDS[0] : sum(_WORDS)]
    middle = [vision.image_token_id] * image_tokens(grid, settings.merge_size)
    start, end = vision.vision_start_token_id, vision.vision_end_token_id
    assert start is not None and end is not None, "only towers with tiles lack them"
    ids = [*before, start, *middle, end, *after]
    placed = PlacedImage(len(before) + 1, Image("0" * 64, grid, data))
    return ImageProbe(np.array(ids, np.int64), placed, settings)


def rank_stages(tower: nn.Module, loader: ImageLoader, probe: ImageProbe) -> dict[str, Floats]:
    """Return the stages of a tower of msrl."""
    import torch

    from msrl.trainer.model.vision.images import find_image_tokens

    image = probe.image.image
    with torch.inference_mode():
        patches = loader.load([image])
        stages = _tower_stages(tower, patches, lambda: tower(patches, [image.grid]))
    positions = find_image_tokens(probe.batch, loader.vision).positions
    assert positions is not None, "only image tokens of tiles have the positions of text"
    return stages | {POSITIONS: positions.T.astype(np.float32)}


def reference_stages(model: Any, probe: ImageProbe, folder: Path) -> dict[str, Floats]:
    """Return the stages of a model of transformers; those that it does not have are missing."""
    import torch

    tower = next(
        (m for m in model.modules() if hasattr(m, "blocks") and hasattr(m, "merger")), None
    )
    if tower is None:
        return {}
    grids = torch.tensor([probe.image.image.grid])
    patches = _reference_patches(probe, folder)
    with torch.inference_mode():
        stages = _tower_stages(tower, patches, lambda: tower(patches, grid_thw=grids))
    return {**stages, **_reference_positions(model, probe, grids)}


def _tower_stages(
    tower: nn.Module,
    patches: Tensor,  # [P, elements]
    run: Callable[[], object],
) -> dict[str, Floats]:
    """Return patches, outputs of the blocks, and features, in the order of the patches."""
    recorder, blocks = Recorder(), [*tower.get_submodule("blocks").children()]
    recorder.watch("embedded", tower.get_submodule("patch_embed.proj"), _flat)
    for number, block in enumerate(blocks):
        recorder.watch(f"tower block {number}", block, first_output)
    recorder.watch(FEATURES, tower.get_submodule("merger"), first_output)
    inputs: list[Floats] = []
    handle = blocks[0].register_forward_pre_hook(
        lambda _module, arguments: inputs.append(arguments[0].float().cpu().numpy())
    )
    try:
        run()
    finally:
        handle.remove()
        outputs = recorder.end()
    order = _order(outputs.pop("embedded"), inputs[0])
    ordered = {name: _restored(values, order) for name, values in outputs.items()}
    return {PIXELS: patches.float().cpu().numpy()} | ordered


def _flat(output: Any) -> Tensor:
    """Return the output of a convolution or linear layer of patches, [P, c]."""
    return output.reshape(len(output), -1)


def _order(
    embedded: Floats,  # [P, c]
    inputs: Floats,  # [P, c]
) -> Ints | None:
    """Return the patch of each row of the first block; None if they have no other order.

    Towers with windows put the patches of a window side by side, in an order of their own.
    """
    by_value, rows = (np.lexsort(values.T) for values in (embedded, inputs))
    if not np.array_equal(embedded[by_value], inputs[rows]):
        return None
    order = np.empty(len(rows), np.int64)
    order[rows] = by_value
    return order


def _restored(
    values: Floats,  # [P, c] or [F, c]
    order: Ints | None,  # [P]
) -> Floats:
    """Return values of patches, or of squares of patches, in the order of the image."""
    if order is None:
        return values
    per_row = len(order) // len(values)
    restored = np.empty_like(values)
    restored[order[::per_row] // per_row] = values
    return restored


def _reference_patches(probe: ImageProbe, folder: Path) -> Tensor:
    """Return the patches of transformers' processor, or msrl's own if it has none for Pillow."""
    import torch
    from PIL import Image as Pillow

    from msrl.vision.pixels import decode_image, patches_of

    image = probe.image.image
    try:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )
    except ImportError:
        pixels = decode_image(image.data, probe.settings, image.grid)
        return torch.from_numpy(patches_of(pixels, probe.settings))
    processor: Any = Qwen2VLImageProcessorPil.from_pretrained(folder)
    decoded = Pillow.open(io.BytesIO(image.data))
    return processor(decoded, return_tensors="pt")["pixel_values"]


def _reference_positions(model: Any, probe: ImageProbe, grids: Tensor) -> Mapping[str, Floats]:
    """Return the positions of transformers' model, [T, 3]."""
    import torch

    owner = next((m for m in model.modules() if hasattr(m, "get_rope_index")), None)
    if owner is None:
        return {}
    ids = torch.from_numpy(probe.token_ids)[None]
    inputs: dict[str, Any] = {"input_ids": ids, "image_grid_thw": grids}
    if "mm_token_type_ids" in inspect.signature(owner.get_rope_index).parameters:
        is_image = np.zeros(len(probe.token_ids), np.int64)
        count = image_tokens(probe.image.image.grid, probe.settings.merge_size)
        is_image[probe.image.offset : probe.image.offset + count] = 1
        inputs["mm_token_type_ids"] = torch.from_numpy(is_image)[None]
    positions, _ = owner.get_rope_index(**inputs)
    return {POSITIONS: positions[:, 0].T.float().numpy()}
