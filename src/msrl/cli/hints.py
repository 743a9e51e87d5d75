"""Hints for wrong command lines: suggestions for unknown commands, options and arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

_RENAMED_OPTIONS = {"--layout": "--format"}
_OTHER_OPTIONS = {
    "--learning-rate": "--lr",
    "--max-steps": "--steps",
    "--num-steps": "--steps",
    "--model-path": "--model",
    "--model-name-or-path": "--model",
    "--dataset": "--data",
    "--train-data": "--data",
    "--run-name": "--name",
    "--tensor-parallel-size": "--tp",
    "--pipeline-parallel-size": "--pp",
    "--api-key": "--api-key-file",
    "--lora-modules": "--lora",
}
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


def unknown_command(word: str, root: Any) -> str:
    """Return the error message about an unknown command, with similar commands."""
    commands = tuple(_commands(root))
    similar = _similar(word.lower().replace("_", "-"), commands)
    suggestion = (
        f" Did you mean {_alternatives(similar)}?"
        if similar
        else " `msrl --help` lists the commands."
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


def extra_words(words: Sequence[str], parameters: Sequence[str | None]) -> str:
    """Return the error message about unexpected arguments, with the option that is missing."""
    message = f"Unexpected extra argument{'s' if len(words) > 1 else ''}: {' '.join(words)}."
    word = words[0]
    if "config" in parameters and _is_configuration(word):
        return f"{message} Did you mean -c {word}?"
    if "sets" not in parameters or "=" not in word:
        return message
    suggestion = f" Did you mean --set {word}?" if _is_section(word.partition(".")[0]) else ""
    return f"{message}{suggestion} Configuration keys are set by --set KEY=VALUE."


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
    """Name the value in an error about an option whose value is not a number."""
    names: Sequence[str] = getattr(getattr(error, "param", None), "opts", ())
    text = str(getattr(error, "message", ""))
    kind = next((kind for phrase, kind in _NUMBERS.items() if phrase in text), None)
    if kind is None:
        return
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            value = value if equals else words[index + 1]
            error.message = f"{value!r} must be {kind}."  # pyright: ignore[reportAttributeAccessIssue]


def explain_option(error: Exception, command: str, options: Collection[str]) -> None:
    """Add a suggestion to an error about an unknown option.

    The suggestion is an option, a configuration key, or the import of a MindSpeed script.
    """
    flag = str(getattr(error, "option_name", ""))
    if not flag.startswith("--") or not hasattr(error, "possibilities"):
        return
    hint = _option_hint(flag, command, options)
    if hint:
        error.message = f"{str(error.message).rstrip('.')}. {hint}"  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]


def _option_hint(flag: str, command: str, options: Collection[str]) -> str:
    if _RENAMED_OPTIONS.get(flag) in options:
        return f"It is now called {_RENAMED_OPTIONS[flag]}."
    if _OTHER_OPTIONS.get(flag) in options:
        return f"Did you mean {_OTHER_OPTIONS[flag]}?"
    if is_flag_of_mindspeed(flag):
        return "MindSpeed-LLM's scripts are read by: msrl config import --from mindspeed-llm FILE"
    return _key_hint(flag) if command.startswith("train-") else ""


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
