"""msrl convert-ckpt: conversion between Hugging Face folders and mcore checkpoints."""

from __future__ import annotations

import typer

from msrl.cli import options as o
from msrl.cli.execute import execute
from msrl.cli.help import Command, Group, examples
from msrl.errors import MsrlError

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


@app.command(
    cls=Command,
    epilog=examples(
        "msrl convert-ckpt hf2mcore --load Qwen2.5-7B --save mcore --tp 2 --pp 2",
        "msrl convert-ckpt hf2mcore --load Qwen2.5-7B --save dist --format dist",
    ),
)
def hf2mcore(
    ctx: typer.Context,
    load: o.Load = None,
    save: o.Save = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    vpp: o.Vpp = None,
    num_layer_list: o.LayerList = None,
    noop_layers: o.NoopLayers = None,
    ep: o.Ep = None,
    etp: o.Etp = None,
    moe_grouped_gemm: o.GroupedGemm = None,
    moe_tp_extend_ep: o.TpExtendEp = None,
    dtype: o.Dtype = None,
    format: o.CheckpointFormat = None,
    names: o.Names = None,
    pad_vocab_to_multiple: o.PadVocab = None,
    lora: o.Lora = None,
    orm: o.Orm = None,
    verify: o.Verify = None,
    config: o.Files = None,
    sets: o.Sets = None,
    platform: o.Platform = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Convert a Hugging Face folder to an mcore checkpoint in any parallel layout."""
    execute(
        ctx,
        "convert-ckpt",
        fixed={"convert.command": "hf2mcore"},
        plan="msrl.workflows.convert.plan",
    )


@app.command(
    cls=Command,
    epilog=examples("msrl convert-ckpt mcore2hf --load runs/grpo/checkpoints --save model"),
)
def mcore2hf(
    ctx: typer.Context,
    load: o.Load = None,
    save: o.Save = None,
    hf_config: o.HfConfig = None,
    dtype: o.Dtype = None,
    lora: o.Lora = None,
    orm: o.Orm = None,
    verify: o.Verify = None,
    config: o.Files = None,
    sets: o.Sets = None,
    platform: o.Platform = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Convert an mcore checkpoint of any parallel layout to a Hugging Face folder."""
    execute(ctx, "convert-ckpt", fixed={"convert.command": "mcore2hf"})


@app.command(
    cls=Command, epilog=examples("msrl convert-ckpt reshard --load mcore --save mcore-tp4 --tp 4")
)
def reshard(
    ctx: typer.Context,
    load: o.Load = None,
    save: o.Save = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    vpp: o.Vpp = None,
    num_layer_list: o.LayerList = None,
    noop_layers: o.NoopLayers = None,
    ep: o.Ep = None,
    etp: o.Etp = None,
    moe_grouped_gemm: o.GroupedGemm = None,
    moe_tp_extend_ep: o.TpExtendEp = None,
    hf_config: o.HfConfig = None,
    dtype: o.Dtype = None,
    format: o.CheckpointFormat = None,
    names: o.Names = None,
    pad_vocab_to_multiple: o.PadVocab = None,
    lora: o.Lora = None,
    orm: o.Orm = None,
    verify: o.Verify = None,
    config: o.Files = None,
    sets: o.Sets = None,
    platform: o.Platform = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Convert an mcore checkpoint to another parallel layout."""
    execute(
        ctx,
        "convert-ckpt",
        fixed={"convert.command": "reshard"},
        plan="msrl.workflows.convert.plan",
    )


@app.command(
    cls=Command,
    epilog=examples("msrl convert-ckpt hf2hf --load Qwen2.5-7B --save merged --lora adapter"),
)
def hf2hf(
    ctx: typer.Context,
    load: o.Load = None,
    save: o.Save = None,
    dtype: o.Dtype = None,
    lora: o.Lora = None,
    orm: o.Orm = None,
    verify: o.Verify = None,
    config: o.Files = None,
    sets: o.Sets = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Rewrite a Hugging Face folder as safetensors, optionally with a merged LoRA adapter."""
    execute(ctx, "convert-ckpt", fixed={"convert.command": "hf2hf"})


@app.command(
    cls=Command,
    epilog=examples("msrl convert-ckpt lora2hf --load runs/sft/checkpoints --save adapter"),
)
def lora2hf(
    ctx: typer.Context,
    load: o.Load = None,
    save: o.Save = None,
    hf_config: o.HfConfig = None,
    config: o.Files = None,
    sets: o.Sets = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Convert the LoRA adapter of an mcore checkpoint to a PEFT adapter folder."""
    execute(ctx, "convert-ckpt", fixed={"convert.command": "lora2hf"})


@app.command(cls=Command, epilog=examples("msrl convert-ckpt inspect runs/grpo/checkpoints"))
def inspect(
    ctx: typer.Context,
    folder: o.InspectDir = None,
    load: o.Load = None,
    config: o.Files = None,
    sets: o.Sets = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Print the content of a checkpoint, and check that its files are complete."""
    if folder is not None and load is not None:
        raise MsrlError(
            f"--load={load}: the checkpoint {folder} is already named. Name one of them."
        )
    source = {} if folder is None else {"convert.load": folder}
    execute(ctx, "convert-ckpt", fixed={"convert.command": "inspect", **source})
