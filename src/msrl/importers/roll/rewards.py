"""Translation of ROLL's rewards and prompt filters to reward.sources and rollout.filter."""

from __future__ import annotations

import math
from typing import Any, cast

from msrl.config.sources import plain, wrap
from msrl.importers.native_keys import refusal
from msrl.importers.sections import Keys, settings_of
from msrl.importers.table import as_list, is_number
from msrl.importers.translation import KeyStatus, SourceKey, Translation

# math_17k_acc scores 1 for a correct boxed answer, else 0.
_VERIFIERS = {
    "MathRuleRewardWorker": "math_17k_acc",
    "MultipleChoiceBoxedRuleRewardWorker": "multiple_choice",
    "CodeSandboxRewardWorker": "code",
    "CrossThinkQARuleRewardWorker": "crossthinkqa",
    "GeneralRuleRewardWorker": "ifeval",
    "DetectionRewardWorker": "box_iou",
}
# Workers that add a penalty of up to 0.5 for repeated trigrams.
_PENALIZED = ("CrossThinkQARuleRewardWorker", "GeneralRuleRewardWorker")
_REPETITION = {
    "verifier": "repetition",
    "options": {"ngram": 3, "max_penalty": 0.5, "words": "spaces"},
}
_JUDGE = "LLMJudgeRewardWorker"
_SERVED = "http://127.0.0.1:8000/v1"  # where `msrl serve` serves the model of a judge
_JUDGE_KEY = "JUDGE_API_KEY"


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
        keys = Keys.read(translation, "reward", node, f"rewards.{name}")
        for source in _sources(translation, keys):
            label = source.get("verifier", "judge")
            if label in labels:
                source["name"] = f"{name}_{label}" if label == "repetition" else name
            labels.append(label)
            sources.append(source)
        filters.append(keys.get("query_filter_config"))
        _record_remaining(translation, keys)
    _put_filters(translation, filters, top.number("num_return_sequences_in_group"))
    if section is not None:
        translation.record(section, KeyStatus.APPLIED, "domain by domain")
    if sources and section is not None:
        translation.set("reward.sources", wrap(sources, section.origin))


def _record_remaining(translation: Translation, keys: Keys) -> None:
    """Record the keys of a domain that no source uses."""
    worker = keys.get("worker_cls")
    name = "" if worker is None else str(worker.value).rpartition(".")[2]
    for entry in keys:
        status, reason = translation.row(entry).neutral
        if entry.key == "query_filter_config":
            continue
        if reason:
            translation.record(entry, status, reason)
        elif name not in (*_VERIFIERS, _JUDGE):
            text = "the domain has no reward source"
            translation.record(entry, KeyStatus.DROPPED, text)
        else:
            text = "implementation detail of the reward in the original"
            translation.record(entry, KeyStatus.SAME, text)


def _sources(translation: Translation, keys: Keys) -> list[dict[str, Any]]:
    """Return the reward sources of a domain: the verifier, and penalties that its worker adds."""
    worker = keys.get("worker_cls")
    if worker is None:
        return []
    name = str(worker.value).rpartition(".")[2]
    verifier = _VERIFIERS.get(name)
    if name != _JUDGE and (verifier is None or refusal("reward.sources.verifier", verifier)):
        text = f"msrl has no verifier like {name}; rows of this domain need a reward source"
        translation.difference(worker, text)
        return []
    tags = keys.get("tag_included")
    rows: dict[str, Any] = {}
    if tags is not None:
        translation.record(tags, KeyStatus.APPLIED, "reward.sources: tags")
        rows = {"tags": [str(tag) for tag in as_list(tags.value)]}
    if name == _JUDGE:
        return [{**_judge(translation, keys, worker), **rows}]
    if name == "DetectionRewardWorker":
        text = "the original mixes several scores of boxes and of the format, msrl takes the mean "
        translation.report_difference(worker, text + "overlap")
    translation.record(worker, KeyStatus.APPLIED, f"reward.sources: {verifier}")
    source: dict[str, Any] = {"verifier": verifier, **rows, **_options(translation, keys, name)}
    return [source, {**_REPETITION, **rows}] if name in _PENALIZED else [source]


def _judge(translation: Translation, keys: Keys, worker: SourceKey) -> dict[str, Any]:
    """Return the source of a domain that a language model judges: by an API, or one to serve."""
    is_api = keys.value("judge_model_type") in (None, "api")
    sections = {name: settings_of(keys.get(name)) for name in ("model_args", "generating_args")}
    path = str(sections["model_args"].get("model_name_or_path") or "<model>").rstrip("/")
    model = str(keys.value("judge_model_name") or "<model>") if is_api else path.rpartition("/")[2]
    options: dict[str, Any] = {"model": model}
    for key, native in (("temperature", "temperature"), ("max_new_tokens", "max_tokens")):
        if is_number(value := sections["generating_args"].get(key)):
            options[native] = float(value) if native == "temperature" else value
    if keys.get("judge_api_key") is not None:
        options["headers"] = {"Authorization": f"Bearer ${{env:{_JUDGE_KEY}}}"}
        text = f"export {_JUDGE_KEY}, which reward.sources: options.headers names"
        keys.record("judge_api_key", KeyStatus.APPLIED, text)
    text = "a language model as judge, which msrl asks with a prompt of its own; a verdict that "
    text += "cannot be read is undecided, not 0"
    if not is_api:
        text += f". Start it with `msrl serve {path}`"
    translation.report_difference(worker, text)
    for key in ("worker_cls", "judge_model_type", "judge_model_name", "judge_api_url"):
        keys.record(key, KeyStatus.APPLIED, "reward.sources: judge")
    for key in ("model_args", "generating_args"):
        keys.record(key, KeyStatus.APPLIED, "reward.sources: options of the judge")
    url = str(keys.value("judge_api_url") or "<address of the judge>") if is_api else _SERVED
    return {"judge": url, "options": options}


def _options(translation: Translation, keys: Keys, worker: str) -> dict[str, Any]:
    """Return the options of a verifier; report what its worker computes differently."""
    if worker == "GeneralRuleRewardWorker":
        return {"options": {"counts_all_words": True}}
    if worker != "CrossThinkQARuleRewardWorker":
        return {}
    penalty = keys.get("response_length_penalty_coef")
    if penalty is not None and penalty.value:
        translation.difference(penalty, "msrl has no penalty of responses below 400 tokens")
    kind = keys.get("reward_type")
    if kind is None:
        return {}
    translation.record(kind, KeyStatus.APPLIED, "reward.sources: options.reward_type")
    return {"options": {"reward_type": kind.value}}


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
        if not is_number(value):
            return translation.add_error(entry, f"filter_args.{key} must be a finite number")
        values[names[key]] = float(value)
    return values
