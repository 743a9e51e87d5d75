"""msrl preprocess."""

from __future__ import annotations

from typing import Annotated

import typer

from msrl.cli.execute import execute
from msrl.cli.help import examples
from msrl.cli.options import APPROXIMATE, CONFIG, DRY_RUN, SETS, VERBOSE, take_arguments, takes

EXAMPLES = examples(
    "msrl preprocess --input alpaca.json --tokenizer Qwen2.5-7B --handler alpaca \\",
    "    --template qwen --output-prefix data/sft --workers 8",
    "msrl preprocess -c preprocess.yaml --dry-run",
)


@takes("preprocess", CONFIG, SETS, APPROXIMATE, DRY_RUN, VERBOSE)
def preprocess(
    ctx: typer.Context,
    more_input: Annotated[list[str] | None, typer.Argument(metavar="FILE", hidden=True)] = None,
) -> None:
    """Tokenize a dataset and write it as Megatron's indexed files."""
    take_arguments(ctx, "preprocess.input", more_input or [])
    execute(ctx, "preprocess")
