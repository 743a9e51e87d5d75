"""Pixels of images: encoded file, resized image or tiles, patches.

H and W are the sides of a resized image in pixels, C its channels (3), T the frames of a patch, P
its side, and N the number of patches. Pillow is imported where an image is decoded.
"""

from __future__ import annotations

import io
import warnings
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from msrl.errors import MsrlError
from msrl.types import Grid
from msrl.vision.errors import ImageError
from msrl.vision.settings import VisionSettings
from msrl.vision.sizes import resized_size, tile_rows

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
MAX_PIXELS = 89_478_485  # of a file: the limit of Pillow against decompression bombs
THUMBNAIL = 256  # pixels per side at most
_ORIENTATION = 0x0112  # tag of EXIF
_SIDEWAYS = (5, 6, 7, 8)  # orientations that exchange height and width
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
# Errors of Pillow's decoders for damaged files. Those of C code are among them.
_DAMAGED = (
    *(OSError, ValueError, SyntaxError, TypeError, ArithmeticError, LookupError),
    *(AttributeError, AssertionError, RuntimeError),
)


def image_size(data: bytes) -> tuple[int, int]:
    """Return the height and width of an image in pixels, as it is shown, from its header.

    Raises:
        ImageError: The file is no image of a supported format, or has too many pixels.
    """
    return _shown_size(_open(data))


def decode_image(
    data: bytes, settings: VisionSettings, grid: Grid | None = None
) -> NDArray[np.uint8]:
    """Return the resized image [H, W, C] of an encoded file (JPEG, PNG, WebP, BMP or GIF).

    EXIF's orientation is applied, other color modes become RGB, and transparency is dropped. Of an
    animation, the first frame is read. The image has the size of `grid`, by default the one that
    the limits of the settings give. Tiles lie below each other.

    Raises:
        ImageError: The file is damaged or no image of a supported format, has too many or too few
            pixels, or is too long.
    """
    image = rgb_image(data)
    if settings.tile:
        return _tiles(image, settings, grid)
    if grid is None:
        height, width = resized_size(image.height, image.width, settings)
    else:
        height, width = (size * settings.patch_size for size in grid[1:])
    resized = image.resize((width, height), resample=settings.resample)
    return np.array(resized)


def rgb_image(data: bytes) -> Image:
    """Return an image of Pillow as it is shown, in RGB, before it is resized.

    Raises:
        ImageError: The file is damaged or no image of a supported format, or has too many pixels.
    """
    return _rgb(_open(data))


def _tiles(
    image: Image, settings: VisionSettings, grid: Grid | None
) -> NDArray[np.uint8]:  # [tiles * H, W, C]
    """Return the tiles of an image row by row, and one of the whole image if there are several.

    `grid` has their number, which the limits of the settings give by default.
    """
    count, side = 0 if grid is None else max(1, grid[0] - 1), settings.tile
    limits = (count, count) if count else None
    rows, columns = tile_rows(image.height, image.width, settings, limits)
    resized = image.resize((columns * side, rows * side), resample=settings.resample)
    parts = np.array(resized).reshape(rows, side, columns, side, -1).swapaxes(1, 2)
    tiles = parts.reshape(rows * columns * side, side, -1)
    if rows * columns == 1:
        return tiles
    whole = np.array(image.resize((side, side), resample=settings.resample))
    return np.concatenate([tiles, whole])


def check_image(data: bytes) -> tuple[int, int]:
    """Decode an image and return its height and width in pixels, as it is shown.

    Raises:
        ImageError: The file is damaged or no image of a supported format, or has too many pixels.
    """
    image = _open(data)
    try:
        image.load()
        image.crop((0, 0, 1, 1)).convert("RGB")  # of some modes, there is no conversion
    except _DAMAGED as error:
        raise _damaged(error) from error
    return _shown_size(image)


def thumbnail(data: bytes) -> bytes:
    """Return a small JPEG file of an image, of at most `THUMBNAIL` pixels per side.

    Raises:
        ImageError: The file is damaged or no image of a supported format, or has too many pixels.
    """
    image = _open(data)
    image.draft("RGB", (2 * THUMBNAIL, 2 * THUMBNAIL))  # JPEG files are decoded to fewer pixels
    small = _rgb(image)
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    small.save(file, "JPEG", quality=80)
    return file.getvalue()


def load_decoders() -> None:
    """Import Pillow with its decoders."""
    _pillow().init()


def image_form(data: bytes) -> str | None:
    """Return the format of an image file by its first bytes, or None for other files."""
    starts = {b"\xff\xd8\xff": "JPEG", b"\x89PNG\r\n\x1a\n": "PNG", b"BM": "BMP", b"GIF8": "GIF"}
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    return next((form for start, form in starts.items() if data.startswith(start)), None)


