"""Images of a conversation: their files, checked, and their places among its tokens."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from msrl.data.images.marks import IMAGE
from msrl.data.images.sources import ImageFile, read_image, shown_name
from msrl.errors import MsrlError
from msrl.types import Conversation, Grid, Image, Ints, Message, PlacedImage, RenderedExample
from msrl.vision.decoding import CheckedImage, check_images
from msrl.vision.errors import ImageError
from msrl.vision.settings import VisionSettings
from msrl.vision.sizes import grid_of, image_tokens

_MAX_KNOWN = 1 << 16  # images whose sizes a process remembers
_OPEN_LINE = re.compile(f"{IMAGE}(?!\n)")


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """Settings with which images of rows are read.

    Attributes:
        vision: Settings of the model's image processor.
        text: Control tokens of one image, as text: start, image, end.
        root: Folder that relative paths begin in; None for that of the data file.
        max_images: Largest number of images of a row; None for no limit.
        is_linked: Keep paths in place of files.
        must_decode: Decode every image, which finds damage after the header.
    """

    vision: VisionSettings
    text: str
    root: str | None = None
    max_images: int | None = None
    is_linked: bool = False
    must_decode: bool = True


@dataclass(frozen=True, slots=True)
class ImageRecord:
    """A distinct image of a batch of rows.

    `path` is its first file, and `data` is empty if only the path is kept.
    """

    key: str
    data: bytes
    path: str | None
    num_bytes: int
    form: str
    height: int
    width: int
    grid: Grid


class FileState(NamedTuple):
    """Size of a file in bytes, time of its last change in nanoseconds, and SHA-256."""

    num_bytes: int
    modified_ns: int
    key: str


_SIZES: dict[tuple[str, bool], CheckedImage] = {}


def load_images(
    conversation: Conversation,
    settings: ImageSettings,
    folder: Path,
    image_records: MutableMapping[str, ImageRecord],
    paths: MutableMapping[str, FileState],
) -> Conversation:
    """Return a conversation with its images.

    Args:
        conversation: Conversation whose messages have the sources of images.
        settings: Settings of images.
        folder: Folder of the data file.
        image_records: Distinct images by key, to which those of the conversation are added.
        paths: States of files by path, to which those of its files are added.

    Raises:
        MsrlError: An image cannot be used, or there are too many.
    """
    sources = image_sources(conversation)
    if not sources:
        return conversation
    if settings.max_images is not None and len(sources) > settings.max_images:
        raise MsrlError(
            f"images: the row has {len(sources)} (preprocess.max_images={settings.max_images}). "
            "Raise the limit, or remove images."
        )
    files: list[ImageFile] = []
    for number, source in enumerate(sources, 1):
        try:
            files.append(
                read_image(source, folder if settings.root is None else Path(settings.root))
            )
        except ImageError as error:
            raise _located(error, number, None) from error
        if settings.is_linked and files[-1].path is None:
            raise MsrlError(
                f"image {number}: cannot be linked: the row contains it. Use preprocess.images="
                "embed."
            )
    images = tuple(_checked(files, settings, image_records))
    for file, image in zip(files, images, strict=True):
        if file.path is not None:
            state = FileState(len(file.data), file.modified_ns, image.key)
            paths[str(file.path.absolute())] = state
    if settings.vision.tile:
        messages = tuple(_with_line_breaks(message) for message in conversation.messages)
        conversation = replace(conversation, messages=messages)
    return replace(conversation, images=images)


def _with_line_breaks(message: Message) -> Message:
    """Return a message with a line break after each image, as the template of InternVL has it."""
    return replace(message, content=_OPEN_LINE.sub(f"{IMAGE}\n", message.content))


def image_sources(conversation: Conversation) -> list[Any]:
    """Return the sources of the images of all messages, in order."""
    return [source for message in conversation.messages for source in message.images]


def changed_file(states: Mapping[str, FileState]) -> str | None:
    """Return the path of the first file whose content has changed, or None."""
    for path, (num_bytes, modified_ns, key) in states.items():
        try:
            status = Path(path).stat()
            if (status.st_size, status.st_mtime_ns) == (num_bytes, modified_ns):
                continue
            if hashlib.sha256(read_image(path, Path()).data).hexdigest() != key:
                return path
        except (OSError, ImageError):
            return path
    return None


def _checked(
    files: Sequence[ImageFile],
    settings: ImageSettings,
    image_records: MutableMapping[str, ImageRecord],
) -> list[Image]:
    """Return the images of files. Raises MsrlError for the first one that cannot be used."""
    keys = [hashlib.sha256(file.data).hexdigest() for file in files]
    must_decode = settings.must_decode
    new = {
        key: file for key, file in zip(keys, files, strict=True) if (key, must_decode) not in _SIZES
    }
    results = check_images([file.data for file in new.values()], must_decode=must_decode)
    problems = dict(zip(new, results, strict=True))
    if len(_SIZES) > _MAX_KNOWN:
        _SIZES.clear()
    images: list[Image] = []
    for number, (key, file) in enumerate(zip(keys, files, strict=True), 1):
        checked = problems.get(key) or _SIZES[key, must_decode]
        if isinstance(checked, ImageError):
            raise _located(checked, number, file.path)
        _SIZES[key, must_decode] = checked
        try:
            grid = grid_of(checked.height, checked.width, settings.vision)
        except ImageError as error:
            raise _located(error, number, file.path) from error
        if key not in image_records:
            image_records[key] = _image_record(key, file, checked, grid, settings)
        images.append(Image(key, grid, b""))
    return images


def _image_record(
    key: str, file: ImageFile, checked: CheckedImage, grid: Grid, settings: ImageSettings
) -> ImageRecord:
    path = None if file.path is None else str(file.path.absolute())
    data = b"" if settings.is_linked else file.data
    size = len(file.data)
    return ImageRecord(key, data, path, size, checked.form, checked.height, checked.width, grid)


def _located(error: ImageError, number: int, path: Path | None) -> MsrlError:
    name = "" if path is None else f"{shown_name(str(path))}: "
    return MsrlError(f"image {number}: {error.reason}: {name}{error.problem}")


def place_images(
    example: RenderedExample, images: Sequence[Image], settings: ImageSettings
) -> RenderedExample:
    """Return an example with as many image tokens for each image as it has merged patches.

    Args:
        example: Example with one image token for each image.
        images: Its images in order.
        settings: Settings of images.

    Raises:
        MsrlError: The number of image tokens differs from that of the images.
    """
    vision = settings.vision
    positions: Ints = np.flatnonzero(example.token_ids == vision.image_token_id)
    if len(positions) != len(images):
        raise MsrlError(
            f"images: the rendered row has {len(positions)} image tokens for {len(images)} images. "
            "Use a template that shows every question, and no control tokens of images in texts."
        )
    if not images:
        return example
    counts = np.array([image_tokens(image.grid, vision.merge_size) for image in images], np.int64)
    repeats = np.ones(len(example.token_ids), np.int64)
    repeats[positions] = counts
    offsets = positions + np.concatenate([np.zeros(1, np.int64), np.cumsum(counts - 1)[:-1]])
    placed = tuple(
        PlacedImage(int(offset), image) for offset, image in zip(offsets, images, strict=True)
    )
    token_ids = np.repeat(example.token_ids, repeats)
    return RenderedExample(token_ids, np.repeat(example.loss_mask, repeats), images=placed)


def cuts_image(images: Sequence[PlacedImage], length: int, merge_size: int) -> bool:
    """Return True if the first `length` tokens of a sequence do not have all of its images."""
    if not images:
        return False
    last = images[-1]
    return last.offset + image_tokens(last.image.grid, merge_size) > length


def image_settings(vision: VisionSettings, token: Callable[[int], str | None]) -> ImageSettings:
    """Return the settings of images for a tokenizer.

    Args:
        vision: Settings of the model's image processor.
        token: Function that returns the text of a token id, or None.

    Raises:
        MsrlError: The tokenizer lacks a token of images.
    """
    ids = (vision.vision_start_token_id, vision.image_token_id, vision.vision_end_token_id)
    texts = {number: token(number) for number in ids}
    missing = next((number for number, text in texts.items() if text is None), None)
    if missing is not None:
        raise MsrlError(
            f"the tokenizer has no token {missing}, which config.json names for images. Restore "
            "the files of the model."
        )
    return ImageSettings(vision, "".join(text for text in texts.values() if text))
