"""msrl config: show, validate, describe and import configurations."""

from __future__ import annotations

import json as jsonlib
from enum import Enum
from typing import Annotated

import typer

from msrl.cli.execute import resolve, warn, with_hub_files
from msrl.cli.help import Command, Group, examples
from msrl.cli.options import (
    APPROXIMATE,
    CONFIG,
    CONFIG_NAME,
    FOR,
    SETS,
    Json,
    named_command,
    option,
    takes,
)
from msrl.limits import printable


class SystemName(str, Enum):
    """Systems whose files `config import` reads."""

    mindspeed_rl = "mindspeed-rl"
    mindspeed_llm = "mindspeed-llm"
    mindspeed_mm = "mindspeed-mm"
    roll = "roll"
    lightrft = "lightrft"
    verl = "verl"


app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Show, validate, describe and import configurations.",
    epilog=examples(
        "msrl config show -c grpo.yaml",
        "msrl config validate -c grpo.yaml",
        "msrl config schema > msrl.schema.json",
    ),
)


@app.command(
    cls=Command,
    epilog=examples(
        "msrl config show -c grpo.yaml",
        "msrl config show -c grpo.yaml --lr 1e-6 --set algo.preset=dapo",
    ),
)
@takes(CONFIG, CONFIG_NAME, SETS, APPROXIMATE, FOR, "config show")
def show(ctx: typer.Context, json: Json = False) -> None:
    """Print the effective configuration with the origins of values, and derived values."""
    from msrl.checks.validate import guess
    from msrl.config.secrets import recorded
    from msrl.config.show import to_yaml
    from msrl.memory.communication import communication_rows
    from msrl.memory.estimate import memory_rows
    from msrl.memory.routes import route_rows
    from msrl.plan.derived import derived_values
    from msrl.plan.run_plan import resolve as plan_run

    resolved = resolve(ctx)
    target = named_command(ctx) or guess(resolved) or ""
    warn(resolved, target)
    plan = plan_run(resolved.config, target)
    memory = {
        f"bytes of the fullest device, {name}": size for name, size in memory_rows(plan).items()
    }
    rows = {
        **derived_values(resolved.config, target),
        **communication_rows(plan),
        **route_rows(plan),
        **memory,
    }
    if json:
        origins = {key: str(origin) for key, origin in resolved.origins.items()}
        values = recorded(resolved.config)
        report = {"config": values, "origins": origins, "derived": rows}
        typer.echo(jsonlib.dumps(report, indent=2))
        return
    typer.echo(printable(to_yaml(resolved.config, resolved.origins)), nl=False)
    for title, value in rows.items():
        typer.echo(printable(f"# {title}: {value}"))


@app.command(
    cls=Command,
    epilog=examples(
        "msrl config validate -c grpo.yaml", "msrl config validate -c run.yaml --for train-sft"
    ),
)
@takes(CONFIG, CONFIG_NAME, SETS, APPROXIMATE, FOR, "config validate")
def validate(ctx: typer.Context) -> None:
    """Check the configuration as its command would, and report all errors at once."""
    from msrl.checks.validate import check, guess
    from msrl.plan.run_plan import resolve as resolve_plan

    resolved = resolve(ctx)
    target = named_command(ctx) or guess(resolved)
    if target is None:
        typer.echo("the configuration is valid, but it sets no key that a command reads")
        return
    local = with_hub_files(resolved, target).resolved
    check(local, resolve_plan(local.config, target))
    warn(resolved, target)
    typer.echo(f"the configuration is valid for {target}")


@app.command(cls=Command, epilog=examples("msrl config schema > msrl.schema.json"))
def schema() -> None:
    """Print the JSON Schema of all configuration keys, for editors."""
    from msrl.config.schema import Config

    typer.echo(jsonlib.dumps(Config.model_json_schema(), indent=2))


@app.command(
    "import",
    cls=Command,
    context_settings={"ignore_unknown_options": True},
    epilog=examples(
        "msrl config import --from roll rlvr_config.yaml -o grpo.yaml",
        "msrl config import --from mindspeed-llm tune_qwen2.sh -o sft.yaml",
    ),
)
@takes(APPROXIMATE)
def import_(
    ctx: typer.Context,
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|FLAGS...",
            help="YAML file, shell script with its arguments, or the words of a command.",
            show_default=False,
        ),
    ],
    system: Annotated[
        SystemName,
        option(
            "--from",
            metavar="SYSTEM",
            help=f"System that the file or the flags belong to: {', '.join(SystemName)}. Required.",
        ),
    ],
    output: Annotated[
        str | None,
        option(
            "--output", "-o", metavar="FILE", help="YAML file to write. Default: standard output."
        ),
    ] = None,
) -> None:
    """Translate a file or command of another system to a YAML file of msrl.

    A report lists how each key was translated. If the result is not a valid configuration,
    nothing is written and the exit code is 2.
    """
    from pathlib import Path

    from msrl.errors import ManyErrors, MsrlError
    from msrl.files import write_text
    from msrl.importers.command import native_yaml, report, translate_arguments
    from msrl.workflows.import_config import next_commands, validate

    translation = translate_arguments(
        system.value, arguments, approximate=ctx.params["approximate"]
    )
    typer.echo(printable(report(translation)), err=True)
    validation = validate(translation)
    for line in validation.inputs:
        typer.echo(printable(f"before a run: {line}"), err=True)
    if validation.errors:
        last = f"{output or 'the configuration'}: not written, because of the errors above."
        raise MsrlError(f"{ManyErrors(validation.errors)}\n{last}")
    if output is None:
        typer.echo(native_yaml(translation), nl=False)
    else:
        write_text(Path(output), native_yaml(translation))
    for line in next_commands(translation, validation, output):
        typer.echo(printable(f"next: {line}"), err=True)
