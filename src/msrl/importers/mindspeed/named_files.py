"""Configuration files that a launch script names: `--config-name NAME`, found beside the script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from msrl.config.sources import Node, Origin, read, wrap
from msrl.importers.hydra import Override
from msrl.importers.mindspeed_rl import files as mindspeed_rl
from msrl.importers.mindspeed_rl import ray_gpt as mindspeed_ray
from msrl.importers.sections import Keys
from msrl.importers.shell import Word
from msrl.importers.translation import KeyStatus, SourceKey, Translation

_SHORT = {"-cn": "--config-name", "-cp": "--config-path", "-cd": "--config-dir"}


def split_overrides(
    words: Sequence[Word], name: str
) -> tuple[list[Word], list[tuple[Override, Word]]]:
    """Return the words of a program without the changes `key=value` of hydra, and these."""
    flags: list[Word] = []
    overrides: list[tuple[Override, Word]] = []
    for word in words:
        override = Override.from_text(word.text, Origin(name, word.line))
        if override is None:
            flags.append(replace(word, text=_SHORT.get(word.text, word.text)))
        else:
            overrides.append((override, word))
    return flags, overrides


def put_named_file(
    translation: Translation, keys: Keys, overrides: Sequence[tuple[Override, Word]]
) -> None:
    """Include the file of `--config-name`, which is relative to `--config-dir`."""
    entry = keys.get("config_name")
    folder = keys.get("config_dir", "config_path")
    if entry is None:
        return
    file = _find_config(translation.name, entry, folder)
    _include(translation, entry, file, "msrl train-grpo --config-name NAME", overrides)


def named_file(
    translation: Translation,
    section: str,
    name: str,
    program: Word,
    overrides: Sequence[tuple[Override, Word]] = (),
) -> None:
    """Include the file that the first argument of a program names."""
    node = wrap(name, Origin(translation.name, program.line))
    entry = SourceKey(section, "config_name", "config_name", node)
    is_dataset = section == "preprocess"
    command = "msrl preprocess -c FILE" if is_dataset else "msrl train-grpo --config-name NAME"
    file = _find_config(translation.name, entry, None)
    _include(translation, entry, file, command, overrides)


def _include(
    translation: Translation,
    entry: SourceKey,
    file: Path | None,
    command: str,
    overrides: Sequence[tuple[Override, Word]],
) -> None:
    """Merge the translation of a file, or record that the command must name it."""
    if file is None:
        text = f"the file was not found beside the script. Run `{command}`."
        translation.record(entry, KeyStatus.DROPPED, text)
    else:
        changes = [override for override, _ in overrides]
        translation.include(_translate_tree(read(file, is_old=True), file, changes))
        translation.record(entry, KeyStatus.APPLIED, f"the keys of {file}")
    for override, word in overrides:
        node = override.node or wrap(None, Origin(translation.name, word.line))
        change = SourceKey("override", override.path, word.text.partition("=")[0], node)
        if file is None:
            translation.record(change, KeyStatus.DROPPED, "its file was not found")
        else:
            translation.record(change, KeyStatus.APPLIED, f"a key of {file.name}")


def _translate_tree(tree: Node, file: Path, overrides: Sequence[Override]) -> Translation:
    system = mindspeed_ray if mindspeed_ray.is_ray_file(tree) else mindspeed_rl
    return system.translate(tree, file, overrides)


def _find_config(script: str, entry: SourceKey, folder: SourceKey | None) -> Path | None:
    """Return the file in the folder, or in `configs` beside or above the script.

    Files of datasets may have the name of a training: those are in `configs/datasets`.
    """
    name = f"{str(entry.value).removesuffix('.yaml')}.yaml"
    folders = [Path(str(folder.value))] if folder is not None else []
    for parent in Path(script).resolve().parents[:5]:
        configs = parent / "configs"
        trainings = [configs, configs / "rlxf"]
        datasets = [configs / "datasets"]
        is_dataset = entry.section == "preprocess"
        folders += [*datasets, *trainings] if is_dataset else [*trainings, *datasets]
    return next((path / name for path in folders if (path / name).is_file()), None)
