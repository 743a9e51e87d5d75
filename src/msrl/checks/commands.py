"""Checks of convert-ckpt, preprocess, generate and chat."""

from __future__ import annotations

import glob
import importlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from msrl import registry
from msrl.checks.inputs import (
    check_folder,
    check_model_path,
    check_required,
    check_template,
    checkpoint_hint,
    gguf_message,
    path_hint,
)
from msrl.checks.rollout import check_temperature
from msrl.checks.training import check_layout
from msrl.config.loader import Resolved
from msrl.config.schema import ChatConfig, GenerateConfig
from msrl.config.templates import template_names
from msrl.data.manifest import TEXTS
from msrl.errors import MsrlError
from msrl.models.families import load_shape
from msrl.models.paths import TRACKER, config_dir, is_hf, is_mcore
from msrl.plan import derived


def check_convert(resolved: Resolved) -> Iterator[str]:
    convert = resolved.config.convert
    yield from check_required(resolved, "convert.command", "convert.load")
    yield from check_folder(resolved, "convert.hf_config")
    yield from check_folder(resolved, "convert.lora")
    yield from _convert_source(resolved)
    if convert.dtype == "q8_0" and convert.command != "hf2gguf":
        yield resolved.mistake("convert.dtype", "only hf2gguf writes it. Use bf16, fp16 or fp32.")
    if convert.command != "inspect":
        yield from check_required(resolved, "convert.save")
        if (
            convert.save is not None
            and Path(convert.save).exists()
            and (Path(convert.save).is_file() or any(Path(convert.save).iterdir()))
        ):
            yield resolved.mistake(
                "convert.save",
                "already exists and is not an empty folder. Choose another folder or remove it.",
            )


def _convert_source(resolved: Resolved) -> Iterator[str]:
    """Check that the input checkpoint has the right format and fits the parallel layout."""
    convert = resolved.config.convert
    if convert.load is None:
        return
    if convert.command == "gguf2hf":
        yield from _gguf_source(resolved, Path(convert.load))
        return
    folder = list(check_folder(resolved, "convert.load"))
    yield from folder
    from_hf = convert.command in ("hf2mcore", "hf2hf", "hf2gguf")
    other = None if folder else _other_contents(Path(convert.load), from_hf, convert.command)
    if other is not None:
        yield resolved.mistake("convert.load", other)
    elif not folder and from_hf and not is_hf(convert.load):
        yield resolved.mistake(
            "convert.load", "contains no config.json. Name the folder of a Hugging Face model."
        )
    elif (
        not folder
        and convert.command == "inspect"
        and not is_mcore(convert.load)
        and not is_hf(convert.load)
    ):
        yield resolved.mistake(
            "convert.load",
            f"contains neither {TRACKER} nor "
            f"config.json{_hint(convert.load, 'an mcore or Hugging Face folder')}",
        )
    elif not folder and not from_hf and convert.command != "inspect" and not is_mcore(convert.load):
        yield resolved.mistake(
            "convert.load",
            f"contains no {TRACKER}{_hint(convert.load, 'the folder of an mcore checkpoint')}",
        )
    elif not folder and (convert.orm or convert.command in ("hf2mcore", "reshard")):
        yield from _convert_shape(
            resolved, config_dir(convert.load, None if from_hf else convert.hf_config)
        )


def _gguf_source(resolved: Resolved, load: Path) -> Iterator[str]:
    """Check that the input is a file."""
    if load.is_dir():
        files = sorted(load.glob("*.gguf"))
        hint = f", such as {files[0]}" if files else ""
        yield resolved.mistake("convert.load", f"is a folder. Name a GGUF file{hint}.")
    elif not load.is_file():
        yield resolved.mistake("convert.load", "file does not exist. Name a GGUF file.")


def _other_contents(folder: Path, from_hf: bool, command: str | None) -> str | None:
    """Return what a folder of another kind is, and the command for it; else None."""
    if command != "inspect" and from_hf and is_mcore(str(folder)) and not is_hf(str(folder)):
        command = "mcore2hf" if command == "hf2mcore" else "reshard or mcore2hf"
        return f"is a Megatron checkpoint. Use msrl convert-ckpt {command}."
    if command != "inspect" and not from_hf and is_hf(str(folder)) and not is_mcore(str(folder)):
        return "is a Hugging Face folder. Use msrl convert-ckpt hf2mcore, or hf2hf."
    if is_hf(str(folder)) or is_mcore(str(folder)):
        return None
    if (folder / "adapter_config.json").is_file():
        base = "Merge it into its base model: msrl convert-ckpt hf2hf --load BASE"
        return f"is a LoRA adapter without its base model. {base} --lora {folder}."
    return gguf_message(folder)


def _hint(folder: str, expected: str) -> str:
    above = "the parent folder, " if Path(folder).name.startswith("iter_") else ""
    return checkpoint_hint(folder) or f". Name {above}{expected}."


