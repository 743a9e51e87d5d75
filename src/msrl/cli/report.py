"""msrl report and msrl view: the report of a run, and pages about runs in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from msrl.cli.help import examples
from msrl.cli.options import option
from msrl.errors import MsrlError
from msrl.limits import require_open_files

REPORT_EXAMPLES = examples("msrl report runs/sft", "msrl report runs/grpo")
VIEW_EXAMPLES = examples(
    "msrl view runs/grpo",
    "msrl view runs/grpo runs/dapo --output compared",
    "msrl view runs/grpo --serve",
    "msrl view runs/grpo --single-file --output grpo.html",
)


def report(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="Folder of a run, such as runs/sft.", show_default=False
        ),
    ],
) -> None:
    """Write report.md and curves.png of a run, which may be running or have ended in any way.

    The report of a training from recorded rollouts compares it with the recorded run. If all steps
    are done, also export the models as the configuration says.
    """
    from pathlib import Path

    from msrl.workflows.report import run as write

    require_open_files()
    write(Path(run))


def view(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="Folders of runs, such as runs/grpo.", show_default=False
        ),
    ],
    output: Annotated[
        str | None,
        option(
            "--output",
            metavar="PATH",
            help="Folder or, with --single-file, file to write. "
            "Default: view or view.html in the folder of the first run.",
        ),
    ] = None,
    single_file: Annotated[
        bool, option("--single-file", help="Write one HTML file, for small runs.")
    ] = False,
    serve: Annotated[
        bool,
        option(
            "--serve",
            help="Serve the pages on 127.0.0.1 and update them while the runs continue, until "
            "Ctrl-C.",
        ),
    ] = False,
    port: Annotated[
        int,
        option(
            "--port", metavar="N", min=0, max=65535, help="Port of --serve. 0 selects a free one."
        ),
    ] = 0,
    no_token: Annotated[
        bool, option("--no-token", help="Let all users of this machine open the pages of --serve.")
    ] = False,
) -> None:
    """Write pages about runs for a browser: curves, steps, rollouts, tokens and evaluations.

    The pages open from disk, need no network, and can be copied to another machine.
    """
    from pathlib import Path

    from msrl.workflows.view.build import View, write_folder, write_single_file
    from msrl.workflows.view.serve import serve as serve_view

    if single_file and serve:
        raise MsrlError("--single-file and --serve exclude each other. Leave one of them out.")
    require_open_files()
    folders = [Path(run) for run in runs]
    default = folders[0] / ("view.html" if single_file else "view")
    target = Path(output) if output is not None else default
    if single_file:
        print(write_single_file(folders, target))
    elif serve:
        serve_view(View(folders, target, is_live=True), port, has_token=not no_token)
    else:
        print(write_folder(folders, target))
