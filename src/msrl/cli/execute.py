"""What every command does: merge files, `--set` and flags into one configuration, check it, show the plan or run the workflow."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, cast

import typer

from msrl.errors import MsrlError

if TYPE_CHECKING:
    from msrl.config.loader import Flag, Resolved

WORKFLOWS = {
    "cluster": "msrl.workflows.cluster",
    "convert-ckpt": "msrl.workflows.convert.run",
    "preprocess": "msrl.workflows.preprocess",
    "train-sft": "msrl.workflows.sft.run",
    "train-grpo": "msrl.workflows.rl.run",
    "generate": "msrl.workflows.serve.generate",
    "chat": "msrl.workflows.serve.chat",
}
_COMMON = ("config", "config_name", "sets", "dry_run", "verbose")
_KEYS = {
    "platform": "cluster.platform",
    "resume": "checkpoint.resume",
    "devices": "cluster.devices_per_node",
}


_UNKNOWN_LENGTHS = "memory of the fullest device, without activations: set data.seq_length or train.max_tokens_per_micro_batch"


def execute(
    ctx: typer.Context, command: str, *, section: str = "", fixed: Mapping[str, object] | None = None, plan: str | None = None
) -> None:
    """Runs `msrl.workflows.<command>` on the configuration of this call, or prints its plan under `--dry-run`.

    A parameter of the command overlays the key of its name in `section`; `fixed` are further keys that the subcommand stands for. `plan` is
    the module of `msrl.workflows` whose `show` prints what more is known before the work.
    """
    verbosity(ctx.params.get("verbose", False))
    resolved = resolve(ctx, section, fixed or {}, command)
    show_translations(resolved, every_key=bool(ctx.params.get("dry_run") or ctx.params.get("verbose")))
    advise(resolved, command)
    if ctx.params.get("dry_run"):
        show_plan(resolved, command)
        if plan is not None:
            importlib.import_module(plan).show(resolved.config)
        return
    importlib.import_module(WORKFLOWS[command]).run(resolved.config)


def resolve(ctx: typer.Context, section: str, fixed: Mapping[str, object], command: str | None) -> Resolved:
    """The configuration of this call, checked for `command` if one is given. Raises ManyErrors with all mistakes."""
    from msrl.cli.configuration import load_configuration
    from msrl.config.loader import Flag
    from msrl.config.sources import named

    files: list[str] = [*(ctx.params.get("config") or [])]
    if ctx.params.get("config_name"):
        files.insert(0, named(ctx.params["config_name"]))
    flags = [*_flags(ctx, section), *(Flag(key, value, ctx.info_name or "") for key, value in fixed.items())]
    return load_configuration(files, ctx.params.get("sets") or [], flags, command)


def advise(resolved: Resolved, command: str) -> None:
    """Says on standard error what is allowed and known to go badly."""
    from msrl.checks.algorithm import advice

    for line in advice(resolved, command):
        typer.echo(f"warning: {line}", err=True)


def _flags(ctx: typer.Context, section: str) -> Iterator[Flag]:
    """A Flag for each option that the user gave."""
    from msrl.config.loader import Flag

    for parameter in ctx.command.params:
        name = parameter.name or ""
        value = _plain(ctx.params.get(name))
        if value is not None and name not in _COMMON:
            option = parameter.opts[0] if parameter.opts[0].startswith("-") else (parameter.metavar or name)
            _refuse_bytes(option, value)
            yield Flag(_KEYS.get(name, f"{section}.{name}"), value, option)


def _refuse_bytes(option: str, value: object) -> None:
    """Raises MsrlError for words of the command line that are no UTF-8: Python has their bytes as halves of surrogate pairs."""
    for word in cast("list[object]", value) if isinstance(value, list) else [value]:
        try:
            str(word).encode()
        except UnicodeEncodeError:
            raise MsrlError(f"{option}: {word!a} is not UTF-8 text") from None


def _plain(value: Any) -> object:
    """An option's value without click's wrapping; None for one that was not given (an empty list included)."""
    if isinstance(value, Enum):
        return value.value
    return None if value == [] or value == () else value


def verbosity(verbose: bool) -> None:
    """Logs go to standard error: warnings, or everything. Worker processes see MSRL_VERBOSE."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    if verbose:
        os.environ["MSRL_VERBOSE"] = "1"


def show_translations(resolved: Resolved, *, every_key: bool) -> None:
    """Says on standard error how files of other systems were read: what became of every key, or how many keys met which fate."""
    from msrl.importers.report import full, summary
    from msrl.importers.translation import Translation

    for translation in cast("tuple[Translation, ...]", resolved.translations):
        lines = full(translation) if every_key else [f"{summary(translation)}; --dry-run names each"]
        typer.echo("\n".join(lines), err=True)


def show_plan(resolved: Resolved, command: str) -> None:
    """Prints what is set, where, and what follows from it."""
    from msrl.config.loader import DEFAULT
    from msrl.config.show import flow
    from msrl.memory.estimate import memory_rows, table
    from msrl.plan.derived import derived

    typer.echo(f"{command}: the configuration is right; nothing was started")
    for key, origin in resolved.origins.items():
        if origin != DEFAULT and not any(part.isdigit() for part in key.split(".")):
            typer.echo(f"  {key}: {flow(resolved.value(key))}  # {origin}")
    rows = derived(resolved.config, command)
    if rows:
        typer.echo("from which follows")
    for name, value in rows.items():
        typer.echo(f"  {name}: {value:,}" if isinstance(value, int) else f"  {name}: {value}")
    memory = memory_rows(resolved.config, command)
    if memory:
        typer.echo("memory of the fullest device, at most" if "activations" in memory else _UNKNOWN_LENGTHS)
    for line in table(memory):
        typer.echo(f"  {line}")