def cut_patches(
    pixels: NDArray[Any],  # [H, W, C]
    settings: VisionSettings,
) -> NDArray[Any]:
    """Return the patches [N, C * T * P * P] of a resized image, without normalization.

    Patches of one merged square follow each other, as the vision tower expects them.
    """
    side, merge = settings.patch_size, settings.merge_size
    height, width, channels = pixels.shape
    rows, columns = height // side, width // side
    squares = pixels.reshape(
        rows // merge, merge, side, columns // merge, merge, side, channels
    ).transpose(0, 3, 1, 4, 6, 2, 5)[:, :, :, :, :, None]
    frames = np.broadcast_to(
        squares, (*squares.shape[:5], settings.temporal_patch_size, *squares.shape[6:])
    )
    return frames.reshape(rows * columns, -1)


def patches_of(
    pixels: NDArray[np.uint8],  # [H, W, C]
    settings: VisionSettings,
) -> NDArray[np.float32]:
    """Return the normalized patches [N, C * T * P * P] of a resized image."""
    return cut_patches(normalize(pixels, settings), settings)


def normalize(
    pixels: NDArray[np.uint8],  # [H, W, C]
    settings: VisionSettings,
) -> NDArray[np.float32]:
    """Return the normalized channels of a resized image, [H, W, C]."""
    return np.stack(
        [levels[pixels[..., channel]] for channel, levels in enumerate(_levels(settings))], -1
    )


@lru_cache(maxsize=8)
def _levels(settings: VisionSettings) -> NDArray[np.float32]:
    """Return the normalized value of each of the 256 levels in each channel, [C, 256].

    The values are rounded as those of transformers: once after rescaling, then in float32.
    """
    scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean = np.array(settings.image_mean, np.float32)[:, None]
    std = np.array(settings.image_std, np.float32)[:, None]
    return (scaled[None] - mean) / std


def require_pillow() -> None:
    """Raise MsrlError if Pillow, which decodes images, is not installed."""
    if find_spec("PIL") is None:
        raise MsrlError(
            "images: Pillow is not installed, which decodes them. Install it with: pip install "
            "pillow"
        )


@lru_cache(maxsize=1)
def _pillow() -> Any:
    """Import Pillow and return its module `Image`. Raises MsrlError if it is not installed."""
    require_pillow()
    from PIL import Image

    # Pillow warns of sizes that `_open` refuses, and of damage and palettes that change no pixel.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Image


def _open(data: bytes) -> Image:
    """Return an image whose header is read. Raises ImageError if it cannot be used."""
    pillow = _pillow()
    try:
        image: Image = pillow.open(io.BytesIO(data), formats=FORMATS)
    except pillow.DecompressionBombError as error:
        raise _too_large(str(error).partition(",")[0]) from error
    except pillow.UnidentifiedImageError as error:
        raise ImageError(
            "not an image",
            f"the file is none of {', '.join(FORMATS)}. Convert it to PNG or JPEG.",
        ) from error
    except _DAMAGED as error:
        raise _damaged(error) from error
    if image.width * image.height > MAX_PIXELS:
        raise _too_large(f"{image.width} x {image.height} pixels")
    return image


def _shown_size(image: Image) -> tuple[int, int]:
    """Return the height and width of an image after the turn that EXIF asks for."""
    width, height = image.size
    try:
        orientation = image.getexif().get(_ORIENTATION)
    except _DAMAGED as error:
        raise _damaged(error) from error
    return (width, height) if orientation in _SIDEWAYS else (height, width)


def _rgb(image: Image) -> Image:
    """Decode an image, turn it as EXIF says and convert it to RGB."""
    transpose = _pillow().Transpose
    try:
        image.load()
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
        turned = image if turn is None else image.transpose(getattr(transpose, turn))
        return _with_8_bits(turned).convert("RGB")
    except _DAMAGED as error:
        raise _damaged(error) from error


def _with_8_bits(image: Image) -> Image:
    """Return an image whose gray levels of 16 bits have the upper 8, as viewers show them.

    Pillow makes all levels above 255 white.
    """
    if not image.mode.startswith("I"):
        return image
    return _pillow().fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))


def _too_large(size: str) -> ImageError:
    return ImageError("too many pixels", f"{size} (limit: {MAX_PIXELS:,}). Make the image smaller.")


def _damaged(error: Exception) -> ImageError:
    problem = str(error).partition("\n")[0][:200] or type(error).__name__
    return ImageError("damaged image", f"{problem}. Replace the file.")
