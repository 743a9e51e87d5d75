"""Sizes and pixels beside the image processor of transformers."""

import dataclasses
import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from msrl.errors import MsrlError
from msrl.vision import pixels
from msrl.vision.errors import ImageError
from msrl.vision.pixels import check_image, cut_patches, decode_image, image_size, patches_of
from msrl.vision.settings import read_vision_settings
from msrl.vision.sizes import grid_of, image_tokens, resized_size
from support import assert_mentions
from vision_folders import PROCESSOR, encoded, picture, write_folder


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return read_vision_settings(write_folder(tmp_path_factory.mktemp("vision")))


@pytest.fixture(scope="module")
def processor():
    """Return the image processor of transformers that needs Pillow only."""
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    size = {"shortest_edge": PROCESSOR["min_pixels"], "longest_edge": PROCESSOR["max_pixels"]}
    return module.Qwen2VLImageProcessorPil(size=size, patch_size=14, merge_size=2)


def test_sizes_equal_those_of_transformers(settings, processor):
    random = np.random.default_rng(0)
    sizes = np.exp(random.uniform(np.log(8), np.log(6000), (600, 2))).astype(int).tolist()
    sizes = [(h, w) for h, w in sizes if max(h, w) <= 200 * min(h, w)]
    assert len(sizes) >= 500
    for height, width in sizes:
        grid = grid_of(height, width, settings)
        assert grid[0] * grid[1] * grid[2] == processor.get_number_of_image_patches(height, width)
        assert image_tokens(grid, 2) * 4 == grid[1] * grid[2]
        assert resized_size(height, width, settings) == (grid[1] * 14, grid[2] * 14)


@pytest.mark.parametrize(
    ("width", "height", "form", "mode"),
    [
        (84, 84, "PNG", "RGB"),
        (300, 200, "JPEG", "RGB"),
        (640, 480, "JPEG", "CMYK"),
        (33, 70, "PNG", "RGBA"),
        (50, 40, "GIF", "P"),
        (900, 700, "WEBP", "RGB"),
        (41, 91, "BMP", "L"),
        (100, 60, "PNG", "1"),
    ],
)
def test_pixels_equal_those_of_transformers(settings, processor, width, height, form, mode):
    data = encoded(picture(width, height, seed=width).convert(mode), form)
    image = Image.open(io.BytesIO(data))
    expected = processor(images=[image], return_tensors="np")
    resized = decode_image(data, settings)
    grid = grid_of(*image_size(data), settings)
    assert grid == tuple(expected["image_grid_thw"][0])
    assert resized.dtype == np.uint8 and resized.shape == (grid[1] * 14, grid[2] * 14, 3)
    patches = patches_of(resized, settings)
    assert patches.dtype == np.float32
    assert np.array_equal(patches, expected["pixel_values"])
    plain = cut_patches(resized, settings)
    assert plain.dtype == np.uint8 and plain.shape == patches.shape


def test_gray_levels_of_16_bits_are_those_of_a_viewer(settings):
    levels = np.random.default_rng(0).integers(0, 256, (60, 90), np.uint8)
    noise = np.random.default_rng(1).integers(0, 256, (60, 90), np.uint16)
    deep = encoded(Image.fromarray(levels.astype(np.uint16) << 8 | noise), "PNG")
    plain = encoded(Image.fromarray(levels), "PNG")
    assert Image.open(io.BytesIO(deep)).mode == "I;16" and check_image(deep) == (60, 90)
    assert np.array_equal(decode_image(deep, settings), decode_image(plain, settings))


def test_the_orientation_of_exif_is_applied(settings):
    image = picture(90, 60, seed=5)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(image, "PNG", exif=exif)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        assert image_size(data) == check_image(data) == (expected.height, expected.width)
        turned = decode_image(encoded(expected), settings)
        assert np.array_equal(decode_image(data, settings), turned)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, body=b""):
    """Return a PNG file that states a size, and has hardly any pixels."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(body))
    return b"\x89PNG\r\n\x1a\n" + header + data + chunk(b"IEND", b"")


def damaged(data):
    return data[: len(data) // 2]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not an image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
        (b"%PDF-1.7\n", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (encoded(picture(40, 40), "TIFF"), "not an image"),
        (encoded(picture(40, 40), "ICO"), "not an image"),
        (encoded(picture(40, 40), "PPM"), "not an image"),
        (damaged(encoded(picture(40, 40), "JPEG")), "damaged image"),
        (damaged(encoded(picture(40, 40), "PNG")), "damaged image"),
        (damaged(encoded(picture(40, 40), "WEBP")), "damaged image"),
        (png(40, 40), "damaged image"),
        (png(9460, 9460), "too many pixels"),
        (png(60_000, 60_000), "too many pixels"),
    ],
    ids=range(13),
)
@pytest.mark.filterwarnings("ignore:Image size")
def test_a_file_that_is_no_picture_is_one_line(settings, data, reason):
    for read in (lambda: decode_image(data, settings), lambda: check_image(data)):
        with pytest.raises(ImageError) as error:
            read()
        assert error.value.reason in (reason, "damaged image")
        assert "\n" not in str(error.value)


def test_the_limit_of_pixels_holds_before_any_is_decoded(monkeypatch):
    monkeypatch.setattr(pixels, "MAX_PIXELS", 100)
    with pytest.raises(ImageError) as error:
        image_size(encoded(picture(11, 10)))
    assert_mentions(error.value, "11 x 10", "100")
    assert image_size(encoded(picture(10, 10))) == (10, 10)


def test_long_and_tiny_pictures_are_refused(settings):
    for width, height, reason in ((1, 201, "ratio"), (4020, 20, "ratio"), (1, 1, "small")):
        with pytest.raises(MsrlError) as error:
            decode_image(encoded(picture(width, height)), settings)
        assert_mentions(error.value, f"{width} x {height}", reason)
    narrow = dataclasses.replace(settings, min_pixels=1)
    assert resized_size(9, 9, narrow) == (28, 28)


@pytest.mark.slow
def test_importing_the_package_does_not_import_pillow():
    code = (
        "import sys, msrl.vision.pixels, msrl.vision.sizes, msrl.vision.settings\n"
        "print(sorted({'PIL', 'torch', 'transformers'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "[]"
