"""Import of a file of another system: validation of the translated file, and its commands."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from msrl.checks.validate import check
from msrl.config.loader import Importers, Resolved, load
from msrl.config.messages import node_at
from msrl.config.sources import Node, children
from msrl.errors import ManyErrors
from msrl.importers.translation import Translation
from msrl.plan.run_plan import resolve

_COMMANDS = {
    "convert": "convert-ckpt",
    "preprocess": "preprocess",
    "generate": "generate",
    "chat": "chat",
}
_REFERENCE = re.compile(r"\$\{env:([^{}]*)\}")
_KEY = re.compile(r"(?:^|: )([a-z_]+(?:\.\w+)+)(?:=.*?)?: ")
# Keys that name files, folders and addresses of the machine of the run.
_INPUTS = re.compile(
    r"model\.(path|tokenizer)|checkpoint\.(load|resume)|data\.(train|eval|blend\..*)"
    r"|eval\.(every_steps|at_start)|preprocess\.(input(\.\d+)?|tokenizer|output_prefix)"
    r"|convert\.(load|save|hf_config|lora)|(generate|chat)\.(model|lora)|generate\.(prompt|input)"
    r"|algo\.distill\.teachers\.\d+\.model|reward\.sources\.\d+\.model|train\.lora\.load"
    r"|cluster\.(nodes|address|roles\.\w+\.load)"
)


@dataclass(frozen=True, slots=True)
class Validation:
    """Result of the checks of a translated file.

    `errors` make the file invalid. `inputs` are files, data and addresses that the user provides
    before a run; they depend on the machine.
    """

    commands: tuple[str, ...]
    errors: tuple[str, ...]
    inputs: tuple[str, ...]


def validate(translation: Translation) -> Validation:
    """Check a translated file as the commands that read it would."""
    unset = [name for name in _variables(translation.tree) if name not in os.environ]
    environment = {**os.environ, **dict.fromkeys(unset, "unset")}
    importers = Importers(translate=lambda _: translation)
    try:
        resolved = load([translation.name], importers=importers, environment=environment)
    except ManyErrors as error:
        return Validation((), error.messages, ())
    commands = tuple(_commands(resolved))
    lines: list[str] = []
    for command in commands:
        try:
            check(resolved, resolve(resolved.config, command))
        except ManyErrors as error:
            lines += error.messages
    lines = list(dict.fromkeys(lines))
    inputs = tuple(line for line in lines if _is_input(line))
    errors = tuple(line for line in lines if line not in inputs)
    exports = tuple(f"the environment variable {name} is not set. Export it." for name in unset)
    return Validation(commands, errors, (*exports, *inputs))


def _variables(node: Node) -> list[str]:
    """Return the names of the environment variables that a translated file refers to."""
    names = _REFERENCE.findall(node.value) if isinstance(node.value, str) else []
    for child in children(node).values():
        names += _variables(child)
    return list(dict.fromkeys(names))


def next_commands(
    translation: Translation, validation: Validation, output: str | None
) -> list[str]:
    """Return the command lines that run the written file, in the order of their sections."""
    file = shlex.quote(output or "FILE")
    subcommand = node_at(translation.tree, ["convert", "command"])
    lines: list[str] = []
    for command in validation.commands:
        name = (
            f"{command} {subcommand.value}" if command == "convert-ckpt" and subcommand else command
        )
        lines.append(f"msrl {name} -c {file}")
    if output is None and lines:
        lines[0] += " (write it with --output FILE)"
    return lines


def _commands(resolved: Resolved) -> Iterator[str]:
    """Yield the commands whose sections a configuration sets.

    generate and chat read the parallel size of the engine, which is in the section rollout.
    """
    commands = [command for section, command in _COMMANDS.items() if resolved.is_set(section)]
    if resolved.is_set("data.train") and not resolved.is_set("preprocess.input"):
        commands = [command for command in commands if command != "preprocess"]  # of its rows
    yield from commands
    serves = bool({"generate", "chat"} & set(commands))
    if resolved.is_set("algo.distill") and not resolved.is_set("reward.sources"):
        yield "train-distill"
    elif resolved.is_set("reward.sources") or (resolved.is_set("rollout") and not serves):
        yield "train-grpo"
    elif resolved.is_set("algo.preference"):
        yield "train-dpo"
    elif resolved.is_set("algo.reward_model"):
        yield "train-rm"
    elif resolved.is_set("train") or resolved.is_set("data"):
        yield "train-sft"


def _is_input(line: str) -> bool:
    match = _KEY.search(line)
    return match is not None and _INPUTS.fullmatch(match[1]) is not None
