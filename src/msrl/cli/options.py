"""Options of commands: those of several commands, and those that the schema's keys generate.

Options of one command are parameters of its function. `msrl --help` reads no key of the schema.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar

import typer

from msrl.cli import completion as complete
from msrl.config.options import SECTIONS, TRAININGS, KeyOption
from msrl.config.options import options as key_options
from msrl.errors import MsrlError

CONFIGURATION = "Configuration"
NETWORK = "Network"
ANY_COMMAND = ("config", "doctor")  # --for selects the command whose keys their options set
COMMANDS = (*TRAININGS, *SECTIONS)  # that read a configuration
CommandName = Enum("CommandName", {name: name for name in COMMANDS}, type=str)
Function = TypeVar("Function", bound=Callable[..., None])
# Types that a key accepts, with the type and the placeholder of its option; the first one counts.
_VALUES: tuple[tuple[Any, Any, str], ...] = (
    (tuple[str], list[str], ""),
    (tuple[int], str, "N,N,..."),
    (dict, str, "JSON"),
    (str, str, "NAME"),
    (float, float, "X"),
    (bool, bool, ""),
    (int, int, "N"),
)
_KEY = re.compile(r"[a-z]\w*(?:\.[a-z]\w*)+")


@dataclass(frozen=True, slots=True)
class SharedOption:
    """Option of several commands that sets no key. `ctx.params` has its value under `name`."""

    name: str
    annotation: Any
    default: object = None


def option(*names: str, panel: str | None = None, values: Any = None, **settings: Any) -> Any:
    """Return a typer option in a panel of the help, whose values `values` completes."""
    return typer.Option(
        *names, rich_help_panel=panel, autocompletion=values, show_default=False, **settings
    )


ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False),
]
Json = Annotated[bool, option("--json", help="Print JSON.")]
CONFIG = SharedOption(
    "config",
    Annotated[
        list[str] | None,
        option(
            "--config", "-c", metavar="FILE", panel=CONFIGURATION, values=complete.config_files,
            help="YAML file, or the name of a packaged configuration. "
            "Repeat it to merge several: later files override earlier ones.",
        ),
    ],
)  # fmt: skip
CONFIG_NAME = SharedOption(
    "config_name",
    Annotated[
        str | None,
        option(
            "--config-name", metavar="NAME", panel=CONFIGURATION, values=complete.config_names,
            help="Configuration by name, from ./configs or packaged with msrl. "
            "It is merged before the files of -c.",
        ),
    ],
)  # fmt: skip
SETS = SharedOption(
    "sets",
    Annotated[
        list[str] | None,
        option(
            "--set", metavar="KEY=VALUE", panel=CONFIGURATION, values=complete.assignments,
            help="Set one configuration key, as in train.steps=10. Repeatable. Overrides files.",
        ),
    ],
)  # fmt: skip
APPROXIMATE = SharedOption(
    "approximate",
    Annotated[
        bool,
        option(
            "--approximate",
            help="Accept the nearest setting if msrl has no equal one in a file of another system. "
            "The report names each of them. Default: refuse such files.",
        ),
    ],
    default=False,
)
FOR = SharedOption(
    "command",
    Annotated[
        CommandName | None,
        option(
            "--for", metavar="COMMAND", panel=CONFIGURATION,
            help=f"Command to check for: {', '.join(COMMANDS)}. "
            "Default: the one that the configured sections suggest.",
        ),
    ],
)  # fmt: skip
DRY_RUN = SharedOption(
    "dry_run",
    Annotated[
        bool,
        option(
            "--dry-run",
            help="Check the configuration and all inputs as the command does, and print the plan "
            "without starting or writing anything.",
        ),
    ],
    default=False,
)
VERBOSE = SharedOption(
    "verbose",
    Annotated[
        bool, option("--verbose", "-v", help="Print the logs of Megatron, vLLM and Ray too.")
    ],
    default=False,
)


def takes(*options: SharedOption | str) -> Callable[[Function], Function]:
    """Add options to a command. A name such as `convert-ckpt inspect` adds those of its keys."""

    def add(function: Function) -> Function:
        function.options = options  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return add


@functools.cache
def parameters(options: tuple[SharedOption | str, ...]) -> tuple[Any, ...]:
    """Return typer's parameters of the options of `takes`. Each has the key that it sets, or None.

    Building them from a signature needs no class that typer has changed between its versions. An
    error message needs the options of all commands, so each command's are built once.
    """
    shared: list[SharedOption] = []
    keys: dict[str, str] = {}
    for entry in options:
        entries = key_options(entry) if isinstance(entry, str) else ()
        names = {each.key: each.names[0] for each in entries}
        for key_option in entries:
            name = key_option.names[0].removeprefix("--").replace("-", "_")
            shared.append(SharedOption(name, _annotation(key_option, names)))
            keys[name] = key_option.key
        if isinstance(entry, SharedOption):
            shared.append(entry)
    kind = Parameter.KEYWORD_ONLY

    def function() -> None: ...

    function.__signature__ = Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [
            Parameter(each.name, kind, default=each.default, annotation=each.annotation)
            for each in shared
        ]
    )
    app = typer.Typer(add_completion=False)
    app.command()(function)
    built: list[Any] = [*typer.main.get_command(app).params]
    for parameter in built:
        parameter.key = keys.get(parameter.name)
    return tuple(built)


def _annotation(entry: KeyOption, names: Mapping[str, str]) -> Any:
    """Return the annotation of an option of a key. Its help names other keys by their options."""
    from msrl.config.facts import key_facts

    facts = key_facts(entry.key)
    assert facts is not None, entry.key
    python_type, metavar = next(
        (option_type, name) for accepted, option_type, name in _VALUES if accepted in facts.types
    )
    first, *aliases = entry.names
    if python_type is bool:
        first = f"{first}/--no-{first.removeprefix('--')}"
    text = _KEY.sub(lambda match: names.get(match[0], match[0]), entry.help or facts.description)
    if tuple[str] in facts.types:
        text += " Repeatable."
    if entry.is_required:
        text += " Required here or in a file."
    settings = option(
        first,
        *aliases,
        metavar=entry.metavar or metavar or None,
        panel=entry.panel or None,
        values=None if python_type is bool else complete.values(entry.key),
        help=text,
    )
    return Annotated[python_type | None, settings]


def top_command(ctx: typer.Context) -> str:
    """Return the name of the command below `msrl` of this call; empty for `msrl` itself."""
    name = ""
    node: Any = ctx
    while node is not None and node.parent is not None:
        name = node.info_name or ""
        node = node.parent
    return name


def configured_command(ctx: typer.Context) -> str:
    """Return the command whose settings the options set: `train-sft` in `msrl train-sft`.

    For `config` and `doctor`, this is the command of --for.
    """
    command = top_command(ctx)
    return named_command(ctx) or "train-sft" if command in ANY_COMMAND else command


def named_command(ctx: typer.Context) -> str | None:
    """Return the command of --for, or None without it."""
    command = ctx.params.get("command")
    # The parameter is an enum in some versions of typer and text in others.
    return None if command is None else str(getattr(command, "value", command))


def set_key(parameter: Any, ctx: typer.Context) -> str | None:
    """Return the key that a parameter of this call sets, or None if it sets no key.

    With --for, it sets the key of the same option of that command.
    """
    key: str | None = getattr(parameter, "key", None)
    if key is None or top_command(ctx) not in ANY_COMMAND:
        return key
    name = parameter.opts[0]
    target = key_options(configured_command(ctx))
    return next((option.key for option in target if option.names[0] == name), None)


def take_arguments(ctx: typer.Context, key: str, words: Sequence[str]) -> None:
    """Set a key to arguments of the command line, as its option does.

    Raises:
        MsrlError: The key takes one value, and the option names another one.
    """
    parameter: Any = next(
        parameter for parameter in ctx.command.params if set_key(parameter, ctx) == key
    )
    value = ctx.params.get(parameter.name)
    if parameter.multiple:
        ctx.params[parameter.name] = [*(value or []), *words]
    elif words and value is not None:
        raise MsrlError(
            f"{parameter.opts[0]}={value}: {words[0]} is already named. Name one of them."
        )
    elif words:
        ctx.params[parameter.name] = words[0]
