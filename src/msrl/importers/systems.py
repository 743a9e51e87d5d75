"""Detection of the system that a file belongs to, and translation of its files."""

from __future__ import annotations

import contextlib
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from msrl.config.sources import Node, find, plain, read
from msrl.errors import MsrlError, did_you_mean
from msrl.importers.mindspeed_mm import files as mindspeed_mm
from msrl.importers.mindspeed_rl import files as mindspeed_rl
from msrl.importers.mindspeed_rl import ray_gpt as mindspeed_ray
from msrl.importers.others import other_system
from msrl.importers.table import canonical, load_table
from msrl.importers.translation import Translation
from msrl.importers.verl import files as verl
from msrl.limits import within_import_limits

# Top-level keys, one of which is enough to recognize a file.
_MARKS = {
    "mindspeed-rl": mindspeed_rl.MARKS,
    "verl": verl.MARKS,
    "roll": (
        "sft_train",
        "student",
        "student_train",
        "actor_train",
        "actor_infer",
        "rollout_batch_size",
        "num_return_sequences_in_group",
    ),
}
# Systems whose files are imported first, with their names.
_IMPORTED_FIRST = {"mindspeed-mm": "MindSpeed-MM", "roll": "ROLL", "verl": "verl"}
_MAX_FILES = 100  # that a file names in `defaults`, directly or by other files
# Section of the table mindspeed_rl for each section of its files.
_SECTIONS = {
    "megatron_training": "megatron",
    "actor_config": "megatron",
    "rl_config": "",
    "generate_config": "",
    "sampling_config": "",
}


def detect_system(tree: Node, file: Path | None = None) -> str | None:
    """Return the system that the top-level keys of a file belong to; None for native files.

    A file whose keys belong to no system has the system of the files in its `defaults`.
    """
    return _detect(tree, file, set())


def _detect(tree: Node, file: Path | None, seen: set[Path]) -> str | None:
    """Return the system of a file. `seen` are the files that were read, each of them once."""
    entries = tree.value if isinstance(tree.value, dict) else {}
    keys = {canonical(key) for key in entries}
    system = next((name for name, marks in _MARKS.items() if keys & set(marks)), None)
    if system is None and mindspeed_mm.is_file(tree):
        system = "mindspeed-mm"
    if system in (None, "verl") and mindspeed_ray.is_ray_file(tree):
        system = "mindspeed-llm"
    if system is not None or file is None:
        return system
    for path in _included_files(entries.get("defaults"), file):
        if path.resolve() in seen or len(seen) >= _MAX_FILES:
            continue
        seen.add(path.resolve())
        with contextlib.suppress(MsrlError):
            system = system or _detect(read(path, is_old=True), path, seen)
    return system


def _included_files(defaults: Node | None, file: Path) -> list[Path]:
    """Return the files in a list of `defaults` that are beside the file."""
    items = plain(defaults) if defaults is not None else None
    names = [item for item in cast("list[Any]", items) if isinstance(item, str)] if items else []
    paths = [file.parent / f"{name.partition('@')[0].removesuffix('.yaml')}.yaml" for name in names]
    return [path for path in paths if path.is_file()]


def foreign(path: str, *, approximate: bool = False) -> Translation | None:
    """Return the translation of a MindSpeed file; None for a native file.

    With `approximate`, differences from the original are accepted and recorded in the run.

    Raises:
        MsrlError: if the file belongs to a system whose files must be imported first.
    """
    file = find(path)
    return within_import_limits(str(file), lambda: _foreign(file, approximate=approximate))


def _foreign(file: Path, *, approximate: bool) -> Translation | None:
    tree = read(file, is_old=True)
    system = detect_system(tree, file)
    if system in _IMPORTED_FIRST:
        raise MsrlError(
            f"{file}: is a {_IMPORTED_FIRST[system]} file. "
            f"Convert it with `msrl config import --from {system} {file} --output FILE`."
        )
    if system is None:
        refuse_other(tree, file)
        return None
    importer = mindspeed_rl if system == "mindspeed-rl" else mindspeed_ray
    translation = importer.translate(tree, file)
    translation.complete(approximate=approximate)
    return translation


def similar_marks(tree: Node, system: str) -> str:
    """Return a hint for top-level keys that resemble one by which files of a system are known."""
    entries, marks = tree.value if isinstance(tree.value, dict) else {}, _MARKS.get(system, ())
    close = {key: get_close_matches(canonical(key), marks, n=1) for key in entries}
    hints = [f"{key}: {did_you_mean(names)}" for key, names in close.items() if names]
    return "".join(f". {hint}" for hint in hints)


def refuse_other(tree: Node, file: Path) -> None:
    """Raise MsrlError for a file of a system without an importer."""
    entries = tree.value if isinstance(tree.value, dict) else {}
    model = plain(entries["model"]) if "model" in entries else ""
    other = other_system((canonical(key) for key in entries), model)
    if other is not None:
        raise MsrlError(f"{file}: is a file of {other.name}. {other.advice}")


def refuse_foreign_key(path: str) -> None:
    """Raise MsrlError, which names the native key, if a dotted key belongs to MindSpeed-RL."""
    first, *names = path.lstrip("+").split(".")
    if first not in _SECTIONS or not names:
        return
    section = names[-2] if len(names) > 1 else first
    row = load_table("mindspeed_rl").row(_SECTIONS.get(section) or section, names[-1])
    advice = "Change it in the file."
    if row is not None and row.to:
        condition = f" ({row.by})" if row.by else ""
        advice = f"Set {' and '.join(row.to)}{condition}."
    raise MsrlError(f"--set {path}: is a MindSpeed-RL key; --set takes native keys. {advice}")
