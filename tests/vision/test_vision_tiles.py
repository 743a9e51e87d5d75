"""Tiles of InternVL beside the image processor of transformers, and prompts with them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msrl.data.image_prompts import image_prompt
from msrl.data.render import make_renderer
from msrl.data.rows.turns import read_messages
from msrl.data.templates.files import load_template
from msrl.data.tokenizer import open_tokenizer
from msrl.errors import MsrlError
from msrl.types import Conversation
from msrl.vision.pixels import cut_patches, decode_image, patches_of
from msrl.vision.settings import VisionSettings, from_json, read_vision_settings
from msrl.vision.sizes import grid_of, image_tokens
from msrl.workflows.row_images import model_images
from support import mentions
from vision_folders import TILED_CONFIG, TILED_PROCESSOR, encoded, picture, write_tiled_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiled_model(tmp_path_factory.mktemp("model") / "vl")


@pytest.fixture(scope="module")
def settings(model: Path) -> VisionSettings:
    return read_vision_settings(model)


@pytest.fixture(scope="module")
def processor() -> Any:
    """Return the image processor of transformers that needs Pillow only."""
    module = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    keys = ("size", "min_patches", "max_patches", "image_mean", "image_std")
    return module.GotOcr2ImageProcessorPil(**{key: TILED_PROCESSOR[key] for key in keys})


def test_numbers_of_tiles_equal_those_of_transformers(
    settings: VisionSettings, processor: Any
) -> None:
    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(np.log(8), np.log(6000), (500, 2))).astype(int).tolist()
    for height, width in [*sizes, (56, 56), (56, 112), (112, 56), (168, 224), (8, 6000)]:
        grid = grid_of(height, width, settings)
        options = {"crop_to_patches": True}
        assert grid[0] == processor.get_number_of_image_patches(height, width, options)
        assert grid[1:] == (4, 4) and image_tokens(grid, 2) == 4 * grid[0]


@pytest.mark.parametrize(
    ("width", "height", "form", "mode"),
    [
        (56, 56, "PNG", "RGB"),
        (300, 200, "JPEG", "RGB"),
        (40, 190, "WEBP", "RGB"),
        (33, 70, "PNG", "RGBA"),
        (100, 60, "PNG", "L"),
    ],
)
def test_tiles_equal_those_of_transformers(
    settings: VisionSettings, processor: Any, width: int, height: int, form: str, mode: str
) -> None:
    from PIL import Image

    data = encoded(picture(width, height, seed=width).convert(mode), form)
    image = Image.open(io.BytesIO(data))
    expected = processor(images=[image], crop_to_patches=True, return_tensors="np")["pixel_values"]
    pixels = decode_image(data, settings)
    grid = grid_of(height, width, settings)
    assert pixels.dtype == np.uint8 and pixels.shape == (grid[0] * 56, 56, 3)
    np.testing.assert_array_equal(pixels, decode_image(data, settings, grid))
    theirs = expected.transpose(0, 2, 3, 1).reshape(pixels.shape)
    patches = patches_of(pixels, settings)
    assert patches.shape == (grid[0] * 16, 588)
    np.testing.assert_array_equal(patches, cut_patches(theirs, settings))


def test_an_image_has_the_tiles_of_the_data_whatever_the_limit_of_the_model(
    settings: VisionSettings,
) -> None:
    data = encoded(picture(300, 200, seed=1))
    fewer = settings.with_limits(None, 3 * 56 * 56)
    assert (fewer.max_tiles, fewer.max_tokens) == (2, 12)
    grid = grid_of(200, 300, fewer)
    np.testing.assert_array_equal(
        decode_image(data, settings, grid), decode_image(data, fewer, grid)
    )
    assert settings.with_limits(None, 2 * 56 * 56).max_tiles == 1
    assert settings.with_limits(None, None) == settings == from_json(settings.as_json())
    assert (settings.max_tiles, settings.max_tokens) == (6, 28)
    for limits, words in (
        ((5000, None), ("min_pixels=5000", "tiles")),
        ((None, 3000), ("max_pixels=3000", "3136")),
    ):
        with pytest.raises(MsrlError, match=mentions(*words)):
            settings.with_limits(*limits)


@pytest.mark.parametrize(
    ("processor", "config", "words"),
    [
        ({"image_processor_type": "Qwen2VLImageProcessor"}, {}, ("Qwen2VLImageProcessor",)),
        ({"size": {"height": 56, "width": 28}}, {}, ("size", "image_size")),
        ({"size": {"height": 448, "width": 448}}, {}, ("size", "image_size")),
        ({"max_patches": 129}, {}, ("max_patches=129", "128")),
        ({"min_patches": 7}, {}, ("max_patches=6", "min_patches=7")),
        ({}, {"image_token_id": None}, ("image_token_id",)),
    ],
)
def test_tiles_that_are_not_supported_are_one_line(
    tmp_path: Path, processor: dict[str, Any], config: dict[str, Any], words: tuple[str, ...]
) -> None:
    folder = write_tiled_model(tmp_path / "vl", TILED_CONFIG | config)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(TILED_PROCESSOR | processor))
    with pytest.raises(MsrlError, match=mentions(*words)):
        read_vision_settings(folder)


def test_a_tokenizer_without_the_tokens_around_images_is_one_line(
    tmp_path: Path, model: Path
) -> None:
    folder = write_tiled_model(tmp_path / "vl")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("</img>", "<end>"))
    config = folder / "tokenizer_config.json"
    config.write_text(config.read_text().replace("</img>", "<end>"))
    with pytest.raises(MsrlError, match=mentions("</img>", str(folder))):
        read_vision_settings(folder)
    assert read_vision_settings(model).vision_end_token_id == 4


@pytest.mark.parametrize("line_break", ["", "\n"])
def test_prompts_equal_those_of_the_template_with_expanded_tiles(
    model: Path, tmp_path: Path, line_break: str
) -> None:
    (tmp_path / "a.png").write_bytes(encoded(picture(170, 60, seed=1)))
    content = [
        {"type": "image", "image": "a.png"},
        {"type": "text", "text": f"{line_break}How many?"},
    ]
    tokenizer = open_tokenizer(model)
    renderer = make_renderer(load_template("native"), tokenizer)
    conversation = Conversation(read_messages([{"role": "user", "content": content}]))
    ids, (placed,) = image_prompt(renderer, model_images(tokenizer), conversation, tmp_path)
    assert placed.image.grid == (4, 4, 4)
    context = "<IMG_CONTEXT>" * 16
    expected = f"<|im_start|>user\n<img>{context}</img>\nHow many?<|im_end|>\n"
    expected += "<|im_start|>assistant\n"
    assert ids.tolist() == tokenizer.backend.encode(expected, add_special_tokens=False).ids
    assert ids[placed.offset - 1] == 3 and ids[placed.offset] == 6
