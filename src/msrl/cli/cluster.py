"""msrl cluster: the machines that a training is spread over."""

from __future__ import annotations

import importlib

import typer

from msrl.cli import options as o
from msrl.cli.execute import resolve, show_plan, verbosity

app = typer.Typer(no_args_is_help=True, help="Start, join, look at and end a cluster of machines.")


@app.command()
def up(
    ctx: typer.Context,
    host: o.Host = "127.0.0.1",
    port: o.Port = 6344,
    dashboard_host: o.DashboardHost = "127.0.0.1",
    dashboard_port: o.DashboardPort = 8260,
    devices: o.Devices = None,
    config: o.Files = None,
    sets: o.Sets = None,
    platform: o.Platform = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Start a cluster here, and print how others join it."""
    _run(ctx, "up", host=host, port=port, dashboard_host=dashboard_host, dashboard_port=dashboard_port)


@app.command()
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
    """Add this machine to a cluster."""
    _run(ctx, "join", address=address, host=host)


@app.command()
def status(ctx: typer.Context, json: o.Json = False, config: o.Files = None, sets: o.Sets = None, verbose: o.Verbose = False) -> None:
    """What the cluster has and what is in use."""
    _run(ctx, "status", json=json)


@app.command()
def down(ctx: typer.Context, dry_run: o.DryRun = False, verbose: o.Verbose = False) -> None:
    """End what `up` and `join` started here, nothing else."""
    _run(ctx, "down")


def _run(ctx: typer.Context, action: str, **arguments: object) -> None:
    """Calls `msrl.workflows.cluster.<action>`; platform and devices reach it in the configuration, the rest as arguments."""
    verbosity(ctx.params.get("verbose", False))
    for name in arguments:
        ctx.params.pop(name, None)
    resolved = resolve(ctx, "cluster", {}, "cluster")
    if ctx.params.get("dry_run"):
        show_plan(resolved, "cluster " + " ".join([action, *(f"--{name.replace('_', '-')} {value}" for name, value in arguments.items())]))
        return
    getattr(importlib.import_module("msrl.workflows.cluster"), action)(resolved.config, **arguments)
