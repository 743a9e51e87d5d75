"""msrl convert-ckpt: between Hugging Face folders and mcore checkpoints."""

from __future__ import annotations

import typer

from msrl.cli import options as o
from msrl.cli.execute import execute
from msrl.errors import MsrlError

app = typer.Typer(no_args_is_help=True, help="Convert between Hugging Face and Megatron, and prove it.")


@app.command()
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
    layout: o.Layout = None,
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
    """Hugging Face folder to mcore checkpoint. Cut for tensor, pipeline (virtual, uneven, with empty layers) and expert parallelism."""
    execute(ctx, "convert-ckpt", section="convert", fixed={"convert.command": "hf2mcore"}, plan="msrl.workflows.convert.plan")


@app.command()
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
    """mcore checkpoint of any cut to Hugging Face folder."""
    execute(ctx, "convert-ckpt", section="convert", fixed={"convert.command": "mcore2hf"})


@app.command()
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
    layout: o.Layout = None,
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
    """mcore checkpoint to another cut of the same."""
    execute(ctx, "convert-ckpt", section="convert", fixed={"convert.command": "reshard"}, plan="msrl.workflows.convert.plan")


@app.command()
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
    """Rewrite a Hugging Face folder. A LoRA adapter is merged, the type changed, torch's own files become safetensors."""
    execute(ctx, "convert-ckpt", section="convert", fixed={"convert.command": "hf2hf"})


@app.command()
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
    """LoRA adapter of an mcore checkpoint to a PEFT adapter folder."""
    execute(ctx, "convert-ckpt", section="convert", fixed={"convert.command": "lora2hf"})


@app.command()
def inspect(
    ctx: typer.Context,
    folder: o.InspectDir = None,
    load: o.Load = None,
    config: o.Files = None,
    sets: o.Sets = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """What a checkpoint holds, and whether its files are whole."""
    if folder is not None and load is not None:
        raise MsrlError(f"inspect {folder} --load {load}: name the checkpoint once")
    ctx.params.pop("folder")
    named = {"convert.load": folder} if folder is not None else {}
    execute(ctx, "convert-ckpt", section="convert", fixed={"convert.command": "inspect", **named})
