"""msrl config: what is in force, whether it is right, and what there is to set."""

from __future__ import annotations

import json as jsonlib
from typing import TYPE_CHECKING

import typer

from msrl.cli import options as o
from msrl.cli.execute import advise, resolve

if TYPE_CHECKING:
    from msrl.config.loader import Resolved

app = typer.Typer(no_args_is_help=True, help="Show, check and describe the configuration.")


@app.command()
def show(
    ctx: typer.Context,
    config: o.Files = None,
    config_name: o.ConfigName = None,
    sets: o.Sets = None,
    command: o.For = None,
    platform: o.Platform = None,
    json: o.Json = False,
) -> None:
    """Print every value in force and where it came from. What follows from them is added."""
    from msrl.checks.validate import guess
    from msrl.config.show import to_yaml
    from msrl.memory.estimate import memory_rows
    from msrl.plan.derived import derived

    resolved = _resolved(ctx)
    name = command.value if command else guess(resolved) or ""
    advise(resolved, name)
    memory = {f"bytes of the fullest device, {part}": size for part, size in memory_rows(resolved.config, name).items()}
    rows = {**derived(resolved.config, name), **memory}
    if json:
        origins = {key: str(origin) for key, origin in resolved.origins.items()}
        typer.echo(jsonlib.dumps({"config": resolved.config.model_dump(mode="json"), "origins": origins, "derived": rows}, indent=2))
        return
    typer.echo(to_yaml(resolved.config, resolved.origins), nl=False)
    for name, value in rows.items():
        typer.echo(f"# {name}: {value}")


@app.command()
def validate(
    ctx: typer.Context,
    config: o.Files = None,
    config_name: o.ConfigName = None,
    sets: o.Sets = None,
    command: o.For = None,
    platform: o.Platform = None,
) -> None:
    """Check as a command would, and name all mistakes at once."""
    from msrl.checks.validate import check, guess

    resolved = _resolved(ctx)
    name = command.value if command else guess(resolved)
    if name is not None:
        check(resolved, name)
        advise(resolved, name)
    typer.echo(f"the configuration is right{f' for {name}' if name else '; no command would read it'}")


@app.command()
def schema() -> None:
    """Print the JSON Schema of all keys, for editors."""
    from msrl.config.schema import Config

    typer.echo(jsonlib.dumps(Config.model_json_schema(), indent=2))


@app.command("import", context_settings={"ignore_unknown_options": True})
def import_(arguments: o.Foreign, system: o.From, output: o.NativeFile = None) -> None:
    """Write another system's file or command as msrl's own YAML. What became of every key is said."""
    from pathlib import Path

    from msrl.files import write_text
    from msrl.importers.command import native_yaml, report, translation_of

    translation = translation_of(system.value, arguments)
    typer.echo(report(translation), err=True)
    if output is None:
        typer.echo(native_yaml(translation), nl=False)
    else:
        write_text(Path(output), native_yaml(translation))


def _resolved(ctx: typer.Context) -> Resolved:
    for name in ("command", "json"):
        ctx.params.pop(name, None)
    return resolve(ctx, "", {}, None)
