"""Translation of verl's rewards: a function, a model, or verl's scores by `data_source`.

A row's `data_source` is the tag of its reward sources. Source: verl 1dda0392,
verl/utils/reward_score and verl/experimental/reward_loop.
"""

from __future__ import annotations

import re
from typing import Any

from msrl.config.messages import node_at, written
from msrl.config.sources import wrap
from msrl.importers.sections import Keys, settings_of
from msrl.importers.translation import KeyStatus, SourceKey
from msrl.importers.verl.algorithm import filters_by_score
from msrl.importers.verl.images import has_images
from msrl.importers.verl.sections import Sections

_FUNCTION, _MODEL = "reward.custom_reward_function", "reward.reward_model"
_MANAGERS = ("naive", "dapo", "prime", "limited", "rate_limited")
_REASONS = {
    "batch": "a function that scores all responses of a step at once. Use reward.sources.url",
    "gdpo": "the estimator gdpo",
    "remote": "a reward manager of one's own",
}


def put_rewards(sections: Sections) -> None:
    """Set the reward sources and the penalty of overlong responses."""
    keys = sections["reward"]
    manager = _manager(sections)
    if manager not in _MANAGERS:
        reason = _REASONS.get(manager, "a reward manager of one's own. Use reward.sources.function")
        name = sections["reward.reward_manager"]
        source = name if name.get("name") else keys
        key = "name" if name.get("name") else "reward_manager"
        source.add_error(key, f"not supported: {reason}")
    _record_manager(sections)
    function, model = sections[_FUNCTION], sections[_MODEL]
    if function.get("path") and function.value("path"):
        _put_function(function)
    elif model.value("enable") is True:
        _put_model(sections)
    else:
        _put_default_scores(sections)
    for key in ("path", "name", "reward_kwargs"):
        function.record(key, KeyStatus.OFF, "no function")
    for key in ("enable", "model_path", "model"):
        model.record(key, KeyStatus.OFF, "no reward model")
    _put_overlong(sections, manager)


def _manager(sections: Sections) -> str:
    earlier = sections["reward"].get("reward_manager")
    if earlier is not None and isinstance(earlier.value, str):
        return earlier.value
    return str(sections["reward.reward_manager"].value("name"))


def _record_manager(sections: Sections) -> None:
    text = "each response is scored by itself"
    keys = sections["reward.reward_manager"]
    keys.record("name", KeyStatus.SAME, text)
    sections["reward"].record("reward_manager", KeyStatus.SAME, text)
    if keys.value("source") != "register":
        keys.add_error("source", "not supported: a reward manager of one's own")
    keys.record("source", KeyStatus.OFF, "")


def _put_function(function: Keys) -> None:
    """Translate a function, which msrl calls with the arguments that it names."""
    path, name = str(function.value("path")), str(function.value("name") or "compute_score")
    source: dict[str, Any] = {"function": f"{path}:{name}"}
    options = function.get("reward_kwargs")
    if options is not None and options.value:
        source["options"] = settings_of(options)
        function.record("reward_kwargs", KeyStatus.APPLIED, "reward.sources: options")
    function.assign("path", ["reward.sources"], [source])
    function.record("name", KeyStatus.APPLIED, f"reward.sources: {name}")


def _put_model(sections: Sections) -> None:
    """Translate a reward model, whose prompts the original renders with its own template."""
    model = sections[_MODEL]
    entry = model.get("model_path", "model")
    is_text = entry is not None and isinstance(entry.value, str)
    path = entry.value if entry is not None and is_text else settings_of(entry).get("path")
    switch = model.get("enable")
    if not path or entry is None:
        return model.add_error("enable", "needs model_path, the folder of the reward model")
    text = "the original renders the conversation with the chat template of the reward model"
    source = [{"model": path}]
    model.translation.approximate(switch, "reward.sources", source, text)
    return model.record(entry.key, KeyStatus.APPLIED, f"reward.sources: {written(path)}")


# --- Scores by data source ---

_AIME = (
    "aime",
    *(f"aime{mark}{year}" for year in (24, 25, 26, 2024, 2025) for mark in ("", "_", "-")),
)
_DAPO = {
    "verifier": "verl",
    "options": {"kind": "math_dapo"},
    "name": "math_dapo",
    "wrong": -1.0,
}
_SOURCES: tuple[dict[str, Any], ...] = (
    {
        "verifier": "verl",
        "name": "gsm8k",
        "options": {"kind": "gsm8k"},
        "tags": ["openai/gsm8k"],
    },
    {
        "verifier": "verl",
        "name": "math",
        "options": {"kind": "math"},
        "tags": [
            "lighteval/MATH",
            "DigitalLearningGmbH/MATH-lighteval",
            "HuggingFaceH4/MATH-500",
        ],
    },
    {**_DAPO, "tags": ["math_dapo", "math", "math_dapo_reasoning", *_AIME]},
)

