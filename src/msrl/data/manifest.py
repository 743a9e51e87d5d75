"""Manifest of a dataset (`<prefix>_manifest.json`) and names of all files of a prefix.

The manifest is a `DatasetManifest` as JSON. `<prefix>_incomplete` exists while files are moved to
their final names: a dataset with this file is incomplete.
"""

from __future__ import annotations

import dataclasses
import glob
import json
from pathlib import Path
from typing import Any

from msrl.errors import MsrlError
from msrl.files import digest_of_ends, read_text_within
from msrl.types import DatasetManifest

KEYS = {
    "pretrain": ("text",),
    "sft": ("input_ids", "attention_mask", "labels"),
    "prompts": ("input_ids", "attention_mask", "labels"),
    # The first four keys come from MindSpeed-LLM. `values` holds two numbers per row: the margin
    # or the label, and the weight.
    "pairs": (
        "chosen_input_ids",
        "chosen_labels",
        "rejected_input_ids",
        "rejected_labels",
        "values",
    ),
    "labeled": ("input_ids", "attention_mask", "labels", "values"),
    "steps": ("input_ids", "attention_mask", "labels"),
}
TEXTS = ("pretrain", "steps")  # kinds of data without a template
PREFERENCES = ("pairs", "labeled")  # kinds of preference data


def dataset_name(prefix: str, kind: str, key: str) -> str:
    """Return the file name of a key without suffix, as Megatron and MindSpeed write it."""
    return f"{prefix}_{key}_document" if kind == "pretrain" else f"{prefix}_packed_{key}_document"


def manifest_path(prefix: str) -> Path:
    return Path(f"{prefix}_manifest.json")


def answers_path(prefix: str) -> Path:
    """Return the path of the answers of a prompt dataset.

    The file has one JSON object per prompt, in order: {"answer": ..., "extra": {...}}.
    """
    return Path(f"{prefix}_answers.jsonl")


def bad_rows_path(prefix: str) -> Path:
    """Return the path of the rows that were dropped because they are not valid.

    The file has one JSON object per row: {"row": location, "problem": ..., "value": ...}.
    """
    return Path(f"{prefix}_bad_rows.jsonl")


def image_paths(prefix: str, *, is_linked: bool = False) -> tuple[Path, ...]:
    """Return the files of the images of a dataset (`data/images/files.py`)."""
    names = ("images.jsonl", "image_rows.bin", "image_rows.idx")
    names = names if is_linked else ("images.bin", "images.idx", *names)
    return tuple(Path(f"{prefix}_{name}") for name in names)


def reason_text(reason: str) -> str:
    """Return the reason of dropped rows as text. Names of columns in it stay as they are."""
    if reason == "turn_order":
        return "wrong order of turns"
    return reason.replace("_", " ") if reason.isidentifier() else reason


def incomplete_path(prefix: str) -> Path:
    return Path(f"{prefix}_incomplete")


def all_paths(prefix: str) -> tuple[Path, ...]:
    """Return every file that a dataset of any kind can have under this prefix."""
    names = {dataset_name(prefix, kind, key) for kind, keys in KEYS.items() for key in keys}
    data = [Path(f"{name}.{suffix}") for name in sorted(names) for suffix in ("bin", "idx")]
    images = image_paths(prefix)
    return (*data, *images, answers_path(prefix), bad_rows_path(prefix), manifest_path(prefix))


def has_data(prefix: str) -> bool:
    """Return True if preprocessed data with this prefix exists."""
    path = Path(prefix)
    return not prefix.endswith("/") and any(path.parent.glob(f"{glob.escape(path.name)}_*.idx"))


def existing_prefixes(folder: Path) -> list[str]:
    """Return the prefixes of all datasets in a folder."""
    ends = {f"{dataset_name('', kind, keys[0])}.idx" for kind, keys in KEYS.items()}
    names = [path.name for path in folder.glob("*.idx")] if folder.is_dir() else []
    stems = {name.removesuffix(end) for name in names for end in ends if name.endswith(end)}
    return sorted(str(folder / stem) for stem in stems)


def record_name(prefix: str, path: Path) -> str:
    """Return the name of a file in the manifest: its name after the prefix.

    Without the prefix, all files of a dataset can be moved and renamed together.
    """
    return path.name.removeprefix(Path(prefix).name)


def fingerprint(prefix: str) -> str:
    """Return a digest that distinguishes the data of this prefix from other data."""
    others = (manifest_path(prefix), bad_rows_path(prefix))
    files = [path for path in all_paths(prefix) if path.is_file() and path not in others]
    return digest_of_ends((record_name(prefix, path), path) for path in files)


def manifest_text(manifest: DatasetManifest) -> str:
    """Return the manifest as JSON. That of data without images has no key `vision`."""
    values = dataclasses.asdict(manifest)
    if not manifest.vision:
        del values["vision"]
    return json.dumps(values, ensure_ascii=False, indent=1) + "\n"


def read_manifest(prefix: str) -> DatasetManifest | None:
    """Return the manifest of a prefix, or None for data of another system, which has no manifest.

    Raises:
        MsrlError: the dataset is incomplete, or the manifest is not valid.
    """
    if incomplete_path(prefix).exists():
        raise MsrlError(
            f"{prefix}: incomplete: `msrl preprocess` ended before all files had their final "
            "names. Run it again with --overwrite."
        )
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    known = {field.name for field in dataclasses.fields(DatasetManifest)}
    try:
        loaded: dict[str, Any] = json.loads(read_text_within(path))
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in loaded.items()
            if key in known
        }
        values["files"] = {
            str(name): {"bytes": int(record["bytes"]), "crc32": str(record["crc32"])}
            for name, record in values.get("files", {}).items()
        }
        return DatasetManifest(**values)
    except (
        ValueError,
        TypeError,
        AttributeError,
        KeyError,
        RecursionError,
        OverflowError,
    ) as error:
        raise MsrlError(f"{path}: not a valid manifest: {error}") from error
