"""Commands that continue with the result of `convert-ckpt` or `preprocess`."""

from __future__ import annotations

import shlex
from pathlib import Path

from msrl.config.schema import Config
from msrl.models.families import load_shape
from msrl.models.paths import config_dir, has_weight_files, is_hf


def next_command(config: Config, command: str) -> str | None:
    """Return a command that uses what `command` has written; None without one."""
    if command == "convert-ckpt":
        return _after_conversion(config)
    return _after_preprocessing(config) if command == "preprocess" else None


def _after_conversion(config: Config) -> str | None:
    """Return the command that uses a converted language model, or an adapter."""
    convert = config.convert
    if convert.load is None or convert.save is None or convert.command == "inspect":
        return None
    if convert.command == "hf2gguf":
        return shlex.join(["ollama", "create", "msrl", "-f", f"{convert.save}/Modelfile"])
    if convert.command == "lora2hf":
        return shlex.join(["msrl", "serve", convert.save])
    is_hf_source = convert.command in ("hf2mcore", "hf2hf")
    if (
        convert.command != "gguf2hf"
        and load_shape(
            config_dir(convert.load, None if is_hf_source else convert.hf_config)
        ).reward_head
    ):
        return None
    return shlex.join(["msrl", "chat", "--model", convert.save])


def _after_preprocessing(config: Config) -> str | None:
    """Return the training on examples, if the folder of the tokenizer has a model.

    Training on other data has settings that the data does not show, such as rewards.
    """
    from msrl.data.manifest import read_manifest

    model, prefix = config.preprocess.tokenizer, config.preprocess.output_prefix
    manifest = read_manifest(prefix) if prefix is not None else None
    if model is None or prefix is None or manifest is None or manifest.kind != "sft":
        return None
    if not is_hf(model) or not has_weight_files(Path(model)):
        return None
    words = ["-c", "sft", "--model", model, "--data", prefix, "--set", "train.epochs=1"]
    return shlex.join(["msrl", "train-sft", *words])
