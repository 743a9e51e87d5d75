"""msrl serve."""

from __future__ import annotations

import typer

from msrl.cli import options as o
from msrl.cli.execute import execute, name_model
from msrl.cli.help import examples

EXAMPLES = examples(
    "msrl serve runs/grpo/checkpoints",
    "msrl serve model --tp 2 --port 9000 --lora math=runs/sft/checkpoints",
    "msrl serve model --host 0.0.0.0 --api-key-file key.txt",
)


def serve(
    ctx: typer.Context,
    model_argument: o.ModelArgument = None,
    model: o.ServedModel = None,
    tp: o.EngineTp = None,
    name: o.ServedName = None,
    template: o.ChatTemplate = None,
    date: o.Date = None,
    tools: o.ToolParser = None,
    lora: o.Adapters = None,
    dtype: o.ComputeDtype = None,
    cache: o.ModelCache = None,
    host: o.ServerHost = None,
    port: o.ServerPort = None,
    api_key_file: o.ApiKeyFile = None,
    config: o.Files = None,
    sets: o.Sets = None,
    platform: o.Platform = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Serve a model with vLLM's OpenAI-compatible server. Ctrl-C stops it."""
    name_model(ctx)
    execute(ctx, "serve")
