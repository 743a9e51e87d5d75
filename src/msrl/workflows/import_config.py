"""Import of a file of another system: translation, and validation of the translated file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from msrl.checks.validate import check
from msrl.config.loader import Importers, Resolved, load
from msrl.errors import ManyErrors
from msrl.importers.translation import Translation

_COMMANDS = {
    "convert": "convert-ckpt",
    "preprocess": "preprocess",
    "generate": "generate",
    "chat": "chat",
}
_KEY = re.compile(r"(?:^|: )([a-z_]+(?:\.\w+)+)(?:=.*?)?: ")
# Keys that name files, folders and addresses of the machine of the run.
_INPUTS = re.compile(
    r"model\.(path|tokenizer)|checkpoint\.(load|resume)|data\.(train|eval|blend\..*)"
    r"|eval\.(every_steps|at_start)|preprocess\.(input(\.\d+)?|tokenizer|output_prefix)"
    r"|convert\.(load|save|hf_config|lora)|(generate|chat)\.model|generate\.(prompt|input)"
    r"|cluster\.(nodes|address|roles\.\w+\.load)|reward\.sources\.\d+\.model|train\.lora\.load"
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
    try:
        resolved = load([translation.name], importers=Importers(translate=lambda _: translation))
    except ManyErrors as error:
        return Validation((), error.messages, ())
    commands = tuple(_commands(resolved))
    lines: list[str] = []
    for command in commands:
        try:
            check(resolved, command)
        except ManyErrors as error:
            lines += error.messages
    lines = list(dict.fromkeys(lines))
    inputs = tuple(line for line in lines if _is_input(line))
    errors = tuple(line for line in lines if line not in inputs)
    return Validation(commands, errors, inputs)


def _commands(resolved: Resolved) -> Iterator[str]:
    """Yield the commands whose sections a configuration sets.

    generate and chat read the parallel size of the engine, which is in the section rollout.
    """
    commands = [command for section, command in _COMMANDS.items() if resolved.is_set(section)]
    yield from commands
    serves = "generate" in commands
    if resolved.is_set("reward.sources") or (resolved.is_set("rollout") and not serves):
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
