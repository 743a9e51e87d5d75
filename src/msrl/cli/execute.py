"""Common steps of all commands: load the configuration, print a plan, run the workflow."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from msrl.cli.options import (
    ANY_COMMAND,
    configured_command,
    named_command,
    set_key,
    take_arguments,
    top_command,
)
from msrl.errors import ManyErrors, MsrlError
from msrl.limits import printable, require_open_files
from msrl.strict_json import loads

if TYPE_CHECKING:
    from msrl.config.hub_names import LocalConfig
    from msrl.config.loader import Flag, InvalidConfigError, Resolved
    from msrl.plan.run_plan import RunPlan

WORKFLOWS = {
    "cluster": "msrl.workflows.cluster",
    "convert-ckpt": "msrl.workflows.convert.run",
    "preprocess": "msrl.workflows.preprocess",
    "train-sft": "msrl.workflows.sft.run",
    "train-dpo": "msrl.workflows.preference.run",
    "train-rm": "msrl.workflows.preference.reward_model",
    "train-grpo": "msrl.workflows.rl.run",
    "train-distill": "msrl.workflows.rl.run",
    "generate": "msrl.workflows.serve.generate",
    "chat": "msrl.workflows.serve.chat",
    "serve": "msrl.workflows.serve.server",
    "eval": "msrl.workflows.evaluate.run",
}
_ENGINE_IN_PROCESS = frozenset({"generate", "chat", "eval"})
_UNKNOWN_LENGTHS = (
    "peak memory of the fullest device, without activations: "
    "set data.seq_length or train.max_tokens_per_micro_batch"
)


def execute(
    ctx: typer.Context,
    command: str,
    *,
    fixed: Mapping[str, object] | None = None,
    plan: str | None = None,
) -> None:
    """Run the workflow of a command, or print its plan under `--dry-run`.

    Args:
        ctx: context of the call, whose options set configuration keys.
        command: command whose checks the configuration must pass.
        fixed: values of keys that the subcommand implies.
        plan: module of `msrl.workflows` whose `show` adds details to the plan.
    """
    set_verbosity(ctx.params.get("verbose", False))
    from msrl.checks.validate import check
    from msrl.config.hub_names import download_weights
    from msrl.plan.run_plan import resolve as resolve_plan

    require_open_files()
    local = with_hub_files(resolve(ctx, fixed or {}), command)
    resolved = local.resolved
    run_plan = resolve_plan(resolved.config, command)
    check(resolved, run_plan)
    show_translations(
        resolved, every_key=bool(ctx.params.get("dry_run") or ctx.params.get("verbose"))
    )
    warn(resolved, command)
    if ctx.params.get("dry_run"):
        from msrl.workflows import preflight

        inputs = preflight.check(run_plan)
        show_plan(resolved, command, run_plan)
        typer.echo(printable(f"inputs: {inputs.summary}"))
        inputs.show()
        if plan is not None and inputs.is_checked:
            importlib.import_module(plan).show(resolved.config)
        return
    download_weights(resolved, local.values)
    if command in _ENGINE_IN_PROCESS:
        _set_library_variables()
    workflow = importlib.import_module(WORKFLOWS[command])
    if run_plan.reads_data:
        from msrl.workflows.row_cache import prepare_rows

        with prepare_rows(run_plan, keep=True) as ready:
            workflow.run(ready if run_plan.is_training else ready.config)
        return
    workflow.run(resolved.config)
    _show_next(resolved, command)


def _set_library_variables() -> None:
    """Set variables that torch reads when it is imported, unless the user has set them."""
    from msrl.platforms.cpu import WAITING_THREADS

    for name, value in WAITING_THREADS.items():
        os.environ.setdefault(name, value)
    if not os.environ.get("MSRL_VERBOSE"):
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _show_next(resolved: Resolved, command: str) -> None:
    """Print the command that continues; a training prints it with its results."""
    from msrl.workflows.next_commands import next_command

    line = next_command(resolved.config, command)
    if line is not None:
        typer.echo(printable(f"next: {line}"))


def name_models(ctx: typer.Context, key: str, *arguments: str | None) -> None:
    """Take models from the arguments. `key` is the key of --model.

    Raises:
        MsrlError: An argument is no model, or a second one where the key takes one.
    """
    from msrl.cli.hints import extra_words

    models = [argument for argument in arguments if argument is not None]
    for argument in models:
        message = extra_words([argument], [], ctx.command.params)
        if "Did you mean" in message and not Path(argument).is_dir():
            raise MsrlError(message)
    take_arguments(ctx, key, models)


def resolve(
    ctx: typer.Context, fixed: Mapping[str, object] | None = None, command: str | None = None
) -> Resolved:
    """Return the configuration of this call, and check it for `command` if there is one.

    Raises:
        ManyErrors: one message per error.
    """
    from msrl.cli.configuration import load_configuration
    from msrl.config.loader import Flag, InvalidConfigError
    from msrl.config.sources import find_by_name

    files: list[str] = [*(ctx.params.get("config") or [])]
    if ctx.params.get("config_name"):
        files.insert(0, find_by_name(ctx.params["config_name"]))
    flags = [
        *key_flags(ctx),
        *(Flag(key, value, ctx.info_name or "") for key, value in (fixed or {}).items()),
    ]
    sets: list[str] = ctx.params.get("sets") or []
    approximate: bool | None = ctx.params.get("approximate")
    try:
        return load_configuration(files, sets, flags, command, approximate=bool(approximate))
    except ManyErrors as error:
        more = _further_errors(ctx, error) if isinstance(error, InvalidConfigError) else []
        messages = list(dict.fromkeys([*error.messages, *more]))
        if approximate is None:  # this command does not have the option that the messages name
            remedy = "`msrl config import --approximate`"
            messages = [line.replace("--approximate", remedy) for line in messages]
        raise ManyErrors(messages) from None


def _further_errors(ctx: typer.Context, error: InvalidConfigError) -> list[str]:
    """Return the errors of checks, so that they are reported with those of single values."""
    from msrl.checks.validate import find_known_errors, find_missing_paths, guess

    if error.valid_part is None:
        return []
    has_target = named_command(ctx) or top_command(ctx) not in ANY_COMMAND
    target = configured_command(ctx) if has_target else guess(error.valid_part)
    if target is None:
        return []
    known = find_known_errors(error.known_part, target) if error.known_part else []
    return [*known, *find_missing_paths(error.valid_part, target)]


def with_hub_files(resolved: Resolved, command: str) -> LocalConfig:
    """Return the configuration with local folders for the models and datasets of a hub.

    Raises:
        ManyErrors: A hub cannot provide one of them. The other errors of the configuration follow.
    """
    from msrl.checks.validate import check
    from msrl.config.hub_names import with_local_folders
    from msrl.plan.run_plan import resolve as resolve_plan

    local = with_local_folders(resolved, command)
    if not local.errors:
        return local
    messages = [*local.errors.values()]
    try:
        check(local.resolved, resolve_plan(local.resolved.config, command))
    except ManyErrors as error:
        named = tuple(resolved.mistake(key, "") for key in local.errors)
        messages += [line for line in error.messages if not line.startswith(named)]
    raise ManyErrors(messages)


def warn(resolved: Resolved, command: str) -> None:
    """Print warnings about settings that are allowed but known to work badly, on standard error."""
    from msrl.checks.algorithm import advice

    for line in advice(resolved, command):
        typer.echo(printable(f"warning: {line}"), err=True)


def key_flags(ctx: typer.Context) -> Iterator[Flag]:
    """Yield a Flag for each option of the call that sets a configuration key."""
    from msrl.config.facts import key_facts
    from msrl.config.loader import Flag

    for parameter in ctx.command.params:
        value: Any = ctx.params.get(parameter.name or "")
        if getattr(parameter, "key", None) is None or value in (None, [], ()):
            continue
        option, key = parameter.opts[0], set_key(parameter, ctx)
        facts = key_facts(key) if key is not None else None
        if key is None or facts is None:
            remedy = "Remove it, or select another command with --for."
            raise MsrlError(f"{option}: {configured_command(ctx)} has no such option. {remedy}")
        _check_encoding(option, value)
        if dict in facts.types:
            value = _mapping(option, value)
        elif {str, tuple[str]} <= facts.types and len(value) == 1:
            value = value[0]
        yield Flag(key, value, option)


def _mapping(option: str, text: str) -> dict[str, Any]:
    """Return the value of an option in JSON. Raises MsrlError when it is not a JSON object."""
    try:
        value = loads(text)
    except json.JSONDecodeError as error:
        raise MsrlError(
            f"{option}: not valid JSON at character {error.pos + 1}: {error.msg}"
        ) from None
    except (ValueError, RecursionError) as error:  # a key twice, or a limit of Python
        raise MsrlError(f"{option}: cannot be read: {str(error).partition(';')[0]}") from None
    if not isinstance(value, dict):
        raise MsrlError(f'{option}={text}: must be a JSON object such as {{"prompt": "question"}}')
    return cast("dict[str, Any]", value)


def _check_encoding(option: str, value: object) -> None:
    """Raise MsrlError for arguments that are not UTF-8, which Python reads as surrogates."""
    for word in cast("list[object]", value) if isinstance(value, list) else [value]:
        try:
            str(word).encode()
        except UnicodeEncodeError:
            raise MsrlError(f"{option}: {word!a} is not UTF-8 text") from None


def set_verbosity(verbose: bool) -> None:
    """Log warnings, or everything, to standard error. Worker processes read MSRL_VERBOSE."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(levelname)s %(name)s: %(message)s",
    )
    if verbose:
        os.environ["MSRL_VERBOSE"] = "1"


