"""Help of all commands: panels of options, and examples at the end.

Names of options and choices are never truncated or split. Defaults, ranges and choices come from
the schema.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from io import StringIO
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand, TyperGroup

from msrl.cli import hints
from msrl.cli.options import configured_command, parameters, set_key
from msrl.errors import MsrlError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

GENERAL = "General"
_MAX_WIDTH = 100
_MAX_LABEL_WIDTH = 28
_MIN_HELP_WIDTH = 36
_NAME, _VALUE, _DIM = "bold cyan", "yellow", "dim"
# Placeholder of a space at which a line must not break: rich breaks lines at every white space.
_NO_BREAK = "\ue000"


class Command(TyperCommand):
    """Command with the options of `takes`, help panels, and suggestions in errors."""

    _own: list[Any]
    _all: list[Any] | None = None

    @property
    def params(self) -> list[Any]:
        """Parameters of the function, and the options of `takes`, built at their first use."""
        if self._all is None:
            self._all = [*self._own, *parameters(getattr(self.callback, "options", ()))]
        return self._all

    @params.setter
    def params(self, own: list[Any]) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._own = own

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of this command."""
        formatter.write(_render(self, ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words of the usage line after the command's name."""
        arguments: list[Any] = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *(_usage_word(p) for p in arguments if not p.hidden)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. Error messages suggest what was probably meant."""
        ctx.allow_extra_args = True  # the check below reports them with a suggestion
        words = [*args]
        try:
            remaining = super().parse_args(ctx, args)
        except Exception as error:
            hints.explain_value(error, words)
            options = {
                option: set_key(parameter, ctx)
                for parameter in self.params
                for option in parameter.opts
                if option.startswith("-")
            }
            hints.explain_option(error, configured_command(ctx), options)
            raise
        if ctx.args and not ctx.resilient_parsing:
            ctx.fail(hints.extra_words(ctx.args, words, self.params))
        return remaining

    def invoke(self, ctx: Any) -> Any:
        """Call the function with its parameters. Errors name options as this command has them."""
        own = {parameter.name for parameter in self._own}
        values = {name: value for name, value in ctx.params.items() if name in own}
        try:
            return ctx.invoke(self.callback, **values)
        except MsrlError as error:
            from msrl.cli.own_options import correct

            raise correct(error, ctx) from error


class Group(TyperGroup):
    """Group of commands with help panels, and with suggestions for unknown commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help of this group."""
        formatter.write(_render(self, ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of the first argument, and the remaining arguments.

        The error about an unknown command suggests similar ones.
        """
        is_unknown = self.get_command(ctx, args[0]) is None and not args[0].startswith("-")
        if is_unknown and not ctx.resilient_parsing:
            ctx.fail(hints.unknown_command(args[0], ctx.find_root().command, ctx.command_path))
        return super().resolve_command(ctx, args)


def examples(*commands: str) -> str:
    """Return the example commands of a help text as its epilog, one per line."""
    return "\n".join(commands)


def _render(command: Any, ctx: Any) -> str:
    """Return the help of a command as text, colored on a terminal that supports colors."""
    from rich.console import Console

    output = StringIO()
    is_colored = (
        sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    )
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    console = Console(
        file=output,
        width=width,
        force_terminal=is_colored,
        color_system="standard" if is_colored else None,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(ctx.command.get_usage(ctx).rstrip())
    for paragraph in (command.help or "").split("\n\n"):
        console.print()
        console.print(" ".join(paragraph.split()))
    console.print()
    for title, entries in _panels(command, ctx, console).items():
        _print_panel(console, title, entries)
    if command.epilog:
        _print_examples(console, command.epilog)
    return "".join(f"{line.rstrip()}\n" for line in output.getvalue().splitlines())


def _panels(command: Any, ctx: Any, console: Console) -> dict[str, list[RenderableType]]:
    """Return the lines of every panel by its title.

    The order is: commands, arguments, options, general options.
    """
    panels: dict[str, list[RenderableType]] = {}
    entries = [*_command_entries(command, ctx), *_parameter_entries(command, ctx)]
    widths = [label.cell_len + 2 for _, label, _ in entries]
    column = max((width for width in widths if width <= _MAX_LABEL_WIDTH), default=_MAX_LABEL_WIDTH)
    for title, label, text in entries:
        panels.setdefault(title, []).extend(_entry(console, label, text, column))
    if GENERAL in panels:
        panels[GENERAL] = panels.pop(GENERAL)
    return panels


def _command_entries(command: Any, ctx: Any) -> Iterator[tuple[str, Text, Text]]:
    from rich.text import Text

    if not isinstance(command, TyperGroup):
        return
    for name in command.list_commands(ctx):
        subcommand = command.get_command(ctx, name)
        summary = " ".join((getattr(subcommand, "help", None) or "").split("\n\n")[0].split())
        yield "Commands", Text(name, _NAME), Text(summary)


def _parameter_entries(command: Any, ctx: Any) -> Iterator[tuple[str, Text, Text]]:
    for parameter in command.get_params(ctx):
        if getattr(parameter, "hidden", False):
            continue
        if parameter.param_type_name == "argument":
            yield "Arguments", _argument_label(parameter), _argument_text(parameter)
        else:
            yield (
                getattr(parameter, "rich_help_panel", None) or GENERAL,
                _option_label(parameter),
                _option_text(parameter, ctx),
            )


def _usage_word(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _argument_label(parameter: Any) -> Text:
    from rich.text import Text

    return Text(parameter.metavar or parameter.name.upper(), _NAME)


def _argument_text(parameter: Any) -> Text:
    from rich.text import Text

    text = Text(parameter.help or "")
    if parameter.required:
        text.append(" [required]", _DIM)
    return text


def _option_label(parameter: Any) -> Text:
    """Return the left column: short, first long and negative name, and placeholder of the value."""
    from rich.text import Text

    short = [name for name in parameter.opts if not name.startswith("--")]
    long = [name for name in parameter.opts if name.startswith("--")][:1]
    text = Text(", ".join([*short, *long, *parameter.secondary_opts]), _NAME)
    if parameter.metavar:
        text.append(f" {parameter.metavar}", _VALUE)
    return text


def _option_text(parameter: Any, ctx: Any) -> Text:
    """Return the help of an option with its choices, range, default and further names."""
    from rich.text import Text

    text = Text(parameter.help or "")
    for fact in _facts(parameter, ctx):
        text.append(f" [{fact}]", _DIM)
    aliases = [name for name in parameter.opts if name.startswith("--")][1:]
    if aliases:
        text.append(f"\nAlso: {', '.join(aliases)}", _DIM)
    return text


def _facts(parameter: Any, ctx: Any) -> Iterator[str]:
    """Yield choices, range and default of an option.

    They come from the schema if the option sets a configuration key.
    """
    key = set_key(parameter, ctx)
    if key is None:
        if parameter.default and not parameter.is_flag:
            yield f"default:{_NO_BREAK}{parameter.default}"
        return
    from msrl.config.facts import key_facts

    facts = key_facts(key)
    if facts is None:
        return
    choices = facts.choices or facts.examples
    if choices and not parameter.is_flag:
        yield ", ".join(choices)
    if facts.limits:
        yield facts.limits.replace(" ", _NO_BREAK)
    default = _default_text(facts.default)
    if default and "Default:" not in (parameter.help or ""):
        yield f"default:{_NO_BREAK}{default}"


def _default_text(default: object) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return str(default) if isinstance(default, (str, int, float)) else ""


def _entry(console: Console, label: Text, text: Text, column: int) -> Iterator[Text]:
    """Yield the lines of an entry: the text beside its label, or below a long label."""
    from rich.text import Text

    inner = console.width - 4
    if inner - column < _MIN_HELP_WIDTH:
        column = 2
    lines = list(text.wrap(console, inner - column, overflow="fold"))
    for line in lines:
        line.plain = line.plain.replace(_NO_BREAK, " ")
    if label.cell_len + 2 <= column:
        first = label.copy()
        first.pad_right(column - label.cell_len)
        yield first + lines.pop(0) if lines else first
    else:
        yield from label.wrap(console, inner, overflow="fold")
    yield from (Text(" " * column) + line for line in lines)


def _print_panel(console: Console, title: str, lines: Iterable[RenderableType]) -> None:
    from rich import box
    from rich.console import Group as Lines
    from rich.panel import Panel

    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    style = box.ROUNDED if is_unicode else box.ASCII
    console.print(
        Panel(Lines(*lines), title=title, title_align="left", box=style, border_style=_DIM)
    )


def _print_examples(console: Console, epilog: str) -> None:
    console.print("\nExamples:", style="bold")
    for line in epilog.splitlines():
        console.print(f"  {line}", soft_wrap=True)
