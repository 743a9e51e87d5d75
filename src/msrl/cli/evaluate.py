"""msrl eval."""

from __future__ import annotations

import typer

from msrl.cli import options as o
from msrl.cli.execute import execute, refuse_no_models
from msrl.cli.help import examples

EXAMPLES = examples(
    "msrl eval -c runs/grpo/config.yaml runs/grpo",
    "msrl eval -c grpo.yaml model runs/grpo/checkpoints --data data/test \\",
    "    --num-samples 8 --temperature 1 --output evaluation/test",
)


def evaluate(
    ctx: typer.Context,
    more_models: o.MoreModels = None,
    models: o.EvaluatedModels = None,
    config: o.Files = None,
    config_name: o.ConfigName = None,
    sets: o.Sets = None,
    data: o.EvaluationData = None,
    prompts: o.NumPrompts = None,
    output: o.EvaluationFolder = None,
    overwrite: o.EvaluateAgain = None,
    tp: o.EngineTp = None,
    num_samples: o.NumSamples = None,
    max_tokens: o.EvaluationTokens = None,
    temperature: o.Temperature = None,
    top_p: o.TopP = None,
    top_k: o.TopK = None,
    min_p: o.MinP = None,
    seed: o.EvaluationSeed = None,
    stop: o.Stop = None,
    platform: o.Platform = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Score responses of checkpoints to held-out prompts with the rewards of training."""
    refuse_no_models(ctx, more_models or [])
    ctx.params["models"] = [*(models or []), *(more_models or [])]
    execute(ctx, "eval")
