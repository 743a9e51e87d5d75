"""Normalization of rewards by a mean and a standard deviation. P prompts, G completions.

The mean and the standard deviation have separate scopes:

- `batch`: all completions of the step.
- `group`: the completions of one prompt.
- `tag`: the completions of all prompts of the step with the same tag.
- `domain`: the completions of all prompts of the step with the same reward sources.
- `running`: all completions since the start of the run, including this step.

The driver normalizes all rewards of a step together, so the result does not depend on the number of
training ranks. The standard deviation is the unbiased one. If it is at most eps (equal rewards, or
a single reward), rewards are not divided, because that would amplify rounding errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from msrl.config.sections.reward import NormScope

Reals = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared differences from the mean of all rewards so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_more(self, values: Reals) -> Moments:  # [N]
        """Return the moments including `values` (Chan, Golub and LeVeque, 1983, equation 2.1).

        The result does not depend on the order of batches or their split.
        """
        if not values.size:
            return self
        count, mean = values.size, float(values.mean())
        total, difference = self.count + count, mean - self.mean
        batch_squares = float(((values - mean) ** 2).sum())
        squares = self.squares + batch_squares + difference**2 * self.count * count / total
        return Moments(total, self.mean + difference * count / total, squares)

    @property
    def std(self) -> float:
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0

    def state(self) -> dict[str, float]:
        """Return the state to save in a checkpoint."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @classmethod
    def of(cls, state: Mapping[str, float]) -> Moments:
        """Restore the moments from `state()`; an empty state is the start of a run."""
        if not state:
            return cls()
        return cls(int(state["count"]), float(state["mean"]), float(state["squares"]))


def normalize(
    rewards: Reals,  # [P, G]
    decided: Flags,  # [P, G], True for real rewards
    *,
    center: NormScope,
    scale: NormScope,
    eps: float,
    running: Moments,
    tags: Sequence[str] = (),  # [P], of the scope `tag`
    domains: Sequence[str] = (),  # [P], of the scope `domain`
) -> Reals:  # [P, G]
    """Return (rewards - mean of `center`) / (standard deviation of `scale` + eps).

    `running` must include the rewards of this step. Only real rewards count, and all others become
    0.
    """
    scopes: dict[str, NDArray[Any]] = {
        "batch": np.zeros(len(rewards)),
        "group": np.arange(len(rewards)),
        "tag": np.array(tags or [""] * len(rewards)),
        "domain": np.array(domains or [""] * len(rewards)),
    }
    means, std = np.zeros((len(rewards), 1)), np.zeros((len(rewards), 1))
    if center == "running":
        means[:] = running.mean
    elif center != "none":
        means = _by_label(rewards, decided, scopes[center], np.mean)
    if scale == "running":
        std[:] = running.std
    elif scale != "none":
        std = _by_label(rewards, decided, scopes[scale], _std)
    return np.where(decided, (rewards - means) / np.where(std > eps, std + eps, 1.0), 0.0)


def _by_label(
    rewards: Reals,  # [P, G]
    decided: Flags,  # [P, G]
    labels: NDArray[Any],  # [P]
    statistic: Callable[[Reals], Any],
) -> Reals:  # [P, 1]
    """Return for every prompt a statistic of the real rewards of all prompts with its label."""
    values = np.zeros((len(rewards), 1))
    for label in np.unique(labels):
        members = labels == label
        counted = rewards[members][decided[members]]
        if counted.size:
            values[members] = statistic(counted)
    return values


def _std(values: Reals) -> float:  # [N]
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
