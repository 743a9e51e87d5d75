"""From what the sources say to what is learnt from: `RewardSteps.apply` is the order of all steps on rewards. P prompts, G completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msrl.config.schema import RewardConfig
from msrl.rewards.normalize import Moments, Reals, normalised
from msrl.rewards.shaping import form_penalty, overlong, shortness
from msrl.types import ScoredGroup


@dataclass(frozen=True, slots=True)
class Processed:
    """The rewards to learn from, and what the steps did to them, by name."""

    rewards: Reals  # [P, G]
    metrics: Mapping[str, float]


class RewardSteps:
    """The steps of the `reward` section. Their one state is the moments of `running`."""

    def __init__(self, config: RewardConfig, max_response_tokens: int, state: Mapping[str, float]) -> None:
        """`state` is what `state()` returned when the checkpoint to go on from was saved, or empty."""
        self._config, self._limit, self._running = config, max_response_tokens, Moments.of(state)

    def state(self) -> dict[str, float]:
        """What a checkpoint has to hold."""
        return self._running.state()

    def apply(self, groups: Sequence[ScoredGroup]) -> Processed:
        """In this order: the weighted sum of the sources (the totals of `groups`), plus shaping (form, length, overlong), cut at +-`clip`,
        normalised (minus the mean, over the deviation).

        What follows is the `algo` section's: the penalty of the KL divergence, returns, whitening, the cut of advantages.
        """
        totals = np.array([[reward.total for reward in group.rewards] for group in groups], dtype=np.float64)
        shapes = self._shapes(groups, totals)
        shaped = totals + sum(shapes.values(), start=np.zeros_like(totals))
        clip = self._config.clip
        cut = shaped if clip is None else shaped.clip(-clip, clip)
        self._running = self._running.with_more(cut)
        norm = self._config.norm
        rewards = normalised(cut, center=norm.center, scale=norm.scale, eps=norm.eps, running=self._running)
        return Processed(rewards, self._metrics(shapes, shaped, cut))

    def _shapes(self, groups: Sequence[ScoredGroup], totals: Reals) -> dict[str, Reals]:
        """What shaping adds, by its name, each [P, G]; only what is switched on."""
        config, found = self._config, dict[str, Reals]()
        completions = [group.rollout.completions for group in groups]
        lengths = np.array([[len(c.token_ids) for c in group] for group in completions], dtype=np.float64)
        if config.format_penalty:
            found["format_penalty"] = form_penalty([[c.text for c in group] for group in completions], penalty=config.format_penalty)
        if config.length.coef:
            found["length_reward"] = shortness(lengths, totals > config.length.right_above, coef=config.length.coef)
        if config.overlong.buffer:
            found["overlong_penalty"] = overlong(
                lengths, limit=self._limit, buffer=config.overlong.buffer, factor=config.overlong.factor
            )  # fmt: skip
        return found

    def _metrics(self, shapes: Mapping[str, Reals], shaped: Reals, cut: Reals) -> dict[str, float]:
        metrics: dict[str, Any] = {name: values.mean() for name, values in shapes.items()}
        if shapes:
            metrics["shaped_reward"] = shaped.mean()
        if self._config.clip is not None:
            metrics["clipped_rewards"] = (shaped != cut).mean()
        if "running" in (self._config.norm.center, self._config.norm.scale):
            metrics |= {"running_mean": self._running.mean, "running_std": self._running.std}
        return {name: float(value) for name, value in metrics.items()}
