"""ROLL's rewards by domain, and its filter of prompts, as reward.sources and rollout.filter."""

from __future__ import annotations

from typing import Any

from msrl.config.imports.built import refusal
from msrl.config.imports.sections import Keys, as_list
from msrl.config.imports.translation import Fate, Given, Translation
from msrl.config.messages import node_at
from msrl.config.sources import plain, wrap

# Right answer in a box 1, else 0; the others by their names.
_VERIFIERS = {
    "MathRuleRewardWorker": "math_17k_acc",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
    "CodeSandboxRewardWorker": "code",
}


def put_rewards(translation: Translation, top: Keys) -> None:
    """One source per domain, for the rows of its tags where there are several domains."""
    given = top.get("rewards")
    domains = given.node.value if given is not None and isinstance(given.node.value, dict) else {}
    sources: list[dict[str, Any]] = []
    for name, node in domains.items():
        keys = Keys(translation, "reward", translation.given(node, "reward", f"rewards.{name}"))
        source = _source(translation, keys)
        if source is not None:
            sources.append(source)
        put_filter(translation, keys)
        for one in keys:
            translation.say(one, Fate.SAME, "of how the original computes the reward")
    if given is not None:
        translation.say(given, Fate.TOOK, "domain by domain")
    if sources and given is not None:
        translation.set("reward.sources", wrap(sources, given.origin))


def _source(translation: Translation, keys: Keys) -> dict[str, Any] | None:
    worker = keys.get("worker_cls")
    if worker is None:
        return None
    verifier = _VERIFIERS.get(str(worker.value).rpartition(".")[2])
    if verifier is None or refusal("reward.sources.verifier", verifier):
        translation.say(worker, Fate.NOT_YET, "reward.sources: no verifier of msrl's does what it does; --set reward.sources names one")
        return None
    translation.say(worker, Fate.TOOK, f"reward.sources: {verifier}")
    tags = keys.get("tag_included")
    if tags is None:
        return {"verifier": verifier}
    translation.say(tags, Fate.TOOK, "reward.sources: tags")
    return {"verifier": verifier, "tags": [str(tag) for tag in as_list(tags.value)]}


def put_filter(translation: Translation, keys: Keys) -> None:
    """Of the whole run or of a domain: mean_filter keeps groups whose mean is between the thresholds, std_filter those above one.

    A filter is for all rows here, so that domains must have the same.
    """
    given = keys.get("query_filter_config")
    if given is None:
        return None
    entries = given.node.value if isinstance(given.node.value, dict) else {}
    if not entries:
        return translation.say(given, Fate.OFF, "")
    kinds = {"mean_filter": "mean", "std_filter": "std", "no_filter": "none"}
    kind = kinds.get(str(plain(entries["type"])) if "type" in entries else "")
    if kind is None:
        return translation.mistake(given, f"type must be one of {', '.join(kinds)}")
    if kind == "none":
        return translation.say(given, Fate.OFF, "")
    return _put(translation, given, kind, dict(plain(entries["filter_args"]) or {}) if "filter_args" in entries else {})


def _put(translation: Translation, given: Given, kind: str, bounds: dict[str, Any]) -> None:
    names = {"threshold_down": "low", "threshold_up": "high"} if kind == "mean" else {"std_threshold": "low"}
    unknown = sorted(bounds.keys() - names)
    if unknown:
        return translation.mistake(given, f"filter_args.{unknown[0]}: {kind}_filter takes {', '.join(names)}")
    wanted = {"kind": kind, **({"low": 0.0} if kind == "std" else {}), **{names[key]: float(value) for key, value in bounds.items()}}
    before = node_at(translation.tree, ["rollout", "filter"])
    if before is not None and plain(before) != wanted:
        return translation.mistake(given, f"is not the filter of {before.origin}; rollout.filter is one for all rows")
    for name, value in wanted.items():
        translation.set(f"rollout.filter.{name}", wrap(value, given.origin))
    return translation.say(given, Fate.TOOK, "rollout.filter: " + ", ".join(f"{name} {value}" for name, value in wanted.items()))
