"""msrl cluster: start, extend, inspect and stop a Ray cluster for training runs."""

from __future__ import annotations

import importlib

import typer

from msrl.cli import options as o
from msrl.cli.execute import resolve, set_verbosity, show_plan
from msrl.cli.help import Command, Group, examples

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Start, join, inspect and stop a cluster of machines.",
    epilog=examples("msrl cluster up --host 10.0.0.1", "msrl cluster status", "msrl cluster down"),
)


@app.command(
    cls=Command,
    epilog=examples(
        "msrl cluster up --host 10.0.0.1",
        "msrl train-grpo -c grpo.yaml --set cluster.address=10.0.0.1:6344 \\",
        "    --set cluster.nodes=2",
    ),
)
def up(
    ctx: typer.Context,
    host: o.Host = "127.0.0.1",
    port: o.Port = 6344,
    dashboard_host: o.DashboardHost = "127.0.0.1",
    dashboard_port: o.DashboardPort = 8260,
    new_token: o.NewToken = False,
    wait: o.Machines = None,
    devices: o.Devices = None,
    config: o.Files = None,
    sets: o.Sets = None,
    platform: o.Platform = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
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
def join(
    ctx: typer.Context,
    address: o.Address,
    host: o.NodeHost = None,
    devices: o.Devices = None,
    config: o.Files = None,
    sets: o.Sets = None,
    platform: o.Platform = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Add this machine to a cluster.

    It waits for the head for at most cluster.wait_for_nodes_s seconds.
    """
    _run(ctx, "join", address=address, host=host)


@app.command(cls=Command, epilog=examples("msrl cluster status", "msrl cluster status --json"))
def status(
    ctx: typer.Context,
    json: o.Json = False,
    config: o.Files = None,
    sets: o.Sets = None,
    verbose: o.Verbose = False,
) -> None:
    """Show the devices of the cluster and which are in use."""
    _run(ctx, "status", json=json)


@app.command(cls=Command, epilog=examples("msrl cluster down"))
def down(
    ctx: typer.Context,
    force: o.Force = False,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
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
