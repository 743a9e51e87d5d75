"""msrl diagnose: causes of a mismatch between sampling and training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from msrl.cli.help import Command, Group, examples
from msrl.cli.options import SETS, VERBOSE, Json, takes
from msrl.errors import MsrlError
from msrl.limits import printable, require_open_files

if TYPE_CHECKING:
    from msrl.config.loader import Flag
    from msrl.config.schema import Config

_CONFIG = "config.yaml"  # of a run
# One model replica on this machine reproduces what many of them compute.
_ONE_REPLICA = ("cluster.address=null", "cluster.nodes=1", "cluster.devices_per_node=null")

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Find out why sampling and training disagree.",
    epilog=examples("msrl diagnose mismatch runs/grpo"),
)


@app.callback()
def diagnose() -> None:
    """Find out why sampling and training disagree."""


@app.command(
    cls=Command,
    epilog=examples(
        "msrl diagnose mismatch runs/grpo",
        "msrl diagnose mismatch model --set model.dtype=float32 \\",
        "    --set rollout.sampling.top_p=0.9",
        "msrl diagnose mismatch model --template qwen --json",
    ),
)
@takes(SETS, "diagnose mismatch", VERBOSE)
def mismatch(
    ctx: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|RUN",
            help="Hugging Face folder, mcore checkpoint, or folder of a run, such as runs/grpo.",
            show_default=False,
        ),
    ],
    json: Json = False,
) -> None:
    """Score sampled tokens with engine, trainer and transformers; name the cause of differences.

    Exit with 0 for a healthy model, and with 1 for a cause.
    """
    from msrl.cli.execute import key_flags, set_verbosity
    from msrl.workflows.diagnose import report
    from msrl.workflows.diagnose.run import run

    set_verbosity(ctx.params["verbose"])
    require_open_files()
    folder = Path(target)
    is_run = (folder / _CONFIG).is_file()
    config = _config(folder, is_run=is_run, sets=ctx.params["sets"] or [], flags=[*key_flags(ctx)])
    verdict, evidence = run(config, folder if is_run else None)
    if json:
        typer.echo(report.as_json(verdict, evidence))
    else:
        typer.echo(printable(report.as_text(verdict, evidence)))
    if verdict.cause is not None:
        raise typer.Exit(1)


def _config(folder: Path, *, is_run: bool, sets: list[str], flags: list[Flag]) -> Config:
    """Return the configuration of the run, or the defaults with the model.

    Raises:
        MsrlError: The folder does not exist, or a setting is invalid.
    """
    from msrl.cli.configuration import load_configuration
    from msrl.config.loader import Flag

    if not folder.is_dir():
        raise MsrlError(f"{folder}: no such folder. Name a model or a run, as in runs/grpo.")
    if is_run and any(flag.key == "model.template" for flag in flags):
        raise MsrlError("--template: a run has the template of its data. Remove the option.")
    if is_run:
        return load_configuration([str(folder / _CONFIG)], [*_ONE_REPLICA, *sets], flags).config
    model = Flag("model.path", str(folder), "MODEL")
    return load_configuration((), [*_ONE_REPLICA, *sets], [*flags, model]).config
