"""What the commands besides the trainings need: convert-ckpt, preprocess, generate, chat."""

from __future__ import annotations

import glob
import importlib
from collections.abc import Iterator
from pathlib import Path

from msrl.checks.inputs import existing_folder, existing_model, inside_of_run, known_template, needed
from msrl.checks.plugins import plugin as _plugin
from msrl.checks.sampling import temperature
from msrl.checks.training import cut_problems
from msrl.config.loader import Resolved
from msrl.config.templates import template_names
from msrl.errors import MsrlError
from msrl.models.families import load_shape
from msrl.models.paths import TRACKER, config_dir, is_hf, is_mcore
from msrl.plan import derived


def convert_checks(resolved: Resolved) -> Iterator[str]:
    convert = resolved.config.convert
    yield from needed(resolved, "convert.command", "convert.load")
    yield from existing_folder(resolved, "convert.hf_config")
    yield from existing_folder(resolved, "convert.lora")
    yield from _convert_source(resolved)
    if convert.command != "inspect":
        yield from needed(resolved, "convert.save")
        if convert.save is not None and Path(convert.save).exists() and (Path(convert.save).is_file() or any(Path(convert.save).iterdir())):
            yield resolved.mistake("convert.save", "exists and is not an empty folder; name another, or remove it")


def _convert_source(resolved: Resolved) -> Iterator[str]:
    """Whether the checkpoint to read is of the right kind and can be cut as asked."""
    convert = resolved.config.convert
    if convert.load is None:
        return
    folder = list(existing_folder(resolved, "convert.load"))
    yield from folder
    from_hf = convert.command in ("hf2mcore", "hf2hf")
    if not folder and from_hf and not is_hf(convert.load):
        yield resolved.mistake("convert.load", "holds no config.json; give the folder of a Hugging Face model")
    elif not folder and convert.command == "inspect" and not is_mcore(convert.load) and not is_hf(convert.load):
        yield resolved.mistake(
            "convert.load", f"holds neither {TRACKER} nor config.json{_hint(convert.load, 'an mcore or Hugging Face folder')}"
        )
    elif not folder and not from_hf and convert.command != "inspect" and not is_mcore(convert.load):
        yield resolved.mistake("convert.load", f"holds no {TRACKER}{_hint(convert.load, 'the folder of an mcore checkpoint')}")
    elif not folder and (convert.orm or convert.command in ("hf2mcore", "reshard")):
        yield from _convert_shape(resolved, config_dir(convert.load, None if from_hf else convert.hf_config))


def _hint(folder: str, wanted: str) -> str:
    above = "the folder above, " if Path(folder).name.startswith("iter_") else ""
    return inside_of_run(folder) or f"; give {above}{wanted}"


def _convert_shape(resolved: Resolved, config_dir: Path) -> Iterator[str]:
    """Whether the model can be cut as asked, and has the score head that `--orm` speaks of."""
    convert = resolved.config.convert
    try:
        shape = load_shape(config_dir)
    except MsrlError as error:
        yield str(error)
        return
    if convert.command in ("hf2mcore", "reshard"):
        yield from cut_problems(resolved, shape, "convert", derived.layout_from(convert))
    if convert.orm and not shape.reward_head:
        said = f"{shape.architecture} has no score head, as a reward model (...ForSequenceClassification) has; leave it out"
        yield resolved.mistake("convert.orm", said)


def preprocess_checks(resolved: Resolved) -> Iterator[str]:
    preprocess = resolved.config.preprocess
    yield from needed(resolved, "preprocess.input", "preprocess.tokenizer", "preprocess.handler", "preprocess.output_prefix")
    if preprocess.output_prefix is not None and preprocess.output_prefix.endswith("/"):
        yield resolved.mistake("preprocess.output_prefix", "is a folder alone; add how the names of the files begin, as in data/sft")
    for i, name in enumerate(preprocess.input):
        if not Path(name).exists() and not glob.glob(name):  # noqa: PTH207  (pathlib takes no absolute patterns)
            yield resolved.mistake(f"preprocess.input.{i}", "there is no such file or folder")
    yield from existing_folder(resolved, "preprocess.tokenizer")
    yield from known_template(resolved, "preprocess.template")
    if preprocess.handler is not None:
        package = "msrl.data.handlers"
        aliases: dict[str, str] = getattr(importlib.import_module(package), "ALIASES", {})
        yield from _plugin(resolved, "preprocess.handler", package, preprocess.handler, aliases)
        if aliases.get(preprocess.handler, preprocess.handler) != "pretrain":
            names = ", ".join(template_names())
            yield from needed(resolved, "preprocess.template", choices=f"; packaged: {names} (native is the tokenizer's own)")
    if preprocess.pack:
        yield from needed(resolved, "preprocess.seq_length")


def generate_checks(resolved: Resolved) -> Iterator[str]:
    generate = resolved.config.generate
    yield from needed(resolved, "generate.model")
    yield from existing_model(resolved, "generate.model")
    yield from known_template(resolved, "generate.template")
    if (generate.prompt is None) == (generate.input is None):
        yield "generate.prompt: give either --prompt TEXT or --input FILE, one of the two"
    if generate.input is not None and (not Path(generate.input).exists() or Path(generate.input).is_dir()):
        yield resolved.mistake("generate.input", "there is no such file")
    if generate.raw and (generate.template is not None or generate.system is not None):
        yield resolved.mistake("generate.raw", "takes prompts as they are; leave out template and system")
    yield from temperature(resolved, "generate.temperature")
    if generate.num_samples > 1 and generate.temperature == 0:
        yield resolved.mistake("generate.num_samples", "all samples would be the same at temperature 0; set a temperature above 0")


def chat_checks(resolved: Resolved) -> Iterator[str]:
    yield from needed(resolved, "chat.model")
    yield from existing_model(resolved, "chat.model")
    yield from known_template(resolved, "chat.template")
    yield from temperature(resolved, "chat.temperature")
