"""Tools of MindSpeed-RL's multi-turn rollouts: `multi_turn_enable` and the file of the tool.

A file has `tools`, a list of {class_name, config, tool_schema}. Source: MindSpeed-RL 05a90d77,
tools/ and workers/actor_hybrid_worker.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from msrl.config.sources import plain, read, wrap
from msrl.errors import MsrlError, nearest, similar
from msrl.importers.sections import Keys, as_mapping, put_call_time
from msrl.importers.status import KeyStatus
from msrl.importers.table import is_number
from msrl.importers.translation import SourceKey, Translation

_TOOLS = {"ReTool": "python_tool", "SearchTool": "search"}
_SERVICE = ("num_workers", "enable_global_rate_limit", "rate_limit", "type")
_TOOL_KEYS = {  # of the section `config` of a tool
    "ReTool": (
        "sandbox_fusion_url", "default_timeout", "default_language", "memory_limit_mb", *_SERVICE,
    ),
    "SearchTool": ("retrieval_service_url", "timeout", "topk", *_SERVICE),
}  # fmt: skip
_MULTI_TURN = (
    "tool_config_path",
    "max_tool_calls",
    "max_parallel_calls",
    "max_total_response_length",
    "max_tool_response_length",
    "tool_response_truncate_side",
    "tool_parser_format",
)


def put_tools(translation: Translation, rl: Keys, sampling: Keys, file: Path) -> None:
    """Translate the tools of an episode, if multi_turn_enable is on."""
    if rl.value("multi_turn_enable") is not True:
        for key in _MULTI_TURN:
            rl.record(key, KeyStatus.DEAD, "used with multi_turn_enable only")
        return
    rl.record("multi_turn_enable", KeyStatus.APPLIED, "environment")
    entry = rl.get("tool_config_path")
    if entry is None:
        translation.errors.append(
            f"{translation.name}: rl_config.tool_config_path: missing. Name the file of the tool."
        )
        return
    options = _options(translation, rl)
    name, own = _tool(translation, entry, file)
    if name:
        translation.set("environment.name", wrap(name, entry.origin))
        translation.set("environment.options", wrap({**options, **own}, entry.origin))
        where = " (programs run in msrl's own sandbox)" if name == "python_tool" else ""
        text = f"environment.name: {name}, and its options{where}"
        translation.record(entry, KeyStatus.APPLIED, text)
    _limits(translation, rl, sampling)


def _options(translation: Translation, rl: Keys) -> dict[str, Any]:
    """Return the options that all tools have."""
    options: dict[str, Any] = {}
    for key, option in (("max_parallel_calls", "max_calls"), ("max_tool_response_length", "")):
        value = rl.number(key)
        if value:
            options[option or "max_output_chars"] = value
            text = f"environment.options.{option or 'max_output_chars'}"
            rl.record(key, KeyStatus.APPLIED, text)
    side = rl.get("tool_response_truncate_side")
    if side is not None and side.value != "middle":
        translation.difference(side, "msrl omits the middle of a long output")
    rl.record("tool_response_truncate_side", KeyStatus.SAME, "msrl omits the middle")
    return options


def _tool(translation: Translation, entry: SourceKey, file: Path) -> tuple[str, dict[str, Any]]:
    """Return the environment of the file of a tool, and its own options."""
    path = _path(str(entry.value), file)
    if path is None:
        translation.add_error(entry, "file not found. Correct the path.")
        return "", {}
    try:
        settings = as_mapping(plain(read(path, is_old=True)))
    except MsrlError as error:
        translation.errors.append(str(error))
        return "", {}
    tools = settings.get("tools")
    tool = as_mapping(cast("list[Any]", tools)[0]) if isinstance(tools, list) and tools else {}
    if not tool or len(cast("list[Any]", tools)) != 1:
        translation.add_error(entry, "not supported: the file must have one tool")
        return "", {}
    kind = str(tool.get("class_name")).rpartition(".")[2]
    if kind not in _TOOLS:
        translation.add_error(
            entry, f"not supported: the tool {kind}. Use environment.path for a tool of your own."
        )
        return "", {}
    config = as_mapping(tool.get("config"))
    for key in config:
        if key not in _TOOL_KEYS[kind] and similar(key, _TOOL_KEYS[kind]):
            text = f"unknown key of the tool {kind}; {nearest(key, _TOOL_KEYS[kind])}"
            translation.errors.append(f"{path}: tools.0.config.{key}: {text}")
    options = _tool_options(translation, entry, kind, config)
    return _TOOLS[kind], options


def _path(value: str, file: Path) -> Path | None:
    """Return the file of a tool, relative to the working folder or to a folder above `file`."""
    folders = [Path(), *file.resolve().parents]
    return next((folder / value for folder in folders if (folder / value).is_file()), None)


def _tool_options(
    translation: Translation, entry: SourceKey, kind: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    if kind == "SearchTool":
        text = "msrl searches a local corpus by BM25. Set environment.options.corpus"
        translation.report_difference(entry, text)
        return {"num_results": config.get("topk", 3)}
    time_s = config.get("default_timeout", 30)
    if not is_number(time_s):
        translation.add_error(entry, f"config.default_timeout={time_s}: must be a number")
        return {}
    put_call_time(translation, entry.origin, time_s)
    return {"time_s": float(time_s), "memory_mb": config.get("memory_limit_mb", 1024)}


def _limits(translation: Translation, rl: Keys, sampling: Keys) -> None:
    """Set the limits of turns and tokens of an episode."""
    calls, total = rl.number("max_tool_calls"), rl.number("max_total_response_length")
    if calls is not None:
        rl.assign("max_tool_calls", ["environment.max_turns"], calls + 1, why="calls and an answer")
    if total:
        answer = sampling.value("max_tokens")
        sampling.assign("max_tokens", ["environment.max_turn_tokens"], answer)
        rl.assign("max_total_response_length", ["rollout.max_response_tokens"], total)
    if rl.get("tool_parser_format"):
        rl.put("tool_parser_format", "environment.tool_format")
    for key in _MULTI_TURN:
        rl.record(key, KeyStatus.OFF, "")
