"""Checks of the files and folders that a configuration names."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from msrl.config.loader import Resolved
from msrl.config.messages import description
from msrl.config.options import OPTIONS
from msrl.config.templates import find_template
from msrl.data.files import location
from msrl.data.handlers import handler_mistake
from msrl.errors import MsrlError, hub_hint
from msrl.models.paths import (
    IRREGULAR,
    OVERSIZED,
    TRACKER,
    irregular_file,
    is_hf,
    is_mcore,
    oversized_file,
)
from msrl.plan.derived import data_kind
from msrl.plan.run_plan import RunPlan


def check_required(resolved: Resolved, *keys: str, choices: str = "") -> Iterator[str]:
    """Yield a line for each required key without a value; `choices` lists the valid values."""
    for key in keys:
        if resolved.value(key) in (None, ()):
            option = next((option.names[0] for option in OPTIONS if option.key == key), None)
            remedy = f"Set {key}" if option is None else f"Use {option}"
            yield f"{key}: missing. {remedy}: {description(key.split('.'))}{choices}"


def check_folder(resolved: Resolved, key: str) -> Iterator[str]:
    path = resolved.value(key)
    if isinstance(path, str) and Path(path).is_file():
        folder = f"is a file. Name its folder, {Path(path).parent}."
        yield resolved.mistake(key, gguf_message(Path(path)) or folder)
    elif isinstance(path, str) and not Path(path).is_dir():
        yield resolved.mistake(key, f"folder not found{hub_hint(path) or path_hint(path)}")
    elif isinstance(path, str) and (file := irregular_file(Path(path))):
        yield resolved.mistake(key, f"{file.name} {IRREGULAR}")
    elif isinstance(path, str) and (file := oversized_file(Path(path))):
        yield resolved.mistake(key, f"{file.name} {OVERSIZED}")


def gguf_message(path: Path) -> str | None:
    """Return the command that converts a GGUF file, or the first one of a folder; else None."""
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if not files or files[0].suffix != ".gguf":
        return None
    subject = "is a GGUF file" if path.is_file() else "contains a GGUF file"
    command = shlex.join(["msrl", "convert-ckpt", "gguf2hf", "--load", str(files[0])])
    return f"{subject}. Convert it: {command} --save FOLDER"


def path_hint(path: str) -> str:
    """Return a hint for a missing path: a similar name beside it, or where relative paths start."""
    parent, names = Path(path).parent, list[str]()
    with suppress(OSError):
        names = [entry.name for entry in parent.iterdir()]
    if close := get_close_matches(Path(path).name, names, n=1):
        return f"; did you mean {parent / close[0]}?"
    return "" if Path(path).is_absolute() else f". Relative paths start in {Path.cwd()}."


def check_model_path(resolved: Resolved, key: str) -> Iterator[str]:
    """Check that a path is a Hugging Face folder or an mcore checkpoint."""
    yield from check_folder(resolved, key)
    path = resolved.value(key)
    if isinstance(path, str) and Path(path).is_dir() and not is_hf(path) and not is_mcore(path):
        neither = f"contains neither config.json (Hugging Face) nor {TRACKER} (mcore)"
        message = gguf_message(Path(path)) or f"{neither}{checkpoint_hint(path)}"
        yield resolved.mistake(key, message)


def checkpoint_hint(path: str) -> str:
    """Return a hint if a path is a run folder or one iteration instead of a checkpoint folder."""
    checkpoints = [Path(path) / "checkpoints"]
    if Path(path).name.startswith("iter_"):
        checkpoints.append(Path(path).parent)
    checkpoint = next((folder for folder in checkpoints if is_mcore(str(folder))), None)
    return f"; did you mean {checkpoint}?" if checkpoint else ""


def check_template(resolved: Resolved, key: str) -> Iterator[str]:
    name = resolved.value(key)
    if isinstance(name, str):
        try:
            find_template(name)
        except MsrlError as error:
            yield resolved.mistake(key, str(error))


def _data_names(resolved: Resolved) -> Iterator[tuple[str, Callable[[str], str]]]:
    """Yield each name of data with a function that formats an error line for it."""
    data = resolved.config.data
    for key, name in (("data.train", data.train), ("data.eval", data.eval)):
        if name is not None:
            yield name, partial(resolved.mistake, key)
    for name, weight in data.blend.items():  # a name may contain dots: no dotted path
        key = f"data.blend.{name}"
        origin = resolved.origins.get(key)  # absent for a dataset of a hub
        location_text = "" if origin is None else f"{origin}: "
        yield name, partial("{}{}={}: {}".format, location_text, key, weight)


def check_data(resolved: Resolved) -> Iterator[str]:
    """Check that all data is preprocessed, or rows to preprocess."""
    for name, mistake in _data_names(resolved):
        problem = location.mistake(name, resolved.config.preprocess.split)
        if problem is not None:
            yield mistake(problem)


def check_rows(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check the settings that rows are preprocessed with, if the run reads rows."""
    if not any(location.names_rows(name) for name, _ in _data_names(resolved)):
        return
    preprocess, kind = resolved.config.preprocess, data_kind(resolved.config, plan.command)
    yield from check_folder(resolved, "preprocess.tokenizer")
    yield from check_template(resolved, "preprocess.template")
    if preprocess.kind not in (None, kind):
        yield resolved.mistake(
            "preprocess.kind", f"{plan.command} reads {kind} data here. Remove this key."
        )
    if preprocess.handler is not None and (problem := handler_mistake(preprocess.handler)):
        yield resolved.mistake("preprocess.handler", problem)


