"""msrl serve."""

from __future__ import annotations

import typer

from msrl.cli.execute import execute, name_models
from msrl.cli.help import examples
from msrl.cli.options import CONFIG, DRY_RUN, SETS, VERBOSE, ModelArgument, takes

EXAMPLES = examples(
    "msrl serve runs/grpo/checkpoints",
    "msrl serve model --tp 2 --port 9000 --lora math=runs/sft/checkpoints",
    "msrl serve model --host 0.0.0.0 --api-key-file key.txt",
)


@takes("serve", CONFIG, SETS, DRY_RUN, VERBOSE)
def serve(ctx: typer.Context, model_argument: ModelArgument = None) -> None:
    """Serve a model with vLLM's OpenAI-compatible server. Ctrl-C stops it."""
    name_models(ctx, "serve.model", model_argument)
    execute(ctx, "serve")
