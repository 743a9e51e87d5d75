"""Cache of mcore checkpoints that were converted for `serve`.

    <cache>/<digest>/     Hugging Face folder with msrl_manifest.json

The digest covers the sizes and checksums of the checkpoint's files and the contents of its config
and tokenizer files. A folder appears atomically, and its checksums are verified before it is used.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from msrl.errors import MsrlError
from msrl.files import utf8
from msrl.limits import print_note
from msrl.tracking.progress import amount_text, progress

if TYPE_CHECKING:
    from msrl.checkpoint.source import WeightSource

_VERSION = 1  # of the digest and of the converted folders


def cache_folder(setting: str | None) -> Path:
    """Return the folder of the cache: the setting, or `msrl/serve` in the user's cache."""
    if setting is not None:
        return Path(setting).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home, "msrl", "serve")


def checkpoint_digest(load: Path, iteration: int | str | None = None) -> str:
    """Return a digest of an iteration (default: the latest) of an mcore checkpoint.

    Checksums of the manifest are used as they are; files without a checksum are read.
    """
    from msrl.checkpoint.hf.folder import sidecar_files
    from msrl.checkpoint.integrity import mcore_checks
    from msrl.checkpoint.mcore.files import SIDECAR
    from msrl.checksums import file_crc32

    digest = hashlib.blake2b(f"{_VERSION}\n".encode(), digest_size=16)
    for check in sorted(mcore_checks(load, iteration, depth="sizes"), key=lambda check: check.name):
        record = check.record or {"bytes": check.num_bytes, "crc32": file_crc32(check.path)}
        digest.update(utf8(f"{check.name} {json.dumps(dict(record), sort_keys=True)}\n"))
    for file in sidecar_files(load / SIDECAR):
        content = file.read_bytes()
        digest.update(utf8(f"{file.name} {len(content)}\n") + content)
    return digest.hexdigest()


def is_usable(folder: Path) -> bool:
    """Return True if a converted folder exists and is undamaged; report damage."""
    try:
        return _is_complete(folder)
    except MsrlError as error:
        line = f"{folder}: the cached conversion is damaged ({error})"
        print_note(line)
        return False


def _is_complete(folder: Path) -> bool:
    """Return True if a converted folder exists. Raises MsrlError if it is damaged."""
    from msrl.checkpoint.integrity import hf_checks
    from msrl.workflows.training.integrity import verify_files

    if not (folder / "config.json").is_file():
        return False
    verify_files(hf_checks(folder))
    return True


def convert(source: WeightSource, load: Path, folder: Path) -> None:
    """Write the weights of `source`, opened from `load`, as a Hugging Face folder.

    A complete folder that another process has written in the meantime stays: that process may be
    reading it.

    Raises:
        MsrlError: The folder cannot be written, or the disk is full.
    """
    from msrl.checkpoint.convert import hf_specs, write_hf

    with contextlib.suppress(MsrlError):  # damaged
        if _is_complete(folder):
            return
    if folder.exists():
        shutil.rmtree(folder)
    num_bytes = sum(spec.num_bytes for spec in hf_specs(source, None).values())
    with progress(f"converting {load}", total=num_bytes, unit="B") as bar:
        write_hf(source, folder, None, bar.advance)
    size = amount_text(num_bytes, "B")
    line = f"Converted {load} to {folder} ({size}), where the next start finds it"
    print_note(line)
