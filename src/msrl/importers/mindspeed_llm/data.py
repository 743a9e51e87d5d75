"""MindSpeed's data: flags and YAML of preprocess_data.py, and what continued pretraining reads.

Sources: MindSpeed-RL 05a90d77 (cli/preprocess_data.py, whose configuration is one flat file), MindSpeed-LLM b626d239 and Megatron's
`--data-path`: one prefix, or pairs of weight and prefix.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from msrl.config.sources import Node, wrap
from msrl.importers.sections import Keys, as_list
from msrl.importers.table import canonical, load_table
from msrl.importers.translation import Fate, Translation

MARKS = ("output_prefix", "handler_name")
_TEXT = "_text_document"  # the end of a file's name, which Megatron's prefixes have and msrl's have not


def is_preprocessing(tree: Node) -> bool:
    """Whether a file is of preprocess_data.py."""
    return isinstance(tree.value, dict) and bool({canonical(key) for key in tree.value} & set(MARKS))


def translate(tree: Node, file: Path) -> Translation:
    """The native configuration of one file of preprocess_data.py; mistakes are in the result."""
    translation = Translation("MindSpeed-RL", load_table("mindspeed_llm"), str(file))
    keys = Keys(translation, "preprocess", translation.given(tree, "preprocess", ""))
    put_preprocessing(translation, keys)
    keys.apply_rest()
    if keys.get("prompt_type") is None:
        translation.set_default("preprocess.template", "empty")
    if keys.value("prompt_type") == "qwen3":
        translation.set_default("preprocess.enable_thinking", False)  # read with this template alone
    return translation


def put_preprocessing(translation: Translation, keys: Keys) -> None:
    """What a row of the table cannot say: JSON, and values that stand for none."""
    mapping = keys.get("map_keys")
    if mapping is not None:
        try:
            given: Any = mapping.value
            pairs: dict[Any, Any] = dict(json.loads(given) if isinstance(given, str) else given)
            translation.take(mapping, ["preprocess.map_keys"], {str(key): str(value) for key, value in pairs.items()})
        except (ValueError, TypeError):
            translation.mistake(mapping, 'must be a JSON object such as {"prompt": "question"}')
    columns = keys.get("json_keys")
    if columns is not None and as_list(columns.value) != ["text"]:
        translation.take(columns, ["preprocess.map_keys"], {"text": str(as_list(columns.value)[0])})
    thinking = keys.get("enable_thinking")
    if thinking is not None:
        choices = {"true": True, "false": False, "none": None}
        wanted = str(thinking.value).lower()
        if wanted not in choices:
            return translation.mistake(thinking, f"must be one of {', '.join(choices)}")
        if choices[wanted] is not None:
            translation.take(thinking, ["preprocess.enable_thinking"], choices[wanted])
    return keys.say("enable_thinking", Fate.OFF, "")


def put_text(translation: Translation, keys: Keys) -> None:
    """Continued pretraining: rows are cut from text, from one dataset or from several by their weights."""
    given = keys.get("data_path")
    if given is None:
        return None
    translation.set("data.handler", wrap("pretrain", given.origin))
    try:
        blend = text_blend(given.value)
    except ValueError as error:
        return translation.mistake(given, str(error))
    if len(blend) == 1:
        return translation.take(given, ["data.train"], next(iter(blend)))
    return translation.take(given, ["data.blend"], blend)


def text_blend(value: object) -> dict[str, float]:
    """Prefixes of msrl's with their weights; a prefix that is there twice has both. Raises ValueError for what is not pairs.

    >>> text_blend("0.3,a_text_document,0.7,b")
    {'a': 0.3, 'b': 0.7}
    """
    listed = cast("list[Any]", value) if isinstance(value, (list, tuple)) else str(value).replace(",", " ").split()
    parts = [str(part).strip(",") for part in listed]
    if len(parts) == 1:
        parts = ["1", *parts]
    if len(parts) % 2:
        raise ValueError("must be one prefix, or pairs of a weight and a prefix")
    found: dict[str, float] = {}
    for weight, prefix in zip(parts[::2], parts[1::2], strict=True):
        try:
            number = float(weight)
        except ValueError:
            raise ValueError(f"must be one prefix, or pairs of a weight and a prefix; {weight} is no weight") from None
        name = prefix.removesuffix(_TEXT)
        found[name] = found.get(name, 0.0) + number
    return found