def _convert_shape(resolved: Resolved, config_dir: Path) -> Iterator[str]:
    """Check that the model fits the parallel layout, and that it has a score head for `--orm`."""
    convert = resolved.config.convert
    try:
        shape = load_shape(config_dir)
    except MsrlError as error:
        yield str(error)
        return
    if convert.command in ("hf2mcore", "reshard"):
        yield from check_layout(resolved, "convert", derived.layout_from(convert).problems(shape))
    if convert.orm and not shape.reward_head:
        message = (
            f"{shape.architecture} has no score head, which reward models "
            "(...ForSequenceClassification) have. Remove it."
        )
        yield resolved.mistake("convert.orm", message)


def check_preprocess(resolved: Resolved) -> Iterator[str]:
    preprocess = resolved.config.preprocess
    handlers = importlib.import_module("msrl.data.handlers")
    handler = preprocess.handler or handlers.default_handler(preprocess.input)
    yield from check_required(resolved, "preprocess.input", "preprocess.tokenizer")
    if handler is None:
        yield from check_required(resolved, "preprocess.handler")
    if preprocess.show is None:
        yield from check_required(resolved, "preprocess.output_prefix")
    if preprocess.output_prefix is not None and preprocess.output_prefix.endswith("/"):
        yield resolved.mistake(
            "preprocess.output_prefix",
            "is a folder. Append a file name prefix, as in data/sft.",
        )
    for i, name in enumerate(preprocess.input):
        if registry.task_package(name):
            location = importlib.import_module("msrl.data.files.location")
            if problem := location.mistake(name):
                yield resolved.mistake(f"preprocess.input.{i}", problem)
        elif not Path(name).exists() and not glob.glob(name):  # noqa: PTH207  (pathlib takes no absolute patterns)
            yield resolved.mistake(
                f"preprocess.input.{i}", f"file or folder not found{path_hint(name)}"
            )
    yield from check_folder(resolved, "preprocess.tokenizer")
    yield from check_template(resolved, "preprocess.template")
    if handler is not None:
        if problem := handlers.handler_mistake(handler):
            yield resolved.mistake("preprocess.handler", problem)
        elif not _writes_text(resolved, handlers.ALIASES):
            names = ", ".join(template_names())
            yield from check_required(
                resolved,
                "preprocess.template",
                choices=f"; packaged: {names} (native is the template of the tokenizer)",
            )
    if preprocess.pack:
        yield from check_required(resolved, "preprocess.seq_length")


def _writes_text(resolved: Resolved, aliases: Mapping[str, str]) -> bool:
    """Return True if `preprocess` writes text as it is, which needs no template."""
    preprocess = resolved.config.preprocess
    name = aliases.get(str(preprocess.handler), str(preprocess.handler))
    return preprocess.kind in TEXTS or name in ("pretrain", "sharegpt_pretrain", "steps")


def check_generate(resolved: Resolved) -> Iterator[str]:
    generate = resolved.config.generate
    yield from check_required(resolved, "generate.model")
    yield from check_model_path(resolved, "generate.model")
    yield from check_template(resolved, "generate.template")
    if (generate.prompt is None) == (generate.input is None):
        yield (
            "generate.prompt: exactly one input is required. "
            "Use either --prompt TEXT or --input FILE."
        )
    if generate.input is not None and (
        not Path(generate.input).exists() or Path(generate.input).is_dir()
    ):
        yield resolved.mistake("generate.input", "file not found")
    yield from _check_raw(resolved, "generate", generate)
    if generate.raw and resolved.config.environment.is_on:
        yield resolved.mistake(
            "generate.raw", "has no chat template, which an environment needs. Remove it."
        )
    yield from check_folder(resolved, "generate.lora")
    yield from check_temperature(resolved, "generate.temperature")
    if generate.num_samples > 1 and generate.temperature == 0:
        yield resolved.mistake(
            "generate.num_samples",
            "all samples are identical at temperature 0. Set generate.temperature above 0.",
        )


def check_chat(resolved: Resolved) -> Iterator[str]:
    yield from check_required(resolved, "chat.model")
    yield from check_model_path(resolved, "chat.model")
    yield from check_template(resolved, "chat.template")
    yield from check_folder(resolved, "chat.lora")
    yield from _check_raw(resolved, "chat", resolved.config.chat)
    yield from check_temperature(resolved, "chat.temperature")


def _check_raw(
    resolved: Resolved, section: str, config: GenerateConfig | ChatConfig
) -> Iterator[str]:
    """Check that no template is set for plain text."""
    values = (config.template, config.system, config.enable_thinking)
    if config.raw and any(value is not None for value in values):
        yield resolved.mistake(
            f"{section}.raw", "uses texts unchanged. Remove template, system and enable_thinking."
        )
