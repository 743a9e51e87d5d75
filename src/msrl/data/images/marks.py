"""Marks of images in the texts of a row, and the images that belong to them.

A row names images in content parts, or in a column beside texts with marks. A message has the
character `IMAGE` in place of each of its images.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from msrl.data.columns import is_empty
from msrl.errors import MsrlError
from msrl.strict_json import loads
from msrl.types import Conversation, Message

IMAGE = "\ufdd1"
"""Represents an image in the text of a message: a noncharacter, which no text contains."""
NEXT = None
"""Source of a content part that names no image: the next image of the column."""
MARKS = ("<image>", "<|vision_start|><|image_pad|><|vision_end|>")  # most systems; ROLL
_MARK = re.compile("|".join(map(re.escape, (IMAGE, *MARKS))))
_PLAIN_MARK = re.compile("|".join(map(re.escape, MARKS)))


def attach_images(conversation: Conversation, column: Any) -> Conversation:
    """Return a conversation whose messages have the images of their marks.

    Args:
        conversation: Conversation whose messages have the images of content parts.
        column: The row's column of images: a list, or one image.

    Raises:
        MsrlError: There are more or fewer marks than images, or a mark in another turn than a
            question.
    """
    sources = _sources(column)
    messages = conversation.messages
    if not sources and not any(message.images for message in messages):
        return conversation
    _check_characters(messages)
    waiting = list(sources)
    num_marks = sum(_num_marks(message, has_column=bool(sources)) for message in messages)
    if num_marks != len(sources):
        raise MsrlError(
            f"images: {len(sources)} in the column but {num_marks} marks <image> in the questions. "
            "Write one mark where each image belongs."
        )
    for number, message in enumerate(messages, 1):
        _check_turn(message, number, has_column=bool(sources))
    if not sources:
        return conversation
    return replace(conversation, messages=tuple(_attach(item, waiting) for item in messages))


def refuse_marks(conversation: Conversation) -> None:
    """Raise MsrlError if a question of a row without images has a mark of an image."""
    for number, message in enumerate(conversation.messages, 1):
        mark = _PLAIN_MARK.search(message.content) if message.role == "user" else None
        if mark is not None:
            raise MsrlError(
                f"turn {number}: {mark[0]}: marks an image, but the row has none. Add the column "
                "images, or remove the mark."
            )


def refuse_unread(conversation: Conversation) -> None:
    """Raise MsrlError if a conversation has images whose files are not read."""
    if not conversation.images and any(message.images for message in conversation.messages):
        raise MsrlError("images: only texts are read here. Remove the images.")


def _sources(column: Any) -> list[Any]:
    """Return the images of a column. CSV files have lists as JSON texts."""
    if isinstance(column, str) and column.lstrip().startswith("["):
        try:
            column = loads(column)
        except (ValueError, RecursionError) as error:
            raise MsrlError(f"images: not a list in JSON: {error}") from error
    if is_empty(column):
        return []
    return cast("list[Any]", column) if isinstance(column, list) else [column]


def _num_marks(message: Message, *, has_column: bool) -> int:
    """Return the number of images that a message takes from the column."""
    if message.role != "user":
        return 0
    num_parts = sum(source is NEXT for source in message.images)
    return num_parts + (len(_PLAIN_MARK.findall(message.content)) if has_column else 0)


def _attach(message: Message, waiting: list[Any]) -> Message:
    """Return a message with its images. Those of the column are taken from `waiting`."""
    if message.role != "user":
        return message
    parts, images = list(message.images), list[Any]()
    for mark in _MARK.findall(message.content):
        source = parts.pop(0) if mark == IMAGE else NEXT
        images.append(waiting.pop(0) if source is NEXT else source)
    content = _PLAIN_MARK.sub(IMAGE, message.content)
    return replace(message, content=content, images=tuple(images))


def _check_characters(messages: Sequence[Message]) -> None:
    """Raise MsrlError if a text has the character that stands for an image."""
    for number, message in enumerate(messages, 1):
        if message.content.count(IMAGE) != len(message.images):
            raise MsrlError(f"turn {number}: contains U+FDD1, which is not a character. Remove it.")


def _check_turn(message: Message, number: int, *, has_column: bool) -> None:
    """Raise MsrlError if another turn than a question has an image."""
    if message.role == "user":
        return
    mark = _PLAIN_MARK.search(message.content) if has_column else None
    if message.images or mark is not None:
        raise MsrlError(
            f"turn {number}: an image in a turn of {message.role}: only questions can have "
            "images. Move it to a question."
        )
