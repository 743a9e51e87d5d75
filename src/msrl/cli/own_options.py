"""Options in error messages, which a module writes without knowing the command that raises them.

A message such as `Name the column with --map-keys` is also raised by commands without that option.
There, the option becomes the key that it sets, if the command reads the key, or is written with a
command that has it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msrl.config.options import reads_section
from msrl.errors import ManyErrors, MsrlError

# An option, and the gap before its value: a word that continues the sentence is no value.
_OPTION = re.compile(
    r"(?<![\w-])(--[a-z][a-z-]*[a-z])(?![\w-])"
    r"(?:(=| +)(?!(?:or|and|to|with|is|for|of|on|in|takes|has|was|must|prints|sets)\b)(?=\S))?"
)
_SENTENCE_END = re.compile(r"[.;] |\n")


@dataclass(frozen=True, slots=True)
class _Option:
    """Option of a command."""

    key: str | None  # that it sets
    is_flag: bool


Commands = Mapping[str, Mapping[str, _Option]]
"""Options by command, such as `config show`, and name."""


def correct(error: MsrlError, ctx: Any) -> MsrlError:
    """Return the error with options as the command of `ctx` has them."""
    commands = dict(all_commands(ctx.find_root().command))
    own = ctx.command_path.partition(" ")[2]
    if isinstance(error, ManyErrors):
        messages = [with_own_options(text, own, commands) for text in error.messages]
        return ManyErrors(messages) if messages != [*error.messages] else error
    text = with_own_options(str(error), own, commands)
    return MsrlError(text) if text != str(error) else error


def all_commands(group: Any, prefix: str = "") -> Iterator[tuple[str, dict[str, _Option]]]:
    """Yield all commands below a group with their options."""
    for name in group.list_commands(None):
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from all_commands(command, f"{prefix}{name} ")
            continue
        options: dict[str, _Option] = {}
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                if option.startswith("--"):
                    options[option] = _Option(getattr(parameter, "key", None), parameter.is_flag)
        yield prefix + name, options


def with_own_options(text: str, own: str, commands: Commands) -> str:
    """Return a message of command `own` without options that the command does not have."""

    def replace(match: re.Match[str]) -> str:
        option = match[1]
        owners = {name: known[option] for name, known in commands.items() if option in known}
        sentence = _SENTENCE_END.split(text[: match.start()])[-1]
        if not owners or own in owners or any(_is_named(name, sentence) for name in owners):
            return match[0]
        key = _key(own, owners)
        if key is None:
            return f"msrl {next(iter(owners))} {match[0]}"
        if next(iter(owners.values())).is_flag:
            return f"--set {key}={'false' if option.startswith('--no-') else 'true'}"
        return f"--set {key}=" if match[2] else key

    return _OPTION.sub(replace, text)


def _is_named(command: str, sentence: str) -> bool:
    """Return True if a sentence names a command, such as `hf2mcore`, and not only a key of it."""
    return (
        re.search(rf"(?<![\w-]){re.escape(command.split()[-1])}(?![\w-]|\.\w)", sentence)
        is not None
    )


def _key(own: str, owners: Mapping[str, _Option]) -> str | None:
    """Return the key that the option of other commands sets and that command `own` reads."""
    keys = (option.key for option in owners.values() if option.key is not None)
    return next((key for key in keys if reads_section(own.split()[0], key.split(".")[0])), None)
