"""Files of the images of prompts, for functions that read them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from msrl import temporary
from msrl.errors import MsrlError
from msrl.types import Image, Prompt
from msrl.vision.pixels import image_form


class ImageFiles:
    """Context manager with the images of prompts as files, each distinct one once.

    The folder is created for the first image.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._folder: Path | None = None
        self._paths = dict[str, str]()

    def __enter__(self) -> ImageFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def paths(self, prompt: Prompt) -> tuple[str, ...]:
        """Return the files of the images of a prompt, in order.

        Raises:
            MsrlError: A file could not be written, or the data has changed.
        """
        return tuple(self._path(placed.image) for placed in prompt.images)

    def _path(self, image: Image) -> str:
        if image.key not in self._paths:
            try:
                self._paths[image.key] = self._write(image)
            except OSError as error:
                raise MsrlError(
                    f"reward.sources: the images of prompts could not be written to the temporary "
                    f"folder ({error.strerror or error}). Free some space, or set TMPDIR."
                ) from error
        return self._paths[image.key]

    def _write(self, image: Image) -> str:
        if self._folder is None:
            self._folder = self._stack.enter_context(temporary.owned_folder("msrl-images-"))
        data = image.data
        path = self._folder / f"{image.key}.{(image_form(data) or 'img').lower()}"
        path.write_bytes(data)
        return str(path)
