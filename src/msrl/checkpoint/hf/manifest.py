"""Manifest of a Hugging Face folder written by msrl: size and checksum of each weight file.

    msrl_manifest.json    {"format": 1, "kind": "huggingface", "dtype", "num_parameters",
                           "files": {name: {"bytes", "crc32"}}, "versions"}

`crc32` covers all bytes of the file. Config and tokenizer are not listed, because users edit them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msrl.checkpoint.hf.writer import Record
from msrl.errors import MALFORMED, MsrlError
from msrl.files import read_text_within, write_text
from msrl.models.families import num_parameters
from msrl.models.paths import MANIFEST
from msrl.models.shape import Shape

HF_MANIFEST = MANIFEST
_KIND = "huggingface"


def write_hf_manifest(
    folder: Path, shape: Shape, dtype: str, files: Mapping[str, Record], versions: Mapping[str, str]
) -> None:
    """Write the manifest of a folder with complete weight files."""
    contents = {
        "dtype": dtype,
        "num_parameters": num_parameters(shape),
        "files": dict(sorted(files.items())),
        "versions": dict(versions),
    }
    write_text(
        folder / HF_MANIFEST, json.dumps({"format": 1, "kind": _KIND, **contents}, indent=1) + "\n"
    )


def hf_manifest_files(folder: Path) -> dict[str, Record] | None:
    """Return the files listed in a folder's manifest; None if there is no manifest.

    Raises:
        MsrlError: The manifest is not readable.
    """
    path = folder / HF_MANIFEST
    if not path.is_file():
        return None
    try:
        contents: Any = json.loads(read_text_within(path))
        if contents["format"] != 1 or contents["kind"] != _KIND:
            raise ValueError("unknown manifest format")
        return {
            str(name): {"bytes": int(record["bytes"]), "crc32": str(record["crc32"])}
            for name, record in contents["files"].items()
        }
    except MALFORMED as error:
        raise MsrlError(
            f"{path}: not a manifest of a Hugging Face folder ({error!r}). "
            "Remove it or convert the checkpoint again."
        ) from error
