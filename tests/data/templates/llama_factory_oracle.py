"""Templates of LLaMA-Factory as oracles, from a checkout that is not part of this project.

`MSRL_LLAMA_FACTORY` names the checkout (commit ff6d4d12), by default `../LLaMA-Factory`.
"""

from __future__ import annotations

import importlib
import logging
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

from checkouts import checkout, import_from

_DATA = Path("src", "llamafactory", "data")


@cache
def template_module() -> Any:
    """Return LLaMA-Factory's module of templates, or skip the test.

    The packages are imported without their `__init__.py`, which import trainers. Plugins for images
    and the logger, which templates of texts do not call, are stand-ins.
    """
    root = checkout("LLaMA-Factory", _DATA / "template.py")
    import_from(root / "src", "llamafactory", "llamafactory.data", "llamafactory.extras")
    logger = types.ModuleType("llamafactory.extras.logging")
    plugins = types.ModuleType("llamafactory.data.mm_plugin")
    vars(logger)["get_logger"] = logging.getLogger
    vars(plugins)["get_mm_plugin"] = lambda *arguments, **options: None
    sys.modules.update({logger.__name__: logger, plugins.__name__: plugins})
    vars(sys.modules["llamafactory.extras"])["logging"] = logger
    return importlib.import_module("llamafactory.data.template")


def special_tokens(name: str) -> list[str]:
    """Return the tokens that end an answer of a template."""
    return list(template_module().TEMPLATES[name].stop_words)


def encode(
    name: str,
    tokenizer: Any,
    messages: list[dict[str, str]],
    *,
    system: str | None = None,
    tools: str | None = None,
    enable_thinking: bool | None = True,
) -> tuple[list[int], list[bool]]:
    """Return token ids and loss mask of a conversation, as LLaMA-Factory trains it."""
    from copy import copy

    template = copy(template_module().TEMPLATES[name])
    template.enable_thinking = enable_thinking
    pairs = template.encode_multiturn(tokenizer, messages, system, tools)
    ids = [number for pair in pairs for side in pair for number in side]
    mask = [bool(side) for pair in pairs for side in (0, 1) for _ in pair[side]]
    if template.efficient_eos:  # as its dataset processors do after the last answer
        ids, mask = [*ids, tokenizer.eos_token_id], [*mask, True]
    return ids, mask