def show_translations(resolved: Resolved, *, every_key: bool) -> None:
    """Report on standard error how files of other systems were translated.

    The report has one line per key, or one line per file if `every_key` is False.
    """
    from msrl.importers.report import full, summary
    from msrl.importers.translation import Translation

    for translation in cast("tuple[Translation, ...]", resolved.translations):
        lines = full(translation)
        if not every_key:
            lines = [f"{summary(translation)}. --dry-run lists every key."]
        typer.echo(printable("\n".join(lines)), err=True)


def show_plan(resolved: Resolved, command: str, plan: RunPlan | None = None) -> None:
    """Print all set keys with their origins, and derived values and memory of a planned run."""
    from msrl.config.loader import DEFAULT
    from msrl.config.show import flow

    typer.echo(f"{command}: the configuration is valid, nothing was started")
    for key, origin in resolved.origins.items():
        is_list_item = any(name.isdigit() for name in key.split("."))
        if origin != DEFAULT and not is_list_item:
            typer.echo(printable(f"  {key}: {flow(resolved.shown(key))}  # {origin}"))
    if plan is not None:
        _show_derived(plan)


def _show_derived(plan: RunPlan) -> None:
    """Print derived values and the memory estimate."""
    from msrl.memory.communication import communication_rows
    from msrl.memory.estimate import memory_rows, table
    from msrl.memory.routes import route_rows
    from msrl.plan.derived import derived_values

    rows = {
        **derived_values(plan.config, plan.command),
        **communication_rows(plan),
        **route_rows(plan),
    }
    if rows:
        typer.echo("derived values")
    for name, value in rows.items():
        text = f"{value:,}" if isinstance(value, int) else str(value)
        typer.echo(printable(f"  {name}: {text}"))
    memory = memory_rows(plan)
    if memory:
        has_lengths = "activations" in memory
        typer.echo("peak memory of the fullest device" if has_lengths else _UNKNOWN_LENGTHS)
    for line in table(memory):
        typer.echo(f"  {line}")
