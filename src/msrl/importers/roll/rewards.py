"""ROLL's rewards by domain, and its filter of prompts, as reward.sources and rollout.filter."""

from __future__ import annotations

import math
from typing import Any, cast

from msrl.config.sources import plain, wrap
from msrl.importers.native_keys import refusal
from msrl.importers.sections import Keys, as_list
from msrl.importers.translation import Fate, Given, Translation

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
    filters: list[Given | None] = []
    for name, node in domains.items():
        keys = Keys(translation, "reward", translation.given(node, "reward", f"rewards.{name}"))
        source = _source(translation, keys)
        if source is not None:
            sources.append(source)
        filters.append(keys.get("query_filter_config"))
        for one in keys:
            if one.key != "query_filter_config":
                translation.say(one, Fate.SAME, "of how the original computes the reward")
    _put_filters(translation, filters, top.number("num_return_sequences_in_group"))
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


def put_filter(translation: Translation, top: Keys) -> None:
    """The filter of the whole run."""
    given = top.get("query_filter_config")
    if given is not None:
        _put_filters(translation, [given], top.number("num_return_sequences_in_group"))


def _put_filters(translation: Translation, filters: list[Given | None], num_samples: int | None) -> None:
    """The filter that all domains have; here one is for all rows, so that they must have the same."""
    found = [None if given is None else _filter(translation, given, num_samples) for given in filters]
    for given, wanted in zip(filters, found, strict=True):
        if given is None or translation.is_said(given):
            continue
        if wanted != found[0] or None in found:
            translation.mistake(given, "is not that of all domains; rollout.filter is one for all rows")
        for name, value in (wanted or {}).items():
            translation.set(f"rollout.filter.{name}", wrap(value, given.origin))
        translation.say(given, Fate.TOOK, "rollout.filter: " + ", ".join(f"{name} {value}" for name, value in (wanted or {}).items()))


def _filter(translation: Translation, given: Given, num_samples: int | None) -> dict[str, Any] | None:
    """mean_filter keeps groups whose mean is between the thresholds, std_filter those whose deviation is above one. None: there is none.

    The original's bounds are -1 where they are not given, and its deviation is that of a sample.
    """
    entries = given.node.value if isinstance(given.node.value, dict) else {}
    kinds = {"mean_filter": "mean", "std_filter": "std", "no_filter": "none"}
    kind = kinds.get(str(plain(entries["type"])) if "type" in entries else "")
    if not entries or kind == "none":
        return translation.say(given, Fate.OFF, "")
    if kind is None:
        return translation.mistake(given, f"type must be one of {', '.join(kinds)}")
    bounds: Any = plain(entries["filter_args"]) if "filter_args" in entries else {}
    names = {"threshold_down": "low", "threshold_up": "high"} if kind == "mean" else {"std_threshold": "low"}
    if not isinstance(bounds, dict):
        return translation.mistake(given, f"filter_args must be a section of {', '.join(names)}")
    wanted: dict[str, Any] = {"kind": kind, "low": -1.0}
    for key, value in cast("dict[str, Any]", bounds).items():
        if key not in names:
            return translation.mistake(given, f"filter_args.{key}: {kind}_filter takes {', '.join(names)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            return translation.mistake(given, f"filter_args.{key} must be a number")
        wanted[names[key]] = float(value)
    if kind == "std" and num_samples and wanted["low"] > 0:
        wanted["low"] *= math.sqrt((num_samples - 1) / num_samples)
    return wanted