def check_kind(resolved: Resolved, plan: RunPlan, expected: str, remedy: str) -> Iterator[str]:
    """Check the kind of all data that has a manifest; data of other systems has none."""
    for name, mistake in _data_names(resolved):
        manifest = plan.datasets[name].manifest  # an error is reported when the data is opened
        if manifest is not None and manifest.kind != expected:
            yield mistake(
                f"contains {manifest.kind} data instead of {expected} data. Preprocess it {remedy}."
            )


def _check_text(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    """Check the settings of continued pretraining."""
    yield from check_kind(resolved, plan, "pretrain", "with handler pretrain")
    data = resolved.config.data
    yield from check_blend(resolved)
    if data.seq_length is None or data.seq_length < 2:
        message = (
            "data.handler=pretrain splits documents into rows of this length. Set it to 2 or more."
        )
        yield resolved.mistake(
            "data.seq_length", message if data.seq_length is not None else f"missing: {message}"
        )


def check_examples(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    if resolved.config.data.handler == "pretrain":
        yield from _check_text(resolved, plan)
        return
    remedy = "with a handler for examples such as alpaca, or --kind sft"
    yield from check_kind(resolved, plan, "sft", remedy)
    yield from check_blend(resolved)
    yield from check_blend_fraction(resolved)


def check_blend_fraction(resolved: Resolved) -> Iterator[str]:
    """Check that no part of a blend is held out."""
    if resolved.config.data.blend and resolved.config.data.eval_fraction > 0:
        yield resolved.mistake(
            "data.eval_fraction", "holds out rows of data.train only. Set data.eval for a blend."
        )


def check_blend(resolved: Resolved) -> Iterator[str]:
    """Check the settings that a blend of datasets needs or excludes."""
    data = resolved.config.data
    if data.blend and data.train is not None:
        yield resolved.mistake(
            "data.blend",
            "conflicts with data.train. Set one of them to null; "
            "data.blend must include all prefixes.",
        )
    if data.blend and resolved.config.train.steps is None:
        yield "train.steps: missing. Set it, because a blend of datasets has no epochs."


def check_prompts(resolved: Resolved, plan: RunPlan) -> Iterator[str]:
    yield from check_blend(resolved)
    remedy = "with a handler for prompts such as r1, or --kind prompts"
    yield from check_kind(resolved, plan, "prompts", remedy)
