"""Rewards around a mean and in units of a deviation, each of a scope of its own. P prompts, G completions.

`batch`: all completions of the step; `group`: those of one prompt; `running`: all since the run began, this step's included. All rewards
of a step are in one place when they are normalised, so that nothing depends on how many ranks train. The deviation is the unbiased one;
where it is no more than eps (equal rewards, a single one), nothing is divided, so that no reward is blown up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Scope = Literal["none", "batch", "group", "running"]
Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared differences from the mean of the rewards so far."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def with_more(self, values: Reals) -> Moments:
        """Those of both together (Chan, Golub and LeVeque, 1983, equation 2.1): the order and the split of batches do not matter."""
        count, mean = values.size, float(values.mean())
        total, apart = self.count + count, mean - self.mean
        squares = self.squares + float(((values - mean) ** 2).sum()) + apart**2 * self.count * count / total
        return Moments(total, self.mean + apart * count / total, squares)

    @property
    def std(self) -> float:
        return (self.squares / (self.count - 1)) ** 0.5 if self.count > 1 else 0.0

    def state(self) -> dict[str, float]:
        """What a checkpoint has to hold."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @classmethod
    def of(cls, state: Mapping[str, float]) -> Moments:
        """Those that `state()` told; an empty state is the beginning."""
        return cls(int(state["count"]), float(state["mean"]), float(state["squares"])) if state else cls()


def normalised(
    rewards: Reals,  # [P, G]
    *,
    center: Scope,
    scale: Scope,
    eps: float,
    running: Moments,
) -> Reals:  # [P, G]
    """(rewards - mean of `center`) / (deviation of `scale` + eps); `running` has this step's rewards in it."""
    means = {"none": 0.0, "batch": rewards.mean(), "group": rewards.mean(axis=1, keepdims=True), "running": running.mean}
    deviation = {"none": np.array(0.0), "batch": _std(rewards.ravel()), "group": _std(rewards)[:, None], "running": np.array(running.std)}
    divisor = deviation[scale]
    return (rewards - means[center]) / np.where(divisor > eps, divisor + eps, 1.0)


def _std(values: Reals) -> Reals:  # [..., n] -> [...]
    return values.std(axis=-1, ddof=1) if values.shape[-1] > 1 else np.zeros(values.shape[:-1])
