"""msrl preprocess: rows of text to tokens on disk."""

from __future__ import annotations

import json
from typing import Any, cast

import typer

from msrl.cli import options as o
from msrl.cli.execute import execute
from msrl.errors import MsrlError


def preprocess(
    ctx: typer.Context,
    input: o.Input = None,
    more_input: o.MoreInput = None,
    tokenizer: o.Tokenizer = None,
    handler: o.Handler = None,
    kind: o.Kind = None,
    template: o.Template = None,
    output_prefix: o.OutputPrefix = None,
    seq_length: o.SeqLength = None,
    pack: o.Pack = None,
    too_long: o.TooLongRows = None,
    enable_thinking: o.Thinking = None,
    map_keys: o.MapKeys = None,
    workers: o.Workers = None,
    overwrite: o.Overwrite = None,
    append_eod: o.AppendEod = None,
    config: o.Files = None,
    sets: o.Sets = None,
    platform: o.Platform = None,
    dry_run: o.DryRun = False,
    verbose: o.Verbose = False,
) -> None:
    """Turn a dataset into tokens, in Megatron's indexed files."""
    ctx.params["input"] = [*(input or []), *(ctx.params.pop("more_input") or [])]
    if map_keys is not None:
        ctx.params["map_keys"] = _columns(map_keys)
    execute(ctx, "preprocess", section="preprocess")


def _columns(text: str) -> dict[str, Any]:
    """The mapping of `--map-keys`. Raises MsrlError when it is not a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise MsrlError(f"--map-keys: not valid JSON at character {error.pos + 1}: {error.msg}") from None
    if not isinstance(value, dict):
        raise MsrlError(f'--map-keys={text}: must be a JSON object such as {{"prompt": "question"}}')
    return cast("dict[str, Any]", value)
