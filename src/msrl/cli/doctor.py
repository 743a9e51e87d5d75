"""msrl doctor: what this machine has, what does not fit together, how to mend it."""

from __future__ import annotations

import json as jsonlib

import typer

from msrl.cli import options as o
from msrl.cli.execute import resolve
from msrl.errors import ManyErrors, MsrlError


def doctor(
    ctx: typer.Context,
    config: o.Files = None,
    config_name: o.ConfigName = None,
    sets: o.Sets = None,
    command: o.For = None,
    platform: o.Platform = None,
    imports: o.Imports = True,
    json: o.Json = False,
) -> None:
    """Look at the machine and, with -c, at a run on it. All findings come at once; exit code 2 if something is wrong."""
    from msrl.workflows import doctor as workflow

    for name in ("command", "json", "imports"):
        ctx.params.pop(name, None)
    mistakes: tuple[str, ...] = ()
    resolved = None
    try:
        resolved = resolve(ctx, "", {}, None)
    except ManyErrors as error:
        mistakes = error.messages
    except MsrlError as error:
        mistakes = (str(error),)
    wanted = platform.value if platform else resolved.config.cluster.platform if resolved else "auto"
    given = resolved if config or config_name or sets else None
    findings = workflow.run(wanted, resolved=given, mistakes=mistakes, command=command.value if command else None, imports=imports)
    if json:
        typer.echo(jsonlib.dumps([{"level": one.level, "what": one.what, "text": one.text} for one in findings], indent=2))
    else:
        typer.echo("\n".join(map(str, findings)))
    if any(one.level == "wrong" for one in findings):
        raise typer.Exit(2)
