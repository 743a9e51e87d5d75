"""Sizes and checksums of a checkpoint's files.

They are recorded when the files are written and compared before a training resumes.

A record is {"bytes": size, "crc32": of the whole file}, or {"bytes": size, "sha256": digest of the
zip records}, which `checkpoint/torch_files` computes for files of weights. Light to import.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msrl.checksums import file_crc32
from msrl.errors import MsrlError
from msrl.files import flush_to_disk

_DIGEST = "sha256"

Record = Mapping[str, Any]


def record_file(path: Path) -> Record:
    """Flush a finished file to disk and return its record."""
    flush_to_disk(path)
    return {"bytes": path.stat().st_size, "crc32": file_crc32(path)}


def damages(root: Path, records: Mapping[str, Record]) -> list[str]:
    """Return a sentence per file that differs from its record; names are relative to `root`.

    Several files are read at a time.
    """
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        problems = pool.map(lambda item: _damage(root / item[0], item[1]), records.items())
        return [problem for problem in problems if problem is not None]


def _damage(path: Path, record: Record) -> str | None:
    """Return a sentence on the difference of a file from its record, or None."""
    if not path.is_file():
        return f"{path} is missing"
    size = path.stat().st_size
    if size != record["bytes"]:
        return f"{path} has {size} bytes instead of {record['bytes']}"
    try:
        return None if _is_same(path, record) else f"{path} does not match its checksum"
    except MsrlError as error:
        return str(error)


def _is_same(path: Path, record: Record) -> bool:
    """Return True if a file has the checksum of its record. Raises MsrlError for damaged records.

    Only a file of weights has no CRC-32.
    """
    if "crc32" in record:
        return bool(file_crc32(path) == record["crc32"])
    from msrl.checkpoint.torch_files.whole_files import check_records

    return bool(check_records(path) == record["sha256"])


def with_checksum(contents: Mapping[str, Any]) -> str:
    """Return the contents as JSON that includes its own checksum."""
    return json.dumps({**contents, _DIGEST: _digest(contents)}, indent=1) + "\n"


def has_checksum(text: str) -> bool:
    """Return True if the JSON includes a checksum, right or wrong.

    Raises ValueError for text that is not JSON.
    """
    contents = json.loads(text)
    return isinstance(contents, dict) and _DIGEST in contents


def read_with_checksum(text: str) -> dict[str, Any]:
    """Return the contents that `with_checksum` wrote.

    Raises ValueError for other text or a wrong checksum.
    """
    contents = json.loads(text)
    if not isinstance(contents, dict) or contents.pop(_DIGEST, None) != _digest(contents):
        raise ValueError("it does not match its checksum")
    return contents


def _digest(contents: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()
