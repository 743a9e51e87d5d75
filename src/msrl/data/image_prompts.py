"""Prompts with images for an engine, rendered from one conversation at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from msrl.data.images.load import ImageRecord, ImageSettings, load_images, place_images
from msrl.data.images.marks import refuse_marks
from msrl.data.render import Renderer
from msrl.types import Conversation, Ints, PlacedImage, RenderedExample


def image_prompt(
    renderer: Renderer, settings: ImageSettings, conversation: Conversation, folder: Path
) -> tuple[Ints, tuple[PlacedImage, ...]]:
    """Return the token ids [P] of a prompt, and its images with their files.

    Args:
        renderer: Renderer of the model's tokenizer.
        settings: Settings of the model's images.
        conversation: Conversation whose messages have the sources of images (`images/marks.py`).
        folder: Folder that relative paths begin in.

    Raises:
        MsrlError: An image cannot be used, or a question marks one that it does not have.
    """
    image_records: dict[str, ImageRecord] = {}
    loaded = load_images(conversation, settings, folder, image_records, {})
    if not loaded.images:
        refuse_marks(loaded)
    token_ids = replace(renderer, image_text=settings.text).prompt(loaded)
    no_mask = np.zeros(len(token_ids), np.bool_)
    placed = place_images(RenderedExample(token_ids, no_mask), loaded.images, settings)
    images = tuple(
        replace(item, image=replace(item.image, source=image_records[item.image.key].data))
        for item in placed.images
    )
    return placed.token_ids, images
