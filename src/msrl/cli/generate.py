"""msrl generate and msrl chat."""

from __future__ import annotations

import typer

from msrl.cli import options as o
from msrl.cli.execute import execute


def generate(
    ctx: typer.Context,
    model: o.Model = None,
    prompt: o.PromptText = None,
    input: o.InputFile = None,
    output: o.OutputFile = None,
    engine: o.Engine = None,
    template: o.Template = None,
    system: o.System = None,
    raw: o.Raw = None,
    dtype: o.ComputeDtype = None,
    max_tokens: o.MaxTokens = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    num_samples: o.NumSamples = None,
    seed: o.Seed = None,
    stop: o.Stop = None,
    config: o.Files = None,
    sets: o.Sets = None,
    platform: o.Platform = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Answer one prompt, or every row of a file."""
    execute(ctx, "generate", section="generate")


def chat(
    ctx: typer.Context,
    model: o.Model = None,
    template: o.Template = None,
    system: o.System = None,
    dtype: o.ComputeDtype = None,
    max_tokens: o.MaxTokens = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    seed: o.Seed = None,
    stop: o.Stop = None,
    config: o.Files = None,
    sets: o.Sets = None,
    platform: o.Platform = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Talk to a model in the terminal. `clear` starts anew, `quit` leaves, Ctrl-C stops an answer."""
    execute(ctx, "chat", section="chat")
