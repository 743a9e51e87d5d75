"""Images of rows in `msrl preprocess`: settings, sizes of batches, record in the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from msrl.config.schema import PreprocessConfig
from msrl.data.files.readers import RowBatch
from msrl.data.images.files import ImageWriter
from msrl.data.images.load import ImageSettings, image_settings
from msrl.data.tokenize import TokenizeSettings
from msrl.data.tokenizer import TextTokenizer
from msrl.errors import MsrlError
from msrl.vision.settings import has_vision, read_vision_settings

_MAX_ROWS = 32  # of a batch, whose images are in memory together
_KEYS = ("min_pixels", "max_pixels", "max_images", "image_root")


def model_images(tokenizer: TextTokenizer) -> ImageSettings:
    """Return how images are read for the model that a tokenizer belongs to.

    Raises:
        MsrlError: The model reads no images, or its files do not say how.
    """
    vision = read_vision_settings(Path(tokenizer.folder))
    return image_settings(vision, tokenizer.backend.id_to_token)


def make_image_settings(
    settings: PreprocessConfig, tokenizer: TextTokenizer
) -> tuple[ImageSettings | None, str]:
    """Return how images of rows are read, or None and the reason why the model reads none.

    Raises:
        MsrlError: a setting for images has no effect, or is not valid.
    """
    try:
        images = model_images(tokenizer)
    except MsrlError as error:
        if key := next((key for key in _KEYS if getattr(settings, key) is not None), None):
            raise MsrlError(
                f"preprocess.{key}={getattr(settings, key)}: has no effect: {error}"
            ) from error
        return None, str(error)
    if settings.image_root is not None and not Path(settings.image_root).is_dir():
        raise MsrlError(
            f"preprocess.image_root={settings.image_root}: no such folder. Name the folder that "
            "paths of images begin in."
        )
    return replace(
        images,
        vision=images.vision.with_limits(settings.min_pixels, settings.max_pixels),
        root=settings.image_root,
        max_images=settings.max_images,
        is_linked=settings.images == "link",
        must_decode=settings.verify_images == "full",
    ), ""


def split_batches(batches: Iterable[RowBatch]) -> Iterator[RowBatch]:
    """Yield batches of few rows: the images of all batches in work are in memory."""
    for batch in batches:
        for start in range(0, len(batch.rows), _MAX_ROWS):
            rows = batch.rows[start : start + _MAX_ROWS]
            yield RowBatch(batch.path, batch.first + start, rows, batch.lines)


def image_record(
    job: TokenizeSettings, images: ImageWriter | None, *, is_linked: bool
) -> dict[str, Any]:
    """Return what the manifest has on the images of a dataset; nothing without images."""
    if images is None or job.image_settings is None:
        return {}
    return {
        **job.image_settings.vision.as_json(),
        "images": "link" if is_linked else "embed",
        "num_images": images.num_images,
        "num_sequences": images.num_rows,
        "pillow": version("pillow"),
    }


def is_vision_folder(folder: str) -> bool:
    """Return True if a tokenizer belongs to a model that may read images."""
    try:
        return has_vision(Path(folder))
    except MsrlError:
        return False