# The original compares answers with the package mathruler.
_GEOMETRY: tuple[dict[str, Any], ...] = (
    {"verifier": "math_17k_acc", "name": "geometry", "weight": 0.9, "tags": ["hiyouga/geometry3k"]},
    {
        "verifier": "regex_match",
        "name": "geometry_format",
        "options": {"pattern": r"^<think>.*</think>.*\\boxed\{.*\}"},
        "weight": 0.1,
        "tags": ["hiyouga/geometry3k"],
    },
)


def _report_geometry(keys: Keys) -> None:
    entry = keys.get("train_files")
    if entry is not None:
        text = (
            "the original compares answers of hiyouga/geometry3k with the package mathruler, msrl "
            "with the verifier math_17k_acc"
        )
        keys.translation.report_difference(entry, text)


def _put_default_scores(sections: Sections) -> None:
    """Set a source for each kind of score that msrl has; rows of other sources have none."""
    keys = sections["data"]
    sources = [dict(source) for source in _SOURCES]
    if has_images(sections):
        sources += [dict(source) for source in _GEOMETRY]
        _report_geometry(keys)
    origin = keys.origin("train_files")
    sections.translation.set("reward.sources", wrap(sources, origin))
    text = (
        f"{keys.translation.name}: rows of another data_source than those in reward.sources.tags "
    )
    sections.translation.remarks.append(text + "end the run; add a source for them")


def _put_overlong(sections: Sections, manager: str) -> None:
    """Translate the penalty of the manager dapo, at the end of the longest response."""
    keys = sections["reward"]
    entry, settings, limit = _overlong(keys)
    if entry is None:
        return
    if not settings.get("enable") or manager != "dapo":
        text = "" if not settings.get("enable") else "read by the reward manager dapo only"
        status = KeyStatus.OFF if not text else KeyStatus.DEAD
        for key in ("reward_kwargs", "overlong_buffer", "max_resp_len"):
            keys.record(key, status, text)
        return
    length = sections["data"].value("max_response_length")
    if limit is not None and limit != length:
        text = f"not supported: max_resp_len={limit}: must be data.max_response_length={length}"
        keys.translation.add_error(entry, text)
    buffer, factor = settings.get("len"), settings.get("penalty_factor", 1.0)
    for native, value in (("buffer", buffer), ("factor", factor)):
        keys.translation.set(f"reward.overlong.{native}", wrap(value, entry.origin))
    text = f"reward.overlong: buffer {buffer}, factor {factor}"
    keys.translation.record(entry, KeyStatus.APPLIED, text)
    keys.record("max_resp_len", KeyStatus.SAME, "data.max_response_length")


def _overlong(keys: Keys) -> tuple[SourceKey | None, dict[str, Any], object]:
    """Return the key of the penalty with its settings, and the length at which it ends."""
    entry = keys.get("overlong_buffer")
    if entry is not None:
        limit = keys.get("max_resp_len")
        return entry, settings_of(entry), limit.value if limit else None
    entry = keys.get("reward_kwargs")
    settings = settings_of(entry)
    return entry, settings.get("overlong_buffer_cfg") or {}, settings.get("max_resp_len")


def put_filter_source(sections: Sections) -> None:
    """Let the filter compare scores before the penalty, if the original does."""
    keys, tree = sections["algorithm.filter_groups"], sections.translation.tree
    entry = keys.get("metric")
    if not filters_by_score(sections):
        return keys.record("metric", KeyStatus.SAME, "the filter compares the rewards")
    if node_at(tree, ["reward", "overlong"]) is None or entry is None:
        return keys.record("metric", KeyStatus.SAME, "without a penalty, scores are rewards")
    function = sections[_FUNCTION]
    files = str(sections["data"].value("train_files"))
    name = "math_dapo" if re.search(r"dapo|aime", files, re.I) else None
    if function.get("path") and function.value("path"):
        name = str(function.value("name") or "compute_score")
    if name is None:
        text = "the filter would compare the rewards with their penalty"
        return keys.translation.difference(entry, text)
    return keys.assign("metric", ["rollout.filter.source"], name)
