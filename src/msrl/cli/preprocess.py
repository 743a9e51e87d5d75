"""msrl preprocess: tokenize a dataset."""

from __future__ import annotations

import json
from typing import Any, cast

import typer

from msrl.cli import options as o
from msrl.cli.execute import execute
from msrl.cli.help import examples
from msrl.errors import MsrlError
from msrl.strict_json import loads

EXAMPLES = examples(
    "msrl preprocess --input alpaca.json --tokenizer Qwen2.5-7B --handler alpaca \\",
    "    --template qwen --output-prefix data/sft --workers 8",
    "msrl preprocess -c preprocess.yaml --dry-run",
)


def preprocess(
    ctx: typer.Context,
    input: o.Input = None,
    more_input: o.MoreInput = None,
    split: o.Split = None,
    tokenizer: o.Tokenizer = None,
    handler: o.Handler = None,
    kind: o.Kind = None,
    template: o.Template = None,
    output_prefix: o.OutputPrefix = None,
    seq_length: o.SeqLength = None,
    pack: o.Pack = None,
    too_long: o.TooLongRows = None,
    on_bad_row: o.OnBadRow = None,
    enable_thinking: o.Thinking = None,
    date: o.Date = None,
    map_keys: o.MapKeys = None,
    keep: o.Keep = None,
    ignore: o.Ignore = None,
    workers: o.Workers = None,
    overwrite: o.Overwrite = None,
    append_eod: o.AppendEod = None,
    show: o.Show = None,
    config: o.Files = None,
    approximate: o.Approximate = False,
    sets: o.Sets = None,
    platform: o.Platform = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Tokenize a dataset and write it as Megatron's indexed files."""
    ctx.params["input"] = [*(input or []), *(ctx.params.pop("more_input") or [])]
    if map_keys is not None:
        ctx.params["map_keys"] = _column_names(map_keys)
    execute(ctx, "preprocess")


def _column_names(text: str) -> dict[str, Any]:
    """Return the mapping of `--map-keys`. Raises MsrlError when it is not a JSON object."""
    try:
        value = loads(text)
    except json.JSONDecodeError as error:
        raise MsrlError(
            f"--map-keys: not valid JSON at character {error.pos + 1}: {error.msg}"
        ) from None
    except (ValueError, RecursionError) as error:  # a key twice, or a limit of Python
        raise MsrlError(f"--map-keys: cannot be read: {str(error).partition(';')[0]}") from None
    if not isinstance(value, dict):
        raise MsrlError(
            f'--map-keys={text}: must be a JSON object such as {{"prompt": "question"}}'
        )
    return cast("dict[str, Any]", value)
