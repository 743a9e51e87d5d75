"""Translation of ROLL's rewards and prompt filters to reward.sources and rollout.filter."""

from __future__ import annotations

import math
from typing import Any, cast

from msrl.config.sources import plain, wrap
from msrl.importers.native_keys import refusal
from msrl.importers.sections import Keys, as_list
from msrl.importers.translation import KeyStatus, SourceKey, Translation

# math_17k_acc scores 1 for a correct boxed answer, else 0.
_VERIFIERS = {
    "MathRuleRewardWorker": "math_17k_acc",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
    "CodeSandboxRewardWorker": "code",
}


def put_rewards(translation: Translation, top: Keys) -> None:
    """Set one reward source per domain; with several domains, each scores the rows of its tags."""
    section = top.get("rewards")
    domains = {}
    if section is not None and isinstance(section.node.value, dict):
        domains = section.node.value
    sources: list[dict[str, Any]] = []
    labels: list[str] = []
    filters: list[SourceKey | None] = []
    for name, node in domains.items():
        keys = Keys(translation, "reward", translation.entries(node, "reward", f"rewards.{name}"))
        source = _source(translation, keys)
        if source is not None:
            if source["verifier"] in labels:
                source = {**source, "name": name}
            labels.append(source["verifier"])
            sources.append(source)
        filters.append(keys.get("query_filter_config"))
        for entry in keys:
            if entry.key != "query_filter_config":
                translation.record(
                    entry, KeyStatus.SAME, "implementation detail of the reward in the original"
                )
    _put_filters(translation, filters, top.number("num_return_sequences_in_group"))
    if section is not None:
        translation.record(section, KeyStatus.APPLIED, "domain by domain")
    if sources and section is not None:
        translation.set("reward.sources", wrap(sources, section.origin))


def _source(translation: Translation, keys: Keys) -> dict[str, Any] | None:
    worker = keys.get("worker_cls")
    if worker is None:
        return None
    verifier = _VERIFIERS.get(str(worker.value).rpartition(".")[2])
    if verifier is None or refusal("reward.sources.verifier", verifier):
        name = str(worker.value).rpartition(".")[2]
        text = f"msrl has no verifier like {name}; rows of this domain need a reward source"
        return translation.difference(worker, text)
    translation.record(worker, KeyStatus.APPLIED, f"reward.sources: {verifier}")
    tags = keys.get("tag_included")
    if tags is None:
        return {"verifier": verifier}
    translation.record(tags, KeyStatus.APPLIED, "reward.sources: tags")
    return {"verifier": verifier, "tags": [str(tag) for tag in as_list(tags.value)]}


def put_filter(translation: Translation, top: Keys) -> None:
    """Set the filter of the run."""
    entry = top.get("query_filter_config")
    if entry is not None:
        _put_filters(translation, [entry], top.number("num_return_sequences_in_group"))


def _put_filters(
    translation: Translation, filters: list[SourceKey | None], num_samples: int | None
) -> None:
    """Set the filter of all domains, which must be equal: msrl has one filter for all rows."""
    settings = [
        None if entry is None else _filter_settings(translation, entry, num_samples)
        for entry in filters
    ]
    for entry, setting in zip(filters, settings, strict=True):
        if entry is None or translation.is_recorded(entry):
            continue
        if setting != settings[0] or None in settings:
            message = "must be equal in all domains, because rollout.filter applies to all rows"
            translation.add_error(entry, message)
        values = setting or {}
        for name, value in values.items():
            translation.set(f"rollout.filter.{name}", wrap(value, entry.origin))
        text = ", ".join(f"{name} {value}" for name, value in values.items())
        translation.record(entry, KeyStatus.APPLIED, f"rollout.filter: {text}")


def _filter_settings(
    translation: Translation, entry: SourceKey, num_samples: int | None
) -> dict[str, Any] | None:
    """Return the keys of rollout.filter; None if the filter is off or invalid.

    mean_filter keeps groups whose mean is between the thresholds, std_filter those whose standard
    deviation is above a threshold. The original has a default bound of -1, and the unbiased
    standard deviation (N - 1).
    """
    entries = entry.node.value if isinstance(entry.node.value, dict) else {}
    kinds = {"mean_filter": "mean", "std_filter": "std", "no_filter": "none"}
    kind = kinds.get(str(plain(entries["type"])) if "type" in entries else "")
    if not entries or kind == "none":
        return translation.record(entry, KeyStatus.OFF, "")
    if kind is None:
        return translation.add_error(entry, f"type must be one of {', '.join(kinds)}")
    bounds = _filter_bounds(translation, entry, kind)
    if bounds is None:
        return None
    settings: dict[str, Any] = {"kind": kind, "low": -1.0, **bounds}
    if kind == "std" and num_samples and settings["low"] > 0:
        settings["low"] *= math.sqrt((num_samples - 1) / num_samples)
    return settings


def _filter_bounds(
    translation: Translation, entry: SourceKey, kind: str
) -> dict[str, float] | None:
    """Return the thresholds of a filter by native name; None if they are invalid."""
    entries = entry.node.value if isinstance(entry.node.value, dict) else {}
    bounds: Any = plain(entries["filter_args"]) if "filter_args" in entries else {}
    names = {"std_threshold": "low"}
    if kind == "mean":
        names = {"threshold_down": "low", "threshold_up": "high"}
    if not isinstance(bounds, dict):
        return translation.add_error(entry, f"filter_args must be a section of {', '.join(names)}")
    values: dict[str, float] = {}
    for key, value in cast("dict[str, Any]", bounds).items():
        if key not in names:
            message = f"filter_args.{key}: {kind}_filter accepts {', '.join(names)}"
            return translation.add_error(entry, message)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return translation.add_error(entry, f"filter_args.{key} must be a number")
        values[names[key]] = float(value)
    return values
