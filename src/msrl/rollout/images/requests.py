"""Images in requests to vLLM's server, which are read as those of rows (vLLM 0.23 to 0.32).

vLLM opens dozens of formats in the server's process, and draws transparent images on white. Here,
another process with limits checks the files of strangers first, and the pixels are those of rows.
Errors are the client's, so that it does not repeat the request.
"""

from __future__ import annotations

from typing import Any

from msrl.data.images.sources import MAX_FILE_BYTES
from msrl.vision.decoding import check_images
from msrl.vision.errors import ImageError
from msrl.vision.pixels import rgb_image

_NO_FILES = "image_url: no files of the server are read. Send the image as a data URL (base64)."


def read_as_rows() -> None:
    """Let vLLM's server in this process read images as msrl reads those of rows.

    Raises:
        RuntimeError: vLLM has no such functions.
    """
    from vllm.multimodal.media.connector import MediaConnector
    from vllm.multimodal.media.image import ImageMediaIO

    replaced: dict[tuple[Any, str], Any] = {
        (ImageMediaIO, "load_bytes"): _load_bytes,
        (MediaConnector, "_load_file_url"): _refuse_file,
        (MediaConnector, "_assert_url_in_allowed_media_domains"): _check_host,
        (MediaConnector, "_load_data_url"): _load_data_url(MediaConnector),
    }
    for (owner, name), function in replaced.items():
        if not hasattr(owner, name):
            raise RuntimeError(f"vllm: no {owner.__name__}.{name}, which vLLM 0.23 to 0.32 have")
        setattr(owner, name, function)


def _load_bytes(_: Any, data: bytes) -> Any:
    """Return a checked image in vLLM's form. Raises ValueError if it cannot be used."""
    from vllm.multimodal.media.base import MediaWithBytes

    if len(data) > MAX_FILE_BYTES:
        raise ValueError(f"image_url: the file has more than {MAX_FILE_BYTES >> 20} MiB.")
    (checked,) = check_images([data])
    if isinstance(checked, ImageError):
        raise ValueError(f"image_url: {checked}")
    return MediaWithBytes(rgb_image(data), data)


def _refuse_file(*_: Any) -> Any:
    raise ValueError(_NO_FILES)


def _check_host(connector: Any, url: Any) -> None:
    """Raise ValueError if images of a host are not downloaded."""
    allowed = connector.allowed_media_domains
    if allowed and url.hostname not in allowed:
        raise ValueError(
            f"image_url: {url.hostname}: this server does not download images from this host "
            "(serve.image_hosts). Send the image as a data URL (base64)."
        )


def _load_data_url(connector: Any) -> Any:
    """Return vLLM's function, whose error about another encoding becomes one of the client."""
    load = connector._load_data_url

    def load_or_refuse(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except NotImplementedError as error:
            raise ValueError(f"image_url: {error}") from error

    return load_or_refuse
