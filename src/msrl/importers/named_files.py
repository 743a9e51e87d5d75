"""Configuration files that a launch script names: `--config-name NAME`, found beside the script."""

from __future__ import annotations

from pathlib import Path

from msrl.config.sources import Node, Origin, read, wrap
from msrl.importers.mindspeed_rl import files as mindspeed_rl
from msrl.importers.mindspeed_rl import ray_gpt as mindspeed_ray
from msrl.importers.sections import Keys
from msrl.importers.shell import Word
from msrl.importers.table import canonical
from msrl.importers.translation import KeyStatus, SourceKey, Translation


def put_named_file(translation: Translation, keys: Keys) -> None:
    """Include the file of `--config-name`, which is relative to `--config-dir`."""
    entry = keys.get("config_name")
    folder = keys.get("config_dir", "config_path")
    if entry is None:
        return
    _include(translation, entry, _find_config(translation.name, entry, folder), "msrl train-grpo")


def named_file(translation: Translation, section: str, name: str, program: Word) -> None:
    """Include the file that the first argument of a program names."""
    node = wrap(name, Origin(translation.name, program.line))
    entry = SourceKey(section, "config_name", "config_name", node)
    command = "msrl preprocess" if section == "preprocess" else "msrl train-grpo"
    _include(translation, entry, _find_config(translation.name, entry, None), command)


def _include(translation: Translation, entry: SourceKey, file: Path | None, command: str) -> None:
    """Merge the translation of a file, or record that the command must name it."""
    if file is None:
        text = f"the file was not found beside the script. Run `{command} --config-name NAME`."
        return translation.record(entry, KeyStatus.DROPPED, text)
    tree = read(file, is_old=True)
    translation.include(_translated(tree, file))
    return translation.record(entry, KeyStatus.APPLIED, f"the keys of {file}")


def _translated(tree: Node, file: Path) -> Translation:
    keys = {canonical(key) for key in tree.value} if isinstance(tree.value, dict) else set[str]()
    system = mindspeed_ray if keys & set(mindspeed_ray.MARKS) else mindspeed_rl
    return system.translate(tree, file)


def _find_config(script: str, entry: SourceKey, folder: SourceKey | None) -> Path | None:
    """Return the file in the folder, or in `configs` beside or above the script."""
    name = f"{str(entry.value).removesuffix('.yaml')}.yaml"
    folders = [Path(str(folder.value))] if folder is not None else []
    for parent in Path(script).resolve().parents[:5]:
        folders += [
            parent / "configs",
            parent / "configs" / "datasets",
            parent / "configs" / "rlxf",
        ]
    return next((path / name for path in folders if (path / name).is_file()), None)
