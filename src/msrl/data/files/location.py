"""Values of `data.train`, `data.eval` and `data.blend`, which name preprocessed data or rows.

Preprocessed data is named by its prefix; rows are a data file, a folder, a glob or a task.
"""

from __future__ import annotations

import glob
from difflib import get_close_matches
from pathlib import Path

from msrl.data.files.readers import find_files, is_data_file
from msrl.data.manifest import all_paths, existing_prefixes, has_data
from msrl.errors import MsrlError
from msrl.models.paths import is_hf, is_mcore
from msrl.registry import task_package

_MAX_NAMES = 6  # in a message


def names_rows(name: str) -> bool:
    """Return True if a value names rows instead of preprocessed data."""
    return task_package(name) is not None or (not has_data(name) and _is_local(name))


def mistake(name: str, split: str | None = None) -> str | None:
    """Return why a value names neither preprocessed data nor rows, or None if it names one.

    `split` is the split that is read of folders.
    """
    path = Path(name)
    if task_package(name):
        return _files_mistake(name)
    if has_data(name):
        return _ambiguity(name) if _is_local(name) else None
    if path.is_dir():
        return _folder_mistake(path, split)
    if not _is_local(name):
        return _absence(path, name)
    if path.is_file() and (owner := _owner(path)) is not None:
        return f"is a file of preprocessed data, not a file of rows. Name its prefix: {owner}"
    return _files_mistake(name)


def _is_local(name: str) -> bool:
    """Return True if a file, a folder, or a file that matches a glob has this name."""
    return Path(name).exists() or (glob.has_magic(name) and bool(glob.glob(name, recursive=True)))  # noqa: PTH207


def _ambiguity(name: str) -> str | None:
    """Return the mistake of a prefix that names rows too."""
    path = Path(name)
    if path.is_dir() and not _has_rows(path):
        return None
    what, remedy = "file", "Rename one of them."
    if path.is_dir():
        what, remedy = "folder", f"Name the folder as {name}/, or rename one of them."
    return f"is both a prefix of preprocessed data ({name}_*.idx) and a {what} of rows. {remedy}"


def _has_rows(folder: Path) -> bool:
    """Return True if a folder has data files with rows, of one or several splits."""
    is_other = existing_prefixes(folder) or is_hf(str(folder)) or is_mcore(str(folder))
    return not is_other and any(is_data_file(path) for path in folder.rglob("*"))


def _folder_mistake(folder: Path, split: str | None = None) -> str | None:
    prefixes = existing_prefixes(folder)
    if is_hf(str(folder)) or is_mcore(str(folder)):
        return "is the folder of a model. Name a prefix of preprocessed data, or rows."
    if prefixes:
        return (
            f"is a folder with preprocessed data. Name a prefix ({_names(prefixes)}), or files of "
            f"rows such as {folder}/*.jsonl."
        )
    return _files_mistake(str(folder), split)


def _files_mistake(name: str, split: str | None = None) -> str | None:
    try:
        files = find_files((name,), split)
    except MsrlError as error:
        return str(error).removeprefix(f"preprocess.input={name}: ")
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    if not any(not isinstance(file, Path) or file.stat().st_size for file in files):
        return "the file is empty" if len(files) == 1 else "all files are empty"
    return None


def _owner(path: Path) -> str | None:
    """Return the prefix of the preprocessed data that a file belongs to, or None."""
    prefixes = existing_prefixes(path.parent)
    return next((prefix for prefix in prefixes if path in all_paths(prefix)), None)


def _absence(path: Path, name: str) -> str:
    """Return the mistake of a name that nothing has, with the nearest names that exist."""
    folders = [path.parent, *filter(Path.is_dir, path.parent.glob("[!.]*"))]
    prefixes = [prefix for folder in folders for prefix in existing_prefixes(folder)]
    files = [str(file) for file in path.parent.glob("*") if is_data_file(file)]
    names = {_stem(known): known for known in [*files, *prefixes]}
    close = get_close_matches(_stem(name), names, n=1)
    hint = "" if path.is_absolute() else f". Relative paths start in {Path.cwd()}."
    if close:
        hint = f"; did you mean {names[close[0]]}?"
    elif prefixes:
        hint = f". Existing prefixes: {_names(prefixes)}"
    elif files:
        hint = f". Files of rows in this folder: {_names(sorted(files))}"
    return (
        f"no preprocessed data with this prefix ({name}_*.idx), which `msrl preprocess` writes, "
        f"and no file, folder or glob of rows{hint}"
    )


def _stem(name: str) -> str:
    """Return the name of a file or prefix without its folder and suffixes."""
    return Path(name).name.partition(".")[0]


def _names(names: list[str]) -> str:
    more = ", ..." if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more
