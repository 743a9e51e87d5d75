"""What can be known wrong in the `reward` section."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from msrl.config.loader import Resolved


def rewards(resolved: Resolved) -> Iterator[str]:
    """What the rewards say of their own sources; asked by name, as plugins are."""
    scoring = importlib.import_module("msrl.rewards.sources")
    for number, key, message in scoring.mistakes([scoring.Source.of(section) for section in resolved.config.reward.sources]):
        if number is None:
            yield f"reward.sources: {message}"
        else:
            yield resolved.mistake(f"reward.sources.{number}.{key}", message)
    yield from _reward_steps(resolved)


def _reward_steps(resolved: Resolved) -> Iterator[str]:
    reward, rollout = resolved.config.reward, resolved.config.rollout
    if reward.overlong.buffer > rollout.max_response_tokens:
        yield resolved.mistake("reward.overlong.buffer", f"must be at most rollout.max_response_tokens={rollout.max_response_tokens}")
    for key in ("center", "scale"):
        if getattr(reward.norm, key) == "group" and rollout.samples_per_prompt < 2:
            yield resolved.mistake(f"reward.norm.{key}", "compares the samples of a prompt; set rollout.samples_per_prompt to 2 or more")
    if reward.length.coef and rollout.samples_per_prompt < 2:
        yield resolved.mistake("reward.length.coef", "compares the samples of a prompt; set rollout.samples_per_prompt to 2 or more")
    for key, switch in (("overlong.factor", reward.overlong.buffer), ("length.right_above", reward.length.coef)):
        if resolved.is_set(f"reward.{key}") and not switch:
            other = {"overlong.factor": "reward.overlong.buffer", "length.right_above": "reward.length.coef"}[key]
            yield resolved.mistake(f"reward.{key}", f"has no effect without {other}")
