"""msrl doctor: check this machine and optionally a configuration."""

from __future__ import annotations

import json as jsonlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from msrl.cli.execute import resolve
from msrl.cli.help import examples
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
from msrl.errors import ManyErrors, MsrlError
from msrl.limits import printable

if TYPE_CHECKING:
    from msrl.config.loader import Resolved

EXAMPLES = examples(
    "msrl doctor",
    "msrl doctor -c grpo.yaml --for train-grpo",
    "msrl doctor --measure --write machine.yaml",
)


@takes(CONFIG, CONFIG_NAME, SETS, APPROXIMATE, FOR, "doctor")
def doctor(
    ctx: typer.Context,
    imports: Annotated[
        bool,
        option(
            "--imports/--no-imports",
            help="Import every library in a separate process. Default: --imports.",
        ),
    ] = True,
    json: Json = False,
    measure: Annotated[
        bool,
        option(
            "--measure",
            help="Measure the devices in place of the checks, which takes minutes, and print their "
            "profile for msrl plan.",
        ),
    ] = False,
    write: Annotated[
        str | None,
        option("--write", metavar="FILE", help="YAML file to write the profile of --measure to."),
    ] = None,
) -> None:
    """Check this machine and, with -c, if a run would work on it. Exit with 2 if not."""
    from msrl.workflows import doctor as workflow

    resolved, mistakes = _resolved(ctx)
    if measure:
        if mistakes:
            raise ManyErrors(mistakes)
        _measure(_platform(ctx.params["platform"], resolved), write)
        return
    if write is not None:
        raise MsrlError(f"--write={write}: needs --measure, whose profile it writes")
    is_configured = any(ctx.params[shared.name] for shared in (CONFIG, CONFIG_NAME, SETS))
    findings = workflow.run(
        _platform(ctx.params["platform"], resolved),
        resolved=resolved if is_configured else None,
        mistakes=mistakes,
        command=named_command(ctx),
        imports=imports,
    )
    if json:
        rows = [{"level": row.level, "what": row.what, "text": row.text} for row in findings]
        typer.echo(jsonlib.dumps(rows, indent=2))
    else:
        typer.echo(printable("\n".join(map(str, findings))))
    if any(finding.level == "wrong" for finding in findings):
        raise typer.Exit(2)


def _measure(platform: str, write: str | None) -> None:
    """Measure this machine; print its profile or write it to a new file."""
    import yaml

    from msrl.files import write_text
    from msrl.platforms import resolve as resolve_platform
    from msrl.workflows.measure.run import measure

    if write is not None and Path(write).exists():
        raise MsrlError(f"--write={write}: exists already. Name another file.")
    profile = measure(resolve_platform(platform)).model_dump(mode="json", exclude_none=True)
    text = yaml.safe_dump(profile, sort_keys=False, default_flow_style=None)
    if write is None:
        typer.echo(printable(text), nl=False)
        return
    write_text(Path(write), text)
    typer.echo(printable(f"next: msrl plan -c CONFIG.yaml --profile {shlex.quote(write)}"))


def _resolved(ctx: typer.Context) -> tuple[Resolved | None, tuple[str, ...]]:
    """Return the configuration of this call, or None and its error messages."""
    try:
        return resolve(ctx), ()
    except ManyErrors as error:
        return None, error.messages
    except MsrlError as error:
        return None, (str(error),)


def _platform(option: str | None, resolved: Resolved | None) -> str:
    """Return the platform to check: that of the option, else of the configuration.

    An unknown platform is reported with the other errors of the configuration.
    """
    from msrl.config.facts import key_facts

    facts = key_facts("cluster.platform")
    if option is not None and facts is not None and option in facts.choices:
        return option
    return resolved.config.cluster.platform if resolved is not None else "auto"
