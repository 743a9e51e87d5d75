"""Data files of a folder by split, as the hubs and the `datasets` library name them.

A split is a folder or a part of a file name: `data/train-00000-of-00002.parquet`,
`test/0000.parquet`, `train.jsonl`. `save_to_disk` writes a folder with `state.json` for a dataset,
and one with `dataset_dict.json` for a dictionary of splits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from msrl.errors import MsrlError, nearest
from msrl.files import read_text_within

_METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
# The keywords of `datasets.data_files`, with the name of their split.
_KEYWORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})")


def folder_files(
    folder: Path, split: str | None, is_data: Callable[[Path], bool]
) -> tuple[Path, ...]:
    """Return the data files of a folder, in the order of their names.

    Args:
        folder: the folder.
        split: split to read; None if the folder has only one.
        is_data: whether a file is a data file.

    Raises:
        MsrlError: the folder has several splits and none was named, or not the named one.
    """
    names = _saved_splits(folder)
    files = [file for file in _all_files(folder) if is_data(file)]
    splits = {file: _split_name(file.relative_to(folder), names) for file in files}
    known = sorted({name for name in splits.values() if name is not None})
    if not any(_keyword(name) for name in known) and not names:
        known = []
    if split is not None:
        requested = split if split in known else _KEYWORDS.get(split.lower(), split)
        if requested not in known:
            hint = nearest(split, known) if known else "it has none"
            raise MsrlError(f"preprocess.split={split}: no split of {folder}; {hint}")
        files = [file for file in files if splits[file] == requested]
        return _complete_files(folder, _one_subset(folder, files))
    if len(known) > 1:
        counts = (f"{name} ({_count(splits.values(), name)})" for name in known)
        raise MsrlError(
            f"preprocess.input={folder}: has the splits {', '.join(counts)}. Choose one with "
            f"preprocess.split, as in --split {known[-1]}, or name files."
        )
    return _complete_files(folder, _one_subset(folder, files) if known and not names else files)


def _complete_files(folder: Path, files: Sequence[Path]) -> tuple[Path, ...]:
    """Return the files to read of a folder.

    Raises:
        MsrlError: shards are missing or left over, or two files are one dataset in two formats.
    """
    shards: dict[Path, dict[str, set[str]]] = {}
    stems: dict[Path, Path] = {}
    for file in files:
        if shard := _SHARD.match(file.name):
            shards.setdefault(file.parent / shard[1], {}).setdefault(shard[3], set()).add(shard[2])
        other = stems.setdefault(_without_suffix(file), file)
        if other != file:
            raise MsrlError(
                f"preprocess.input={folder}: has {other.name} and {file.name}, one dataset in two "
                "formats? Name the files to read."
            )
    for stem, totals in shards.items():
        counts = [f"{len(numbers)} of {int(total)}" for total, numbers in totals.items()]
        is_complete = all(len(numbers) == int(total) for total, numbers in totals.items())
        if len(totals) > 1 or not is_complete:
            raise MsrlError(
                f"preprocess.input={folder}: has {' and '.join(counts)} shards of {stem.name}. "
                "Complete them, remove those of another version, or name the files to read."
            )
    return tuple(files)


def _without_suffix(file: Path) -> Path:
    """Return a path without the suffixes of its format and compression."""
    is_compressed = file.suffix in (".gz", ".bz2", ".zst")
    return (file.with_suffix("") if is_compressed else file).with_suffix("")


def _one_subset(folder: Path, files: Sequence[Path]) -> tuple[Path, ...]:
    """Return the files of a split, which are all of one subset, as `main` of gsm8k.

    Raises:
        MsrlError: they are in the folders of several subsets.
    """
    subsets = [_subset(file.relative_to(folder)) for file in files]
    known = sorted(set(subsets))
    if len(known) > 1:
        counts = (f"{name or 'the folder itself'} ({_count(subsets, name)})" for name in known)
        raise MsrlError(
            f"preprocess.input={folder}: has the subsets {', '.join(counts)}. Choose one, as in "
            f"--input {folder / known[-1]}, or name files."
        )
    return tuple(files)


def _subset(path: Path) -> str:
    """Return the folder above the part of a path that names the split, without `data`."""
    parts = path.parts[:-1]
    if not (_SHARD.match(path.name) or _keyword(path.name)):
        number = next((i for i, part in enumerate(parts) if part.lower() in _KEYWORDS), 0)
        parts = parts[:number]
    return "/".join(part for part in parts if part != "data" and part.lower() not in _KEYWORDS)


def _count(names: Iterable[str | None], name: str) -> str:
    number = sum(other == name for other in names)
    return f"{number} file" if number == 1 else f"{number} files"


def _saved_splits(folder: Path) -> tuple[str, ...]:
    """Return the splits of a dictionary of datasets that `save_to_disk` wrote, else ()."""
    path = folder / "dataset_dict.json"
    try:
        return (
            tuple(map(str, json.loads(read_text_within(path))["splits"])) if path.is_file() else ()
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MsrlError(f"{path}: not a dictionary of splits: {error}") from error


def _all_files(folder: Path) -> list[Path]:
    """Return the files of a folder without hidden ones and the metadata of `datasets`."""
    files: list[Path] = []
    for file in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        if file.is_file() and not is_hidden and file.name not in _METADATA:
            files.append(file)
    return files


def _split_name(path: Path, names: Sequence[str]) -> str | None:
    """Return the split of a file below a folder, or None."""
    if path.parts[0] in names:
        return path.parts[0]
    shard = _SHARD.match(path.name)
    if shard is not None and shard[1] != "data":
        return _KEYWORDS.get(shard[1], shard[1])
    keywords = [_keyword(path.name)]
    keywords += [_KEYWORDS.get(part.lower()) for part in reversed(path.parts[:-1])]
    return next((name for name in keywords if name is not None), None)


def _keyword(name: str) -> str | None:
    """Return the split that one of the words of a name denotes, or None."""
    words = re.split(r"[^a-z0-9]+", name.lower())
    return next((_KEYWORDS[word] for word in words if word in _KEYWORDS), None)
