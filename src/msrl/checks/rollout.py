"""What can be known wrong in `rollout.filter`."""

from __future__ import annotations

from collections.abc import Iterator

from msrl.config.loader import Resolved
from msrl.rewards import sources

_BOUNDS = {"none": (), "all_equal": (), "mean": ("low", "high"), "std": ("low",)}


def rollout_filter(resolved: Resolved) -> Iterator[str]:
    """Bounds that fit the kind, groups that can be compared, a source that there is, and nothing that has no effect."""
    section = resolved.config.rollout.filter
    is_set = [name for name in ("low", "high", "source", "max_refills", "extra_prompts") if resolved.is_set(f"rollout.filter.{name}")]
    if section.kind == "none":
        for name in [*is_set, *(["refill"] if section.refill else [])]:
            yield resolved.mistake(f"rollout.filter.{name}", "has no effect without rollout.filter.kind; set all_equal, mean or std")
        return
    for name in is_set:
        if name in ("low", "high") and name not in _BOUNDS[section.kind]:
            yield resolved.mistake(f"rollout.filter.{name}", f"has no effect with rollout.filter.kind={section.kind}; take it away")
        if name in ("max_refills", "extra_prompts") and not section.refill:
            yield resolved.mistake(f"rollout.filter.{name}", "has no effect without rollout.filter.refill=true; set it")
    if _BOUNDS[section.kind] and all(getattr(section, name) is None for name in _BOUNDS[section.kind]):
        bounds = " or ".join(f"rollout.filter.{name}" for name in _BOUNDS[section.kind])
        yield resolved.mistake("rollout.filter.kind", f"needs {bounds}; set it")
    if section.kind == "mean" and section.low is not None and section.high is not None and section.low >= section.high:
        yield resolved.mistake("rollout.filter.low", f"must be below rollout.filter.high={section.high}")
    if section.kind != "mean" and resolved.config.rollout.samples_per_prompt < 2:
        yield resolved.mistake("rollout.filter.kind", "compares the samples of a prompt; set rollout.samples_per_prompt to 2 or more")
    known = [sources.Source.of(one).label for one in resolved.config.reward.sources]
    if section.source is not None and section.source not in known:
        yield resolved.mistake("rollout.filter.source", f"is none of reward.sources, whose names are {', '.join(known)}")
