"""Images of prompts in `msrl generate` and `chat`: sources of a conversation to placed images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrl.data.columns import is_empty
from msrl.data.image_prompts import image_prompt
from msrl.data.images.load import ImageSettings
from msrl.data.images.marks import attach_images
from msrl.data.render import Renderer
from msrl.errors import MsrlError
from msrl.rollout.engine import EngineImages
from msrl.types import Conversation, Ints, PlacedImage, Prompt
from msrl.vision.settings import has_vision, read_vision_settings
from msrl.workflows.row_images import model_images


@dataclass(frozen=True, slots=True)
class ImagePrompts:
    """Renderer of conversations that may have images.

    `settings` is None if the model reads no images, and `reason` says why.
    """

    renderer: Renderer
    settings: ImageSettings | None = None
    reason: str = "the model has no vision tower. Remove the images."

    @classmethod
    def of(cls, renderer: Renderer) -> ImagePrompts:
        """Return the renderer for the model that a tokenizer belongs to."""
        try:
            return cls(renderer, model_images(renderer.tokenizer))
        except MsrlError as error:
            return cls(renderer, None, str(error))

    def render(
        self, conversation: Conversation, column: Any, folder: Path
    ) -> tuple[Ints, tuple[PlacedImage, ...]]:
        """Return the token ids [P] of a prompt and its images.

        Args:
            conversation: Conversation whose messages have the sources of their images.
            column: The row's column of images, whose places have marks; None without one.
            folder: Folder that relative paths begin in.

        Raises:
            MsrlError: An image cannot be used or has no mark, or the model reads none.
        """
        if self.settings is not None:
            attached = attach_images(conversation, column)
            return image_prompt(self.renderer, self.settings, attached, folder)
        if not is_empty(column) or any(message.images for message in conversation.messages):
            raise MsrlError(f"images: {self.reason}")
        return self.renderer.prompt(conversation), ()

    def engine_images(self, prompts: Iterable[Prompt]) -> EngineImages | None:
        """Return the limits of an engine for these prompts; None if no prompt has images."""
        largest = max((len(prompt.images) for prompt in prompts), default=0)
        if not largest or self.settings is None:
            return None
        return EngineImages(largest, self.settings.vision)


def optional_images(folder: Path, max_images: int) -> EngineImages | None:
    """Return the limits of an engine whose prompts may have images; None if it reads text only."""
    try:
        vision = read_vision_settings(folder) if has_vision(folder) else None
    except MsrlError:  # `ImagePrompts` has the reason
        return None
    return None if vision is None else EngineImages(max_images, vision)
