"""msrl cluster: start, extend, inspect and stop a Ray cluster for training runs."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Annotated

import typer

from msrl.cli.execute import resolve, set_verbosity, show_plan
from msrl.cli.help import Command, Group, examples
from msrl.cli.options import CONFIG, DRY_RUN, NETWORK, SETS, VERBOSE, Json, option, takes

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Start, join, inspect and stop a cluster of machines.",
    epilog=examples("msrl cluster up --host 10.0.0.1", "msrl cluster status", "msrl cluster down"),
)


_port = partial(option, metavar="N", min=1, max=65535, panel=NETWORK)
_host = partial(option, metavar="HOST", panel=NETWORK)
_OWN_HOST = "Address of this machine for the other machines."
_NEW_TOKEN = "Replace the token of earlier clusters. Copy it to the other machines again."
_WAIT = (
    "Wait until N machines, this one included, have joined, for at most "
    "cluster.wait_for_nodes_s seconds. Default: do not wait."
)


@app.command(
    cls=Command,
    epilog=examples(
        "msrl cluster up --host 10.0.0.1",
        "msrl train-grpo -c grpo.yaml --set cluster.address=10.0.0.1:6344 \\",
        "    --set cluster.nodes=2",
    ),
)
@takes("cluster up", CONFIG, SETS, DRY_RUN, VERBOSE)
def up(
    ctx: typer.Context,
    host: Annotated[str, _host("--host", help=_OWN_HOST)] = "127.0.0.1",
    port: Annotated[int, _port("--port", help="Port for nodes and runs, from 1 to 65535.")] = 6344,
    dashboard_host: Annotated[
        str, _host("--dashboard-host", help="Address that the dashboard listens on.")
    ] = "127.0.0.1",
    dashboard_port: Annotated[
        int, _port("--dashboard-port", help="Port of the dashboard, from 1 to 65535.")
    ] = 8260,
    new_token: Annotated[bool, option("--new-token", panel=NETWORK, help=_NEW_TOKEN)] = False,
    wait: Annotated[
        int | None, option("--wait", metavar="N", min=1, panel=NETWORK, help=_WAIT)
    ] = None,
) -> None:
    """Start a cluster on this machine and print the command that joins others to it."""
    _run(
        ctx,
        "up",
        host=host,
        port=port,
        dashboard_host=dashboard_host,
        dashboard_port=dashboard_port,
        new_token=new_token,
        wait=wait,
    )


@app.command(
    cls=Command,
    epilog=examples(
        "msrl cluster join 10.0.0.1:6344", "msrl cluster join 10.0.0.1:6344 --devices 4"
    ),
)
@takes("cluster join", CONFIG, SETS, DRY_RUN, VERBOSE)
def join(
    ctx: typer.Context,
    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT", help="Address that `msrl cluster up` printed.", show_default=False
        ),
    ],
    host: Annotated[
        str | None,
        _host("--host", help=f"{_OWN_HOST} Default: the one that reaches the head node."),
    ] = None,
) -> None:
    """Add this machine to a cluster.

    It waits for the head for at most cluster.wait_for_nodes_s seconds.
    """
    _run(ctx, "join", address=address, host=host)


@app.command(cls=Command, epilog=examples("msrl cluster status", "msrl cluster status --json"))
@takes(CONFIG, SETS, VERBOSE)
def status(ctx: typer.Context, json: Json = False) -> None:
    """Show the devices of the cluster and which are in use."""
    _run(ctx, "status", json=json)


@app.command(cls=Command, epilog=examples("msrl cluster down"))
@takes(DRY_RUN, VERBOSE)
def down(
    ctx: typer.Context,
    force: Annotated[
        bool, option("--force", help="Do not ask, even if a run uses the devices.")
    ] = False,
) -> None:
    """Stop what `up` and `join` started on this machine, and nothing else.

    It asks first if a run uses the devices.
    """
    _run(ctx, "down", force=force)


def _run(ctx: typer.Context, action: str, **arguments: object) -> None:
    """Call `msrl.workflows.cluster.<action>` with the configuration and the options.

    The options --platform and --devices are part of the configuration.
    """
    set_verbosity(ctx.params.get("verbose", False))
    resolved = resolve(ctx, command="cluster")
    workflow = importlib.import_module("msrl.workflows.cluster")
    if ctx.params.get("dry_run"):
        workflow.check(resolved.config, action, **arguments)
        options = (
            f"--{name.replace('_', '-')} {value}"
            for name, value in arguments.items()
            if value is not None
        )
        show_plan(resolved, " ".join(["cluster", action, *options]))
        return
    getattr(workflow, action)(resolved.config, **arguments)
