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
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Scope = Literal["none", "batch", "group", "tag", "domain", "running"]
Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared differences from the mean of all rewards so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_more(self, values: Reals) -> Moments:
        """Return the moments including `values` (Chan, Golub and LeVeque, 1983, equation 2.1).

        The result does not depend on the order of batches or their split.
        """
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
    *,
    center: Scope,
    scale: Scope,
    eps: float,
    running: Moments,
    tags: Sequence[str] = (),  # [P], of the scope `tag`
    domains: Sequence[str] = (),  # [P], of the scope `domain`
) -> Reals:  # [P, G]
    """Return (rewards - mean of `center`) / (standard deviation of `scale` + eps).

    `running` must include the rewards of this step.
    """
    means = {
        "none": 0.0,
        "batch": rewards.mean(),
        "group": rewards.mean(axis=1, keepdims=True),
        "tag": _by_label(rewards, tags, np.mean),
        "domain": _by_label(rewards, domains, np.mean),
        "running": running.mean,
    }
    deviations = {
        "none": np.array(0.0),
        "batch": _std(rewards.ravel()),
        "group": _std(rewards)[:, None],
        "tag": _by_label(rewards, tags, _std),
        "domain": _by_label(rewards, domains, _std),
        "running": np.array(running.std),
    }
    std = deviations[scale]
    return (rewards - means[center]) / np.where(std > eps, std + eps, 1.0)


def _by_label(
    rewards: Reals, labels: Sequence[str], statistic: Callable[[Reals], Any]
) -> Reals:  # [P, G] -> [P, 1]
    """Return for every prompt a statistic of the rewards of all prompts with its label."""
    names, values = np.array(labels or [""] * len(rewards)), np.zeros((len(rewards), 1))
    for name in np.unique(names):
        values[names == name] = statistic(rewards[names == name].ravel())
    return values


def _std(values: Reals) -> Reals:  # [..., n] -> [...]
    if values.shape[-1] < 2:
        return np.zeros(values.shape[:-1])
    return values.std(axis=-1, ddof=1)
