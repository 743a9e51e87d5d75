"""msrl eval."""

from __future__ import annotations

from typing import Annotated

import typer

from msrl.cli.execute import execute, name_models
from msrl.cli.help import examples
from msrl.cli.options import CONFIG, CONFIG_NAME, DRY_RUN, SETS, VERBOSE, takes

EXAMPLES = examples(
    "msrl eval -c runs/grpo/config.yaml runs/grpo",
    "msrl eval -c grpo.yaml model runs/grpo/checkpoints --data data/test \\",
    "    --num-samples 8 --temperature 1 --output evaluation/test",
    "msrl eval model --benchmark gsm8k,mmlu --benchmark-data suites --limit 100",
)


@takes(CONFIG, CONFIG_NAME, SETS, "eval", DRY_RUN, VERBOSE)
def evaluate(
    ctx: typer.Context,
    more_models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL...", help="The same as --model.", show_default=False),
    ] = None,
) -> None:
    """Score responses of checkpoints to held-out prompts or published benchmarks."""
    name_models(ctx, "evaluate.models", *(more_models or []))
    _split_names(ctx)
    execute(ctx, "eval")


def _split_names(ctx: typer.Context) -> None:
    """Take the names of `--benchmark a,b` apart."""
    for parameter in ctx.command.params:
        if getattr(parameter, "key", None) == "evaluate.benchmarks" and parameter.name:
            words: list[str] = ctx.params.get(parameter.name) or []
            names = [name.strip() for word in words for name in word.split(",")]
            ctx.params[parameter.name] = list(dict.fromkeys(name for name in names if name))
