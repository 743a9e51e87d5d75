"""msrl report: write the report of a run."""

from __future__ import annotations

import typer

from msrl.cli import options as o
from msrl.cli.help import examples
from msrl.limits import require_open_files

EXAMPLES = examples("msrl report runs/sft", "msrl report runs/grpo")


def report(ctx: typer.Context, run: o.RunFolder) -> None:
    """Write report.md and curves.png of a run, which may be running or have ended in any way.

    If all its steps are done, also export the models as its configuration says.
    """
    from pathlib import Path

    from msrl.workflows.report import run as write

    require_open_files()
    write(Path(run))
