"""msrl convert-ckpt: conversion between Hugging Face folders and mcore checkpoints."""

from __future__ import annotations

from typing import Annotated

import typer

from msrl.cli.execute import execute
from msrl.cli.help import Command, Group, examples
from msrl.cli.options import CONFIG, DRY_RUN, SETS, VERBOSE, take_arguments, takes

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Convert checkpoints between Hugging Face and Megatron, and verify the result.",
    epilog=examples(
        "msrl convert-ckpt hf2mcore --load Qwen2.5-7B --save mcore --tp 2",
        "msrl convert-ckpt mcore2hf --load runs/grpo/checkpoints --save model",
        "msrl convert-ckpt inspect mcore",
    ),
)


def _add(name: str, summary: str, *lines: str, plan: str | None = None) -> None:
    """Add a conversion with its examples. The module `plan` adds details to a dry run."""

    @app.command(name, cls=Command, help=summary, epilog=examples(*lines))
    @takes(f"convert-ckpt {name}", CONFIG, SETS, DRY_RUN, VERBOSE)
    def convert(ctx: typer.Context) -> None:  # pyright: ignore[reportUnusedFunction]
        execute(ctx, "convert-ckpt", fixed={"convert.command": name}, plan=plan)


_add(
    "hf2mcore",
    "Convert a Hugging Face folder to an mcore checkpoint in any parallel layout.",
    "msrl convert-ckpt hf2mcore --load Qwen2.5-7B --save mcore --tp 2 --pp 2",
    "msrl convert-ckpt hf2mcore --load Qwen2.5-7B --save dist --format dist",
    plan="msrl.workflows.convert.plan",
)
_add(
    "mcore2hf",
    "Convert an mcore checkpoint of any parallel layout to a Hugging Face folder.",
    "msrl convert-ckpt mcore2hf --load runs/grpo/checkpoints --save model",
)
_add(
    "reshard",
    "Change the parallel layout of an mcore checkpoint.",
    "msrl convert-ckpt reshard --load mcore --save mcore-tp4 --tp 4",
    plan="msrl.workflows.convert.plan",
)
_add(
    "hf2hf",
    "Rewrite a Hugging Face folder as safetensors, optionally with a merged LoRA adapter.",
    "msrl convert-ckpt hf2hf --load Qwen2.5-7B --save merged --lora adapter",
)
_add(
    "hf2gguf",
    "Convert a Hugging Face folder to a GGUF file for llama.cpp and Ollama.",
    "msrl convert-ckpt hf2gguf --load runs/grpo/hf --save gguf --dtype q8_0",
)
_add(
    "gguf2hf",
    "Convert a GGUF file of llama.cpp or Ollama to a Hugging Face folder.",
    "msrl convert-ckpt gguf2hf --load model.Q8_0.gguf --save model --dtype bf16",
)
_add(
    "lora2hf",
    "Convert the LoRA adapter of an mcore checkpoint to a PEFT adapter folder.",
    "msrl convert-ckpt lora2hf --load runs/sft/checkpoints --save adapter",
)


@app.command(cls=Command, epilog=examples("msrl convert-ckpt inspect runs/grpo/checkpoints"))
@takes("convert-ckpt inspect", CONFIG, SETS, DRY_RUN, VERBOSE)
def inspect(
    ctx: typer.Context,
    folder: Annotated[
        str | None,
        typer.Argument(
            metavar="DIR",
            help="Checkpoint to inspect: an mcore or Hugging Face folder.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Print the content of a checkpoint, and check that its files are complete."""
    take_arguments(ctx, "convert.load", [] if folder is None else [folder])
    execute(ctx, "convert-ckpt", fixed={"convert.command": "inspect"})
