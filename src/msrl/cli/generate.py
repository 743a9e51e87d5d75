"""msrl generate and msrl chat."""

from __future__ import annotations

import typer

from msrl.cli import options as o
from msrl.cli.execute import execute, name_model
from msrl.cli.help import examples

GENERATE_EXAMPLES = examples(
    'msrl generate --model model --prompt "What is 2 + 3?"',
    "msrl generate --model model --input prompts.jsonl --output answers.jsonl \\",
    "    --tp 2 --temperature 0.7 --num-samples 4",
)
CHAT_EXAMPLES = examples(
    "msrl chat --model runs/sft/checkpoints",
    'msrl chat --model model --template qwen --system "Answer briefly." --tp 2',
)


def generate(
    ctx: typer.Context,
    model_argument: o.ModelArgument = None,
    model: o.Model = None,
    tp: o.EngineTp = None,
    prompt: o.PromptText = None,
    input: o.InputFile = None,
    output: o.OutputFile = None,
    engine: o.Engine = None,
    template: o.ChatTemplate = None,
    date: o.Date = None,
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
    """Generate responses to prompts, or to every row of a file."""
    name_model(ctx)
    if prompt is not None and len(prompt) == 1:
        ctx.params["prompt"] = prompt[0]
    execute(ctx, "generate")


def chat(
    ctx: typer.Context,
    model_argument: o.ModelArgument = None,
    model: o.Model = None,
    tp: o.EngineTp = None,
    template: o.ChatTemplate = None,
    date: o.Date = None,
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
    """Chat with a model. /clear starts a new chat, /quit exits, Ctrl-C stops a response."""
    name_model(ctx)
    execute(ctx, "chat")
