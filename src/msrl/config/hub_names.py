"""Values of a configuration that are names on a hub, replaced by the folders of their files.

Like a value of `${env:NAME}`, such a value has a reference: everything that is written or printed
has `ORG/NAME@COMMIT` in place of the folder, so that a run folder records the exact revision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from msrl.config.loader import Resolved
from msrl.config.schema import Config
from msrl.errors import ManyErrors, MsrlError
from msrl.hub import Content, HubName, Snapshot, download, parse_name
from msrl.registry import task_package

_TRAINING: tuple[tuple[str, Content], ...] = (
    ("model.path", "weights"),
    ("model.tokenizer", "metadata"),
)
_KEYS: dict[str, tuple[tuple[str, Content], ...]] = {
    "train-sft": _TRAINING,
    "train-dpo": (*_TRAINING, ("cluster.roles.reference.load", "weights")),
    "train-rm": _TRAINING,
    "train-grpo": (
        *_TRAINING,
        ("cluster.roles.critic.load", "weights"),
        ("cluster.roles.reference.load", "weights"),
    ),
    "convert-ckpt": (
        ("convert.load", "weights"),
        ("convert.lora", "weights"),
        ("convert.hf_config", "metadata"),
    ),
    "preprocess": (("preprocess.tokenizer", "metadata"),),
    "generate": (("generate.model", "weights"),),
    "chat": (("chat.model", "weights"),),
    "serve": (("serve.model", "weights"),),
}
_KEYS["train-distill"] = _KEYS["train-grpo"]
_SHOWN_FILES = 5
_BLEND = "data.blend."
_NO_ROWS = "neither preprocessed data with this prefix nor rows on this machine; as a dataset"
_NO_DATA = ("dataset_infos.json", "dataset_dict.json")  # descriptions of a dataset


@dataclass(frozen=True, slots=True)
class HubValue:
    """A value that is a name on a hub.

    `pattern` selects files of a dataset (`ORG/NAME:PATTERN`).
    """

    key: str
    name: HubName
    content: Content
    pattern: str = ""


@dataclass(frozen=True, slots=True)
class LocalConfig:
    """Configuration with local folders in place of names on a hub.

    Attributes:
        resolved: The configuration; names that could not be downloaded are unchanged.
        values: The values that were replaced, with the names of the downloaded revisions.
        errors: One message per name that could not be downloaded, by key.
    """

    resolved: Resolved
    values: tuple[HubValue, ...]
    errors: Mapping[str, str]


def with_local_folders(resolved: Resolved, command: str) -> LocalConfig:
    """Return the configuration with local folders in place of names.

    Configurations and tokenizers are downloaded, datasets too; weights are not.
    """
    values: list[HubValue] = []
    errors: dict[str, str] = {}
    config, references = resolved.config, dict(resolved.config.references)
    for value in _hub_values(resolved.config, command):
        try:
            snapshot, path = _downloaded(value)
        except MsrlError as error:
            problem = f"{_NO_ROWS}: {error}" if value.key.startswith("data.") else str(error)
            errors[value.key] = resolved.mistake(value.key, problem)
            continue
        values.append(replace(value, name=snapshot.name))
        if value.key.startswith(_BLEND):
            blend = config.data.blend
            names = {name: path if f"{_BLEND}{name}" == value.key else name for name in blend}
            renamed = {names[name]: weight for name, weight in blend.items()}
            config = _with_value(config, ["data", "blend"], renamed)
            continue
        config = _with_value(config, value.key.split("."), path)
        suffix = f":{value.pattern}" if value.pattern else ""
        references.setdefault(value.key, f"{snapshot.name}{suffix}")
    if values:
        resolved = replace(resolved, config=config.with_references(references))
    return LocalConfig(resolved, tuple(values), errors)


def download_weights(resolved: Resolved, values: tuple[HubValue, ...]) -> None:
    """Download the weights of models whose other files are downloaded already.

    Raises:
        ManyErrors: A download fails.
    """
    errors: list[str] = []
    for value in values:
        if value.content != "weights":
            continue
        try:
            download(value.name, "weights")
        except MsrlError as error:
            errors.append(resolved.mistake(value.key, str(error)))
    if errors:
        raise ManyErrors(errors)


def _hub_values(config: Config, command: str) -> Iterator[HubValue]:
    keys: list[tuple[str, Content]] = [*_KEYS.get(command, ())]
    if command in ("train-grpo", "train-distill"):
        for number in range(len(config.reward.sources)):
            keys.append((f"reward.sources.{number}.model", "weights"))
        for number in range(len(config.algo.distill.teachers)):
            keys.append((f"algo.distill.teachers.{number}.model", "weights"))
    datasets = list(_datasets(config, command))
    yield from datasets
    names = (config.data.train, config.data.eval, *config.data.blend)
    has_rows = bool(datasets) or any(
        name and (Path(name).exists() or task_package(name)) for name in names
    )
    if has_rows and command != "preprocess":
        keys.append(("preprocess.tokenizer", "metadata"))
    for key, content in keys:
        text = _value(config, key.split("."))
        name = parse_name(text) if isinstance(text, str) else None
        if name is not None:
            yield HubValue(key, name, content)


def _datasets(config: Config, command: str) -> Iterator[HubValue]:
    """Yield the values that are names of datasets."""
    texts: dict[str, str | None] = {}
    if command == "preprocess":
        texts = {f"preprocess.input.{i}": text for i, text in enumerate(config.preprocess.input)}
    elif command.startswith("train-"):
        texts = {"data.train": config.data.train, "data.eval": config.data.eval}
        texts |= {f"{_BLEND}{name}": name for name in config.data.blend}
    elif command == "eval" and not config.evaluate.benchmarks:
        texts = {"data.eval": config.data.eval}
    for key, text in texts.items():
        repository, _, pattern = (text or "").partition(":")
        name = parse_name(repository)
        if name is not None:
            yield HubValue(key, name, "dataset", pattern)


def _downloaded(value: HubValue) -> tuple[Snapshot, str]:
    """Return the snapshot of a name, and the path to use in place of the name."""
    if value.content != "dataset":
        snapshot = download(value.name, "metadata")
        return snapshot, str(snapshot.folder)
    patterns = [value.pattern] if value.pattern else ["*.json*", "*.parquet", "*.csv", "*.arrow*"]
    snapshot = download(value.name, "dataset", patterns)
    paths = [path for path in snapshot.folder.rglob("*.*") if path.name not in _NO_DATA]
    files = [str(path.relative_to(snapshot.folder)) for path in paths]
    matching = sorted(file for file in files if any(fnmatch(file, text) for text in patterns))
    if value.pattern and matching:
        return snapshot, str(snapshot.folder / value.pattern)
    if len(matching) == 1:
        return snapshot, str(snapshot.folder / matching[0])
    if not matching:
        raise MsrlError(f"the dataset has no file that matches {' or '.join(patterns)}")
    shown = ", ".join(matching[:_SHOWN_FILES]) + (", ..." if len(matching) > _SHOWN_FILES else "")
    raise MsrlError(
        f"the dataset has {len(matching)} files ({shown}). Select some with "
        f"{value.name.repository}:PATTERN."
    )


def _value(section: Any, names: list[str]) -> Any:
    for name in names:
        if isinstance(section, tuple):
            section = cast("tuple[Any, ...]", section)[int(name)]
        else:
            section = getattr(section, name)
    return section


def _with_value(section: Any, names: list[str], value: object) -> Any:
    """Return a section or list with another value at the path `names`."""
    if not names:
        return value
    name, below = names[0], names[1:]
    if isinstance(section, tuple):
        items = list(cast("tuple[Any, ...]", section))
        items[int(name)] = _with_value(items[int(name)], below, value)
        return tuple(items)
    assert isinstance(section, BaseModel)
    child = _with_value(getattr(section, name), below, value)
    return section.model_copy(update={name: child})
