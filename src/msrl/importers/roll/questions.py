"""Questions of ROLL's GEM environments, `roll_math` and `roll_qa`, and their tools.

Without `tool_wrapper`, an episode is one answer. Source: ROLL 8eb27cc2,
roll/pipeline/agentic/env/gem and roll/pipeline/agentic/tools.
"""

from __future__ import annotations

from typing import Any, cast

from msrl.config.sources import plain, wrap
from msrl.importers.sections import Keys, as_list
from msrl.importers.status import KeyStatus
from msrl.importers.translation import SourceKey

QUESTIONS = ("roll_math", "roll_qa")
_DIFFERENCE = "msrl shows questions as `msrl preprocess` writes them, and has its own verifiers"
_TOOLS = {"python_code": "python_tool", "search": "search", "mcp": "mcp"}
_REWARDS = ("tool_reward", "tool_success_reward")


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
    settings = _mapping(plain(entry.node))
    tools = [_mapping(row) for row in as_list(settings.get("tool_configs") or [])]
    kind = str(tools[0].get("tool_id")) if len(tools) == 1 else ""
    if kind not in _TOOLS:
        text = f"not supported: msrl has one tool of {', '.join(_TOOLS)}. Use environment.path."
        keys.translation.add_error(entry, text)
        return "", {}
    arguments = _mapping(tools[0].get("tool_args"))
    _put_wrapper(keys, entry, _mapping(settings.get("wrapper_args")))
    text = f"environment.name: {_TOOLS[kind]}"
    keys.translation.record(entry, KeyStatus.APPLIED, text)
    if kind == "python_code":
        return "python_tool", {"max_calls": 1, "time_s": float(arguments.get("timeout", 5))}
    if kind == "mcp":
        return "mcp", {"url": arguments.get("server_url", "")}
    text = "msrl searches a local corpus by BM25. Set environment.options.corpus"
    keys.translation.report_difference(entry, text)
    return "search", {"max_calls": 1, "num_results": arguments.get("topk", 3)}


def _put_wrapper(keys: Keys, entry: SourceKey, arguments: dict[str, Any]) -> None:
    """Report rewards of calls, which msrl does not give, and other words around tools."""
    rewards = [f"{key}={arguments[key]}" for key in _REWARDS if arguments.get(key)]
    if rewards:
        text = f"wrapper_args: {', '.join(rewards)}: msrl has no reward of a call"
        keys.translation.report_difference(entry, text)


def tool_turns(keys: Keys) -> int | None:
    """Return the largest number of turns of an environment with a tool: its calls and an answer."""
    entry = keys.get("tool_wrapper")
    arguments = _mapping(_mapping(plain(entry.node)).get("wrapper_args")) if entry else {}
    calls = arguments.get("max_tool_uses", 10)  # default of GEM
    return calls + 1 if entry is not None and isinstance(calls, int) else None


def _mapping(value: object) -> dict[str, Any]:
    """Return a mapping, or an empty one for any other value."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
