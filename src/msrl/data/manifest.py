"""The manifest beside the data: `<prefix>_manifest.json`, a `DatasetManifest` as JSON, and the names of all files of a prefix.

`<prefix>_incomplete` stands while files are being put in place: data that has it is not whole.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from msrl.errors import MsrlError
from msrl.files import digest_of_ends
from msrl.types import DatasetManifest

KEYS = {"pretrain": ("text",), "sft": ("input_ids", "attention_mask", "labels"), "prompts": ("input_ids", "attention_mask", "labels")}


def dataset_name(prefix: str, kind: str, key: str) -> str:
    """The name of one key's files without suffix, as Megatron and MindSpeed have it."""
    return f"{prefix}_{key}_document" if kind == "pretrain" else f"{prefix}_packed_{key}_document"


def manifest_path(prefix: str) -> Path:
    return Path(f"{prefix}_manifest.json")


def answers_path(prefix: str) -> Path:
    """The answers of prompts as text, one JSON object per line in the order of the prompts: {"answer": ..., "extra": {...}}."""
    return Path(f"{prefix}_answers.jsonl")


def incomplete_path(prefix: str) -> Path:
    return Path(f"{prefix}_incomplete")


def all_paths(prefix: str) -> tuple[Path, ...]:
    """Every file that data of any kind may have under this prefix."""
    names = {dataset_name(prefix, kind, key) for kind, keys in KEYS.items() for key in keys}
    data = [Path(f"{name}.{suffix}") for name in sorted(names) for suffix in ("bin", "idx")]
    return (*data, answers_path(prefix), manifest_path(prefix))


def record_name(prefix: str, path: Path) -> str:
    """The name of a file in the manifest: what follows the prefix, so that files may be moved and renamed together."""
    return path.name.removeprefix(Path(prefix).name)


def fingerprint(prefix: str) -> str:
    """What tells data of this prefix from other data."""
    there = [path for path in all_paths(prefix) if path.is_file() and path != manifest_path(prefix)]
    return digest_of_ends((record_name(prefix, path), path) for path in there)


def manifest_text(manifest: DatasetManifest) -> str:
    """The manifest as JSON."""
    return json.dumps(dataclasses.asdict(manifest), ensure_ascii=False, indent=1) + "\n"


def read_manifest(prefix: str) -> DatasetManifest | None:
    """The manifest of a prefix; None for data of another system, which has none. Raises MsrlError when data or manifest is not whole."""
    if incomplete_path(prefix).exists():
        raise MsrlError(f"{prefix}: its files were being put in place when `msrl preprocess` was ended; run it again with --overwrite")
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    known = {field.name for field in dataclasses.fields(DatasetManifest)}
    try:
        loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in loaded.items() if key in known}
        values["files"] = {
            str(name): {"bytes": int(record["bytes"]), "crc32": str(record["crc32"])} for name, record in values.get("files", {}).items()
        }
        return DatasetManifest(**values)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise MsrlError(f"{path}: not a manifest of msrl: {error}") from error
