"""Hints for wrong command lines: suggestions for unknown commands, options and arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_RENAMED_OPTIONS = {"--layout": "--format"}
_OTHER_OPTIONS = {"--api-key": "--api-key-file", "--lora-modules": "--lora"}
# Options of other tools without an equal here, by canonical name, and what to do instead.
_NO_OPTIONS = {
    "trust_remote_code": "Code of a checkpoint is never run. Remove it.",
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "accelerate_config", "zero_stage"),
        "Megatron distributes the training: set train.parallel, train.offload and train.recompute.",
    ),
    **dict.fromkeys(
        ("stage", "do_train", "task", "task_type"),
        "The command is the stage: train-sft, train-dpo, train-rm or train-grpo. Remove it.",
    ),
    **dict.fromkeys(
        ("do_eval", "eval_strategy", "evaluation_strategy"), "Set data.eval and eval.every_steps."
    ),
    **dict.fromkeys(("save_strategy", "logging_strategy"), "Intervals are in steps. Remove it."),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization_bit", "quant_bits", "qlora_nf4"),
        "msrl does not train quantized weights. Remove it.",
    ),
    **dict.fromkeys(
        ("flash_attn", "attn_implementation", "attn_impl", "use_flash_attn", "enable_liger_kernel"),
        "msrl selects the kernels for the platform. Remove it.",
    ),
    **dict.fromkeys(
        ("use_vllm", "vllm_mode", "infer_backend"), "vLLM always generates. Remove it."
    ),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss", "train_on_inputs", "train_on_prompt"),
        "Answers are trained, and prompts are not. Remove it.",
    ),
    **dict.fromkeys(
        ("nproc_per_node", "num_processes", "nnodes", "num_gpus", "gpus", "n_gpus_per_node"),
        "Set cluster.devices_per_node and cluster.nodes.",
    ),
    **dict.fromkeys(
        ("plot_loss", "ddp_timeout", "dataloader_num_workers", "remove_unused_columns"),
        "msrl needs no such setting. Remove it.",
    ),
}
# Sections of the table of MindSpeed-LLM's flags that belong to a command; of trainings: train.
_MINDSPEED_SECTIONS = {
    "convert-ckpt": "convert",
    "preprocess": "preprocess",
    "generate": "inference",
    "chat": "inference",
}
_VERL_SECTIONS = (
    "actor_rollout_ref",
    "algorithm",
    "critic",
    "custom_reward_function",
    "reward_model",
    "trainer",
)
_VERL_ADVICE = "Words of a command of verl are imported by `msrl config import --from verl`."
_OTHER_WORDS = {
    "sft": ("train-sft",),
    "finetune": ("train-sft",),
    "fine-tune": ("train-sft",),
    "pretrain": ("train-sft",),
    **dict.fromkeys(("dpo", "kto", "orpo", "simpo", "ipo", "cpo"), ("train-dpo",)),
    **dict.fromkeys(("rm", "orm", "reward"), ("train-rm",)),
    "rl": ("train-grpo",),
    "ppo": ("train-grpo",),
    "dapo": ("train-grpo",),
    "rlhf": ("train-grpo",),
    **dict.fromkeys(("distill", "distillation", "gkd", "opd"), ("train-distill",)),
    "convert": ("convert-ckpt",),
    "export": ("convert-ckpt mcore2hf",),
    "tokenize": ("preprocess",),
    "infer": ("generate",),
    "inference": ("generate",),
    "sample": ("generate",),
    "server": ("serve",),
    "deploy": ("serve",),
    "api": ("serve",),
    "evaluate": ("eval",),
    "benchmark": ("eval",),
    "test": ("eval",),
    "start": ("cluster up",),
    "stop": ("cluster down",),
    "check": ("config validate", "doctor"),
}


def unknown_command(word: str, root: Any, path: str) -> str:
    """Return the error message about an unknown command of the group at `path` (`msrl config`)."""
    commands = tuple(_commands(root))
    similar = _similar(word.lower().replace("_", "-"), commands)
    suggestion = (
        f" Did you mean {_alternatives(similar)}?"
        if similar
        else f" `{path} --help` lists the commands."
    )
    return f"No such command {word!r}.{suggestion}"


def _commands(group: Any, prefix: str = "") -> Iterator[str]:
    """Yield the commands below a group, as in `train-sft` and `config show`."""
    for name, command in group.commands.items():
        yield prefix + name
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")


def _similar(word: str, commands: Sequence[str]) -> list[str]:
    """Return the commands with this word in their name, else synonyms, else similar spellings."""
    last_names = {command: command.rpartition(" ")[2] for command in commands}
    named = [command for command, name in last_names.items() if word in (name, *name.split("-"))]
    if named:
        return named
    begun = [
        command for command, name in last_names.items() if len(word) > 1 and name.startswith(word)
    ]
    if begun:
        return begun
    synonyms = _OTHER_WORDS.get(word) or _OTHER_WORDS.get(word.rpartition("-")[2], ())
    meant = [command for command in synonyms if command in commands]
    if meant:
        return meant
    close = get_close_matches(word, last_names.values(), n=2)
    return [command for command, name in last_names.items() if name in close]


def _alternatives(names: Sequence[str]) -> str:
    return " or ".join(f"`msrl {name}`" for name in names)


def extra_words(words: Sequence[str], line: Sequence[str], parameters: Sequence[Any]) -> str:
    """Return the error message about unexpected arguments, with the option that is missing.

    `line` are all words of the command line.
    """
    message = f"Unexpected extra argument{'s' if len(words) > 1 else ''}: {' '.join(words)}."
    word, names = words[0], [parameter.name for parameter in parameters]
    split = _split_value(words, line, parameters)
    if split:
        return f"{message} {split}"
    if "config" in names and _is_configuration(word):
        return f"{message} Did you mean -c {word}?"
    if "sets" not in names or "=" not in word:
        return message
    section = word.lstrip("+~").partition(".")[0]
    if section in _VERL_SECTIONS or word[0] in "+~" or "data.train_files" in word:
        return f"{message} Configuration keys are set by --set KEY=VALUE. {_VERL_ADVICE}"
    suggestion = f" Did you mean --set {word}?" if _is_section(section) else ""
    return f"{message}{suggestion} Configuration keys are set by --set KEY=VALUE."


def _split_value(words: Sequence[str], line: Sequence[str], parameters: Sequence[Any]) -> str:
    """Return how to write a value of which the first extra word seems to be a part."""
    index = next((i for i, word in enumerate(line) if word == words[0]), 0)
    if index < 2:
        return ""
    option, value = line[index - 2 : index]
    if option == "--set" and "=" not in value:
        return f"Write --set {value}={words[0]}."
    lists = [name for each in parameters if "," in (each.metavar or "") for name in each.opts]
    if value.endswith(",") or option in lists:
        items = ",".join(word.strip(",") for word in (value, *words))
        return f"Write a list without spaces: {option} {items}."
    return ""


def _is_section(word: str) -> bool:
    from msrl.config.schema import Config

    return word in Config.model_fields


def _is_configuration(word: str) -> bool:
    from msrl.config.sources import packaged_names

    return (
        word.endswith((".yaml", ".yml"))
        or word in packaged_names()
        or ("=" not in word and Path(word).is_file())
    )


_NUMBERS = {"valid integer": "a whole number", "valid number": "a number"}


def explain_value(error: Exception, words: Sequence[str]) -> None:
    """Name a value that is not a number in an error about an option, without words of pydantic."""
    names: Sequence[str] = getattr(getattr(error, "param", None), "opts", ())
    text = str(getattr(error, "message", ""))
    kind = next((kind for phrase, kind in _NUMBERS.items() if phrase in text), None)
    if text.startswith("Value error, "):
        error.message = text.removeprefix("Value error, ")  # pyright: ignore[reportAttributeAccessIssue]
    if kind is None:
        return
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            value = value if equals else words[index + 1]
            error.message = f"{value!r} must be {kind}."  # pyright: ignore[reportAttributeAccessIssue]


def explain_option(error: Exception, command: str, options: Mapping[str, str | None]) -> None:
    """Add a suggestion to an error about an unknown option.

    The suggestion is an option, a configuration key, or the import of a MindSpeed script.
    `options` are those of the command, with the keys that they set.
    """
    flag = str(getattr(error, "option_name", ""))
    if not flag.startswith("--") or not hasattr(error, "possibilities"):
        return
    hint = _option_hint(flag, command, options)
    if hint:
        error.possibilities = None  # pyright: ignore[reportAttributeAccessIssue]
        error.message = f"{str(error.message).rstrip('.')}. {hint}"  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]


def _option_hint(flag: str, command: str, options: Mapping[str, str | None]) -> str:
    from msrl.config.foreign_names import OTHER_NAMES
    from msrl.importers.table import canonical

    if _RENAMED_OPTIONS.get(flag) in options:
        return f"It is now called {_RENAMED_OPTIONS[flag]}."
    name = canonical(flag)
    same = [option for option in options if canonical(option) == name]
    if same or _OTHER_OPTIONS.get(flag) in options:
        return f"Did you mean {[*same, _OTHER_OPTIONS.get(flag)][0]}?"
    setting = _setting(OTHER_NAMES.get(name, ()), command, options)
    is_spelled_otherwise = bool(setting) and "_" in flag
    if is_flag_of_mindspeed(flag) and not is_spelled_otherwise:
        return _mindspeed_hint(flag, command, options, setting)
    if setting:
        return f"Did you mean {setting}?"
    if name in _NO_OPTIONS:
        return _NO_OPTIONS[name]
    return _key_hint(flag) if command.startswith("train-") else ""


def _setting(keys: Sequence[str], command: str, options: Mapping[str, str | None]) -> str:
    """Return the option of a command that sets one of the keys, or `--set`; else nothing."""
    from msrl.config.options import reads_section
    from msrl.config.unsupported import not_yet

    named = [option for option, key in options.items() if key in keys]
    if named:
        return named[0]
    own = [
        key
        for key in keys
        if reads_section(command, key.partition(".")[0]) and not_yet(key) is None
    ]
    return f"--set {own[0]}=VALUE" if own else ""


def _mindspeed_hint(
    flag: str, command: str, options: Mapping[str, str | None], setting: str
) -> str:
    """Return what a flag of MindSpeed-LLM is here, and how its scripts are read."""
    from msrl.importers.table import canonical, load_table

    scripts = "MindSpeed-LLM's scripts are read by: msrl config import --from mindspeed-llm FILE"
    section = _MINDSPEED_SECTIONS.get(command, "train")
    row = load_table("mindspeed_llm").row(section, canonical(flag))
    setting = setting or (_setting(row.to, command, options) if row is not None else "")
    if setting:
        return f"It is {setting} here. {scripts}"
    if row is None:
        return scripts
    if row.refuse:
        return f"Not supported: {row.refuse}. {scripts}"
    reason = row.neutral[1] or row.dead or row.by
    return f"Remove it: {reason}. {scripts}" if reason and not row.to else scripts


def _key_hint(flag: str) -> str:
    """Return a suggestion to set the keys of this name with `--set`, or nothing."""
    from msrl.config.messages import keys

    name = flag.lstrip("-").replace("-", "_")
    matches = sorted((key for key in keys() if name in (key, key.rpartition(".")[2])), key=len)[:2]
    return (
        f"Did you mean {' or '.join(f'--set {key}=VALUE' for key in matches)}?" if matches else ""
    )


def is_flag_of_mindspeed(flag: str) -> bool:
    """Return True if MindSpeed-LLM has an option of this name."""
    from msrl.importers.table import canonical, load_table

    return bool(flag) and any(key == canonical(flag) for _, key in load_table("mindspeed_llm").rows)
