"""Questions of ROLL's GEM environments, `roll_math` and `roll_qa`, and their tools.

Without `tool_wrapper`, an episode is one answer. Source: ROLL 8eb27cc2,
roll/pipeline/agentic/env/gem and roll/pipeline/agentic/tools, and GEM 0.0.4.
"""

from __future__ import annotations

from typing import Any

from msrl.config.sources import Node, wrap
from msrl.importers.sections import Keys, as_mapping, put_call_time, refuse_unknown
from msrl.importers.status import KeyStatus
from msrl.importers.table import is_number
from msrl.importers.translation import SourceKey

QUESTIONS = ("roll_math", "roll_qa")
_DIFFERENCE = "msrl shows questions as `msrl preprocess` writes them, and has its own verifiers"
_TOOLS = {"python_code": "python_tool", "search": "search", "mcp": "mcp"}
_ARGUMENTS = {  # of the classes of the tools, by tool_id
    "python_code": (
        "timeout", "sandbox_type", "keep_error_last_line", "tool_instruction", "patterns",
    ),
    "search": ("num_workers", "search_url", "topk", "timeout"),
    "mcp": ("num_workers", "server_url", "client", "tool_names_subset", "custom_prompt"),
}  # fmt: skip
_REWARDS, _USES = ("tool_reward", "tool_success_reward"), "max_tool_uses"
_TIME_S = 5.0  # default of python_code


def translate_questions(keys: Keys, config: Keys, entry: SourceKey) -> dict[str, Any]:
    """Return name and options of the environment of a tag; set the verifier and the turns."""
    translation, kind = keys.translation, str(entry.value)
    translation.report_difference(entry, _DIFFERENCE)
    verifier: dict[str, Any] = {"verifier": "math_verify_reward"}
    if kind == "roll_qa":
        is_boxed = config.switch("extract_boxed", default=False)
        options = {"part": "boxed" if is_boxed else "answer", "ignore_case": True}
        verifier = {"verifier": "exact_match", "options": options}
    translation.set("reward.sources", wrap([verifier], entry.origin))
    tool = keys.get("tool_wrapper")
    name, options = _tool(keys, tool) if tool is not None else ("single_turn", {})
    text = f"environment.name: {name}; reward.sources: {verifier['verifier']}"
    translation.record(entry, KeyStatus.APPLIED, text)
    for item in config:
        if item.key == "extract_boxed":
            translation.record(item, KeyStatus.APPLIED, "reward.sources: options.part")
        elif item.key == "max_steps":
            translation.record(item, KeyStatus.DEAD, "not read by this environment")
    config.apply_remaining()
    return {"name": name, "options": options}


def _tool(keys: Keys, entry: SourceKey) -> tuple[str, dict[str, Any]]:
    """Return the environment of the tool of a question, with its options."""
    translation = keys.translation
    config = _only_tool(entry)
    kind = str(as_mapping(config.value).get("tool_id"))
    if kind not in _TOOLS:
        text = f"not supported: msrl has one tool of {', '.join(_TOOLS)}. Use environment.path."
        translation.add_error(entry, text)
        return "", {}
    arguments = _inner(config, "tool_args")
    refuse_unknown(translation, arguments, _ARGUMENTS[kind])
    _put_wrapper(keys, entry)
    text = f"environment.name: {_TOOLS[kind]}"
    translation.record(entry, KeyStatus.APPLIED, text)
    values = as_mapping(arguments.value)
    if kind == "python_code":
        return "python_tool", {"max_calls": 1, "time_s": _put_time(keys, arguments)}
    if kind == "mcp":
        return "mcp", {"url": values.get("server_url", "")}
    text = "msrl searches a local corpus by BM25. Set environment.options.corpus"
    translation.report_difference(entry, text)
    return "search", {"max_calls": 1, "num_results": values.get("topk", 3)}


def _only_tool(entry: SourceKey) -> SourceKey:
    """Return the only item of tool_configs; an empty section for other numbers of items."""
    configs = _inner(entry, "tool_configs")
    items = configs.node.value if isinstance(configs.node.value, tuple) else ()
    node = items[0] if len(items) == 1 else Node({}, entry.origin)
    return SourceKey(entry.section, "tool_configs", f"{configs.path}.0", node)


def _inner(entry: SourceKey, name: str) -> SourceKey:
    """Return a key inside a section, or an empty section if the file does not set it."""
    nodes = entry.node.value if isinstance(entry.node.value, dict) else {}
    node = nodes.get(name, Node({}, entry.origin))
    return SourceKey(entry.section, name, f"{entry.path}.{name}", node)


def _put_time(keys: Keys, arguments: SourceKey) -> float:
    """Set the time limit of a call, and return the limit of its program in seconds."""
    time_s = as_mapping(arguments.value).get("timeout", _TIME_S)
    if is_number(time_s) and time_s > 0:
        put_call_time(keys.translation, arguments.origin, time_s)
        return float(time_s)
    text = "must be a number of seconds above 0"
    keys.translation.add_error(_inner(arguments, "timeout"), text)
    return _TIME_S


def _put_wrapper(keys: Keys, entry: SourceKey) -> None:
    """Check the wrapper of the tool, and report rewards of calls, which msrl does not give."""
    wrapper = _inner(entry, "wrapper_args")
    refuse_unknown(keys.translation, wrapper, (*_REWARDS, _USES))
    arguments = as_mapping(wrapper.value)
    uses = arguments.get(_USES)
    if uses is not None and (not isinstance(uses, int) or isinstance(uses, bool) or uses < 0):
        text = "must be an integer of 0 or more, or null"
        keys.translation.add_error(_inner(wrapper, _USES), text)
    rewards = [f"{key}={arguments[key]}" for key in _REWARDS if arguments.get(key)]
    if rewards:
        text = f"wrapper_args: {', '.join(rewards)}: msrl has no reward of a call"
        keys.translation.report_difference(entry, text)


def tool_turns(keys: Keys) -> int | None:
    """Return the largest number of turns of an environment with a tool: its calls and an answer."""
    entry = keys.get("tool_wrapper")
    arguments = as_mapping(_inner(entry, "wrapper_args").value) if entry is not None else {}
    calls = arguments.get(_USES, 10)  # default of GEM
    return calls + 1 if entry is not None and isinstance(calls, int) else None
