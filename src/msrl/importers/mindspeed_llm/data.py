"""Import of options of preprocess_data.py and of data of continued pretraining.

Sources: MindSpeed-RL 05a90d77 (cli/preprocess_data.py, whose configuration is one flat file),
MindSpeed-LLM b626d239 and Megatron's `--data-path`: one prefix, or pairs of weight and prefix.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msrl.config.sources import Node, wrap
from msrl.importers.conversions import weights_by_prefix
from msrl.importers.sections import Keys
from msrl.importers.table import as_list, canonical, load_table
from msrl.importers.translation import KeyStatus, Translation

MARKS = ("output_prefix", "handler_name")
_SHIPPED_TEMPLATES = ("configs/finetune/templates.json", "configs/model/templates.json")
_TEXT = "_text_document"  # suffix of Megatron prefixes, which msrl prefixes do not have


def is_preprocessing(tree: Node) -> bool:
    """Return True if a file configures preprocess_data.py."""
    return isinstance(tree.value, dict) and bool(
        {canonical(key) for key in tree.value} & set(MARKS)
    )


def translate(tree: Node, file: Path) -> Translation:
    """Return the translation of a file of preprocess_data.py, which includes its errors."""
    translation = Translation("MindSpeed-RL", load_table("mindspeed_llm"), str(file))
    keys = Keys.read(translation, "preprocess", tree, "")
    put_preprocessing(translation, keys)
    keys.apply_remaining()
    if keys.get("prompt_type") is None and not _reads_steps(keys):
        translation.set_default("preprocess.template", "empty")
    if keys.value("prompt_type") == "qwen3":
        translation.set_default(
            "preprocess.enable_thinking", False
        )  # the original reads it with this template only
    return translation


def put_preprocessing(translation: Translation, keys: Keys) -> None:
    """Translate the keys that no table row can describe: JSON, and values that mean null."""
    keys.put("handler_name", "preprocess.handler")
    _put_steps(keys)
    _put_columns(translation, keys)
    _put_template(translation, keys)
    _put_thinking(translation, keys)


def put_rows(translation: Translation, keys: Keys) -> None:
    """Translate the flags by which a training preprocesses the rows that data_path names.

    Source: MindSpeed-LLM c77308a1, core/datasets/dataset_preprocess.py.
    """
    _put_columns(translation, keys)
    _put_thinking(translation, keys)
    name = keys.get("prompt_type")
    if name is not None:
        translation.assign(name, ["model.template"], template_name(translation, keys))


def _put_columns(translation: Translation, keys: Keys) -> None:
    """Translate the names of columns: JSON, or a list."""
    mapping = keys.get("map_keys")
    if mapping is not None:
        try:
            entry: Any = mapping.value
            pairs: dict[Any, Any] = dict(json.loads(entry) if isinstance(entry, str) else entry)
            translation.assign(
                mapping,
                ["preprocess.map_keys"],
                {str(key): str(value) for key, value in pairs.items()},
            )
        except (ValueError, TypeError):
            translation.add_error(mapping, 'must be a JSON object such as {"prompt": "question"}')
    columns = keys.get("json_keys")
    if columns is not None and as_list(columns.value) != ["text"]:
        translation.assign(
            columns, ["preprocess.map_keys"], {"text": str(as_list(columns.value)[0])}
        )


def _put_thinking(translation: Translation, keys: Keys) -> None:
    """Translate enable_thinking, of which none means null."""
    thinking = keys.get("enable_thinking")
    if thinking is not None:
        choices = {"true": True, "false": False, "none": None}
        choice = str(thinking.value).lower()
        if choice not in choices:
            return translation.add_error(thinking, f"must be one of {', '.join(choices)}")
        if choices[choice] is not None:
            translation.assign(thinking, ["preprocess.enable_thinking"], choices[choice])
    return keys.record("enable_thinking", KeyStatus.OFF, "")


def _reads_steps(keys: Keys) -> bool:
    """Return True for the handler of process reward models, which uses no template."""
    return "ProcessReward" in str(keys.value("handler_name"))


def _put_steps(keys: Keys) -> None:
    """Translate the tokens of the handler of process reward models."""
    if not _reads_steps(keys):
        for key in ("placeholder_token", "reward_tokens"):
            keys.record(key, KeyStatus.OFF, "read with AlpacaStyleProcessRewardHandler only")
        return
    placeholder, tokens = keys.get("placeholder_token"), keys.get("reward_tokens")
    if placeholder is not None:
        options = ["preprocess.options.placeholder_token"]
        keys.assign("placeholder_token", options, str(placeholder.value))
    if tokens is not None:
        texts = [str(token) for token in as_list(tokens.value)]
        keys.assign("reward_tokens", ["preprocess.options.reward_tokens"], texts)


def _put_template(translation: Translation, keys: Keys) -> None:
    """Translate prompt_type with prompt_type_path, the file that defines it.

    The file that MindSpeed ships defines the packaged templates, unless it exists here: it may
    have been edited. `qwen_r1` of MindSpeed-LLM differs from `qwen_r1` of MindSpeed-RL.
    """
    name = keys.get("prompt_type")
    if name is not None:
        translation.assign(name, ["preprocess.template"], template_name(translation, keys))


def template_name(translation: Translation, keys: Keys) -> object:
    """Return the name of the template of prompt_type, with its file if that is not packaged."""
    name, path = keys.value("prompt_type"), keys.get("prompt_type_path")
    file = "" if path is None else str(path.value)
    is_shipped = not file or file.removeprefix("./") in _SHIPPED_TEMPLATES
    if file and (Path(file).is_file() or not is_shipped):
        keys.record("prompt_type_path", KeyStatus.APPLIED, "part of the name of the template")
        return f"{file}:{name}"
    is_other = translation.system == "MindSpeed-LLM" and name == "qwen_r1"
    return "qwen_r1_mindspeed_llm" if is_other else name


def put_text(translation: Translation, keys: Keys) -> None:
    """Translate data_path of continued pretraining: one dataset of text, or a weighted blend."""
    entry = keys.get("data_path")
    if entry is None:
        return None
    translation.set("data.handler", wrap("pretrain", entry.origin))
    try:
        weights = weights_by_prefix(entry.value)
    except ValueError as error:
        return translation.add_error(entry, str(error))
    blend: dict[str, float] = {}
    for prefix, weight in weights.items():
        name = prefix.removesuffix(_TEXT)
        blend[name] = blend.get(name, 0.0) + weight
    if len(blend) == 1:
        return translation.assign(entry, ["data.train"], next(iter(blend)))
    return translation.assign(entry, ["data.blend"], blend)
