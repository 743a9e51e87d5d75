"""Processing of source scores into training rewards. P prompts, G completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from msrl.config.sections.reward import RewardConfig
from msrl.rewards.normalize import Moments, Reals, normalize
from msrl.rewards.shaping import format_penalty, length_reward, overlong_penalty
from msrl.rewards.sources import TAG
from msrl.types import Prompt, ScoredGroup


@dataclass(frozen=True, slots=True)
class Processed:
    """Processed rewards, 0 if they are not decided, and metrics of the processing steps."""

    rewards: Reals  # [P, G]
    metrics: Mapping[str, float]


class RewardSteps:
    """Steps of the `reward` section. Their only state is the moments of the scope `running`."""

    def __init__(
        self, config: RewardConfig, max_response_tokens: int, state: Mapping[str, float]
    ) -> None:
        """Restore the steps from `state()` of a checkpoint, or from an empty state."""
        self._config, self._max_tokens = config, max_response_tokens
        self._running = Moments.of(state)

    def state(self) -> dict[str, float]:
        """Return the state to save in a checkpoint."""
        return self._running.state()

    def apply(self, groups: Sequence[ScoredGroup]) -> Processed:
        """Return the training rewards of scored groups.

        The steps are applied in this order:

        1. The weighted sum of the sources, which is the total of each reward in `groups`.
        2. Shaping: format penalty, length reward and overlong penalty are added.
        3. Clipping to [-`clip`, `clip`].
        4. Normalization: subtract the mean, divide by the standard deviation, and clip the result
           to `norm.clip`.

        The `algo` section defines the steps after that: KL penalty, returns, whitening and clipping
        of advantages.
        """
        shaping, shaped, clipped = self._shape(groups)
        decided = np.array([group.is_decided for group in groups])
        self._running = self._running.with_more(clipped[decided])
        norm = self._config.norm
        rewards = normalize(
            clipped,
            decided,
            center=norm.center,
            scale=norm.scale,
            eps=norm.eps,
            running=self._running,
            tags=[group.tag for group in groups],
            domains=domains(self._config, [group.rollout.prompt for group in groups]),
        )
        if norm.clip is not None:
            rewards = np.where(decided, rewards.clip(*norm.clip), 0.0)
        counted = {name: values[decided] for name, values in shaping.items()}
        return Processed(rewards, self._metrics(counted, shaped[decided], clipped[decided]))

    def greedy_rewards(self, groups: Sequence[ScoredGroup]) -> Reals:  # [P]
        """Return the shaped and clipped reward of the greedy response of every group.

        Normalization and the length reward compare responses, so they do not apply.
        """
        _, _, clipped = self._shape([group.greedy for group in groups if group.greedy is not None])
        return clipped[:, 0]

    def _shape(
        self, groups: Sequence[ScoredGroup]
    ) -> tuple[dict[str, Reals], Reals, Reals]:  # [P, G] each
        """Return the shaping terms, and the rewards before and after clipping."""
        totals = _totals(groups)
        shaping = self._shaping(groups, totals)
        shaped = totals + sum(shaping.values(), start=np.zeros_like(totals))
        clip = self._config.clip
        return shaping, shaped, shaped if clip is None else shaped.clip(-clip, clip)

    def _shaping(self, groups: Sequence[ScoredGroup], totals: Reals) -> dict[str, Reals]:
        """Return the enabled shaping terms by metric name, each [P, G]."""
        config = self._config
        terms: dict[str, Reals] = {}
        lengths = _lengths(groups)
        if config.format_penalty:
            texts = [_texts(group) for group in groups]
            terms["format_penalty"] = format_penalty(texts, penalty=config.format_penalty)
        if config.length.coef:
            is_right = totals > config.length.right_above
            decided = np.array([group.is_decided for group in groups])
            coef = config.length.coef
            terms["length_reward"] = length_reward(lengths, is_right, decided, coef=coef)
        if config.overlong.buffer:
            terms["overlong_penalty"] = overlong_penalty(
                lengths,
                limit=self._max_tokens,
                buffer=config.overlong.buffer,
                factor=config.overlong.factor,
            )
        return terms

    def _metrics(
        self,
        shaping: Mapping[str, Reals],  # [N] each, of real rewards
        shaped: Reals,  # [N]
        clipped: Reals,  # [N]
    ) -> dict[str, float]:
        metrics: dict[str, Any] = {}
        if shaped.size:
            metrics = {name: values.mean() for name, values in shaping.items()}
        if shaping and shaped.size:
            metrics["shaped_reward"] = shaped.mean()
        if self._config.clip is not None and shaped.size:
            metrics["clipped_rewards"] = (shaped != clipped).mean()
        if "running" in (self._config.norm.center, self._config.norm.scale):
            metrics["running_mean"] = self._running.mean
            metrics["running_std"] = self._running.std
        return {name: float(value) for name, value in metrics.items()}


def domains(config: RewardConfig, prompts: Sequence[Prompt]) -> list[str]:  # [P]
    """Return for every prompt the numbers of the sources that score its row, as a text."""
    return [_domain(config, prompt.extra.get(TAG)) for prompt in prompts]


def _domain(config: RewardConfig, tag: str | None) -> str:
    numbers = [
        i for i, source in enumerate(config.sources) if not source.tags or tag in source.tags
    ]
    return " ".join(map(str, numbers))


def _totals(groups: Sequence[ScoredGroup]) -> Reals:  # [P, G]
    rows: list[list[float]] = []
    for group in groups:
        rows.append([reward.total for reward in group.rewards])
    return np.array(rows, dtype=np.float64)


def _lengths(groups: Sequence[ScoredGroup]) -> Reals:  # [P, G] response tokens
    rows: list[list[int]] = []
    for group in groups:
        rows.append([len(completion.token_ids) for completion in group.rollout.completions])
    return np.array(rows, dtype=np.float64)


def _texts(group: ScoredGroup) -> list[str]:
    return [completion.text for completion in group.rollout.completions]
