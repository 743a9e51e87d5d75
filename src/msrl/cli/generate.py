"""msrl generate and msrl chat."""

from __future__ import annotations

import typer

from msrl.cli.execute import execute, name_models
from msrl.cli.help import examples
from msrl.cli.options import CONFIG, DRY_RUN, SETS, VERBOSE, ModelArgument, takes

GENERATE_EXAMPLES = examples(
    'msrl generate --model model --prompt "What is 2 + 3?"',
    "msrl generate --model model --input prompts.jsonl --output answers.jsonl \\",
    "    --tp 2 --temperature 0.7 --num-samples 4",
)
CHAT_EXAMPLES = examples(
    "msrl chat --model runs/sft/checkpoints",
    'msrl chat --model model --template qwen --system "Answer briefly." --tp 2',
)


@takes("generate", CONFIG, SETS, DRY_RUN, VERBOSE)
def generate(ctx: typer.Context, model_argument: ModelArgument = None) -> None:
    """Generate responses to prompts, or to every row of a file."""
    name_models(ctx, "generate.model", model_argument)
    execute(ctx, "generate")


@takes("chat", CONFIG, SETS, DRY_RUN, VERBOSE)
def chat(ctx: typer.Context, model_argument: ModelArgument = None) -> None:
    """Chat with a model. /clear starts a new chat, /quit exits, Ctrl-C stops a response."""
    name_models(ctx, "chat.model", model_argument)
    execute(ctx, "chat")
