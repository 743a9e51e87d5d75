"""Files and folders that a configuration names: are they there, and of the right kind?"""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from msrl.config.loader import Resolved
from msrl.config.messages import description
from msrl.config.templates import find_template
from msrl.errors import MsrlError, hub_hint
from msrl.models.paths import TRACKER, is_hf, is_mcore


def value_of(resolved: Resolved, key: str) -> object:
    value: object = resolved.config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def needed(resolved: Resolved, *keys: str, choices: str = "") -> Iterator[str]:
    """A line for each key without a value, with what there is to choose from."""
    for key in keys:
        if value_of(resolved, key) in (None, ()):
            section, name = key.split(".", 1)
            flag = f"give --{name.replace('_', '-')}" if section in ("convert", "preprocess", "generate", "chat") else f"set {key}"
            yield f"{key}: is missing; {flag}: {description(key.split('.'))}{choices}"


def existing_folder(resolved: Resolved, key: str) -> Iterator[str]:
    path = value_of(resolved, key)
    if isinstance(path, str) and not Path(path).is_dir():
        yield resolved.mistake(key, f"there is no such folder{hub_hint(path)}")


def existing_model(resolved: Resolved, key: str) -> Iterator[str]:
    """A line when the path is neither a Hugging Face folder nor an mcore checkpoint."""
    yield from existing_folder(resolved, key)
    path = value_of(resolved, key)
    if isinstance(path, str) and Path(path).is_dir() and not is_hf(path) and not is_mcore(path):
        yield resolved.mistake(key, f"holds neither config.json (Hugging Face) nor {TRACKER} (mcore){inside_of_run(path)}")


def inside_of_run(path: str) -> str:
    """A hint where the folder of a run is named in place of its checkpoints."""
    checkpoints = Path(path) / "checkpoints"
    return f"; did you mean {checkpoints}?" if is_mcore(str(checkpoints)) else ""


def known_template(resolved: Resolved, key: str) -> Iterator[str]:
    name = value_of(resolved, key)
    if isinstance(name, str):
        try:
            find_template(name)
        except MsrlError as error:
            yield resolved.mistake(key, str(error))


def _named_data(resolved: Resolved) -> Iterator[tuple[str, Callable[[str], str]]]:
    """Each prefix of data that is named, and what makes a line of a mistake in it."""
    data = resolved.config.data
    for key, prefix in (("data.train", data.train), ("data.eval", data.eval)):
        if prefix is not None:
            yield prefix, partial(resolved.mistake, key)
    for prefix, weight in data.blend.items():  # a prefix may hold dots, so its key is no path
        key = f"data.blend.{prefix}"
        yield prefix, partial("{}: {}={}: {}".format, resolved.origins[key], key, weight)


def existing_data(resolved: Resolved) -> Iterator[str]:
    """A line for each prefix that no preprocessed data has."""
    for prefix, mistake in _named_data(resolved):
        if not any(Path(prefix).parent.glob(f"{glob.escape(Path(prefix).name)}_*.idx")):
            yield mistake(f"there is no preprocessed data of this prefix ({prefix}_*.idx); write it with `msrl preprocess`")


def _kind(resolved: Resolved, wanted: str, how: str) -> Iterator[str]:
    """A line for data of another kind; data of other systems has no manifest, and its kind is not known."""
    for prefix, mistake in _named_data(resolved):
        manifest = Path(f"{prefix}_manifest.json")
        if not manifest.is_file():
            continue
        try:
            found = json.loads(manifest.read_text(encoding="utf-8")).get("kind", wanted)
        except (ValueError, AttributeError):
            continue  # said when the data is opened
        if found != wanted:
            yield mistake(f"holds {found} data, and {wanted} is needed; preprocess it {how}")


def _text(resolved: Resolved) -> Iterator[str]:
    """Lines for what does not fit continued pretraining."""
    yield from _kind(resolved, "pretrain", "with handler pretrain")
    data = resolved.config.data
    if data.blend and data.train is not None:
        yield resolved.mistake("data.blend", "stands beside data.train; set one of them to null, data.train where all prefixes stand here")
    if data.blend and resolved.config.train.steps is None:
        yield "train.steps: is missing; a blend of datasets has no epochs, so the number of steps must be set"
    if data.seq_length is None or data.seq_length < 2:
        said = "data.handler=pretrain cuts documents into rows of so many tokens; set 2 or more"
        yield resolved.mistake("data.seq_length", said if data.seq_length is not None else f"is missing; {said}")
    for key, is_set in (("pack", data.pack), ("eval_fraction", data.eval_fraction > 0), ("too_long", data.too_long != "refuse")):
        if is_set:
            yield resolved.mistake(f"data.{key}", "means nothing for data.handler=pretrain, whose rows are cut from text; leave it out")


def holds_examples(resolved: Resolved) -> Iterator[str]:
    if resolved.config.data.handler == "pretrain":
        yield from _text(resolved)
        return
    yield from _kind(resolved, "sft", "with a handler of demonstrations, or --kind sft")
    if resolved.config.data.blend:
        yield resolved.mistake("data.blend", "mixes datasets of text; set data.handler to pretrain, or name one dataset in data.train")


def holds_prompts(resolved: Resolved) -> Iterator[str]:
    for key, is_set in (("data.handler", resolved.config.data.handler is not None), ("data.blend", bool(resolved.config.data.blend))):
        if is_set:
            yield resolved.mistake(key, "is of train-sft alone; leave it out")
    yield from _kind(resolved, "prompts", "with a handler of prompts such as r1, or --kind prompts")
