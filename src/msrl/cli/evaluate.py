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
)


@takes(CONFIG, CONFIG_NAME, SETS, "eval", DRY_RUN, VERBOSE)
def evaluate(
    ctx: typer.Context,
    more_models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL...", help="The same as --model.", show_default=False),
    ] = None,
) -> None:
    """Score responses of checkpoints to held-out prompts with the rewards of training."""
    name_models(ctx, "evaluate.models", *(more_models or []))
    execute(ctx, "eval")
