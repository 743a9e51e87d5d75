"""Rewards of responses and of single tokens: the input of all advantage estimators.

P prompts, G completions per prompt, N tokens of all responses end to end, prompt by prompt.
Everything is float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from msrl.types import Number

Reals = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """Rewards of a step.

    The score of a response is the reward of its last token. `extra` adds rewards of single tokens,
    for example a KL penalty. `trained` selects the responses whose tokens count when advantages are
    whitened, and `decided` those with a real score; None selects all. Scores of the others count in
    no statistic. Whitening normalizes the prompts of each number in `domains` by themselves; None
    stands for one domain. `correction` is subtracted from the number of values in variances.
    """

    scores: Reals  # [P, G]
    lengths: NDArray[np.int64]  # [P, G]
    extra: Reals | None = None  # [N]
    trained: NDArray[np.bool_] | None = None  # [P, G]
    domains: NDArray[np.int64] | None = None  # [P]
    decided: NDArray[np.bool_] | None = None  # [P, G]
    correction: float = 1.0

    def __post_init__(self) -> None:
        if self.scores.ndim != 2 or self.scores.shape != self.lengths.shape:
            raise ValueError(
                f"scores {self.scores.shape} and lengths {self.lengths.shape}: "
                "both must be [prompts, completions]"
            )
        if self.extra is not None and self.extra.shape != (int(self.lengths.sum()),):
            raise ValueError(
                f"{self.extra.shape} token rewards for {int(self.lengths.sum())} tokens"
            )

    @property
    def is_decided(self) -> NDArray[np.bool_]:  # [P, G]
        """Responses with a real score."""
        return np.ones(self.scores.shape, np.bool_) if self.decided is None else self.decided

    def totals(self) -> Reals:  # [P, G]
        """Return the total reward of every response."""
        if self.extra is None:
            return self.scores
        sums = np.bincount(self._responses(), weights=self.extra, minlength=self.lengths.size)
        return self.scores + sums.reshape(self.lengths.shape)

    def everywhere(self, values: NDArray[Number]) -> NDArray[Number]:  # [P, G] -> [N]
        """Repeat one value per response for all of its tokens."""
        return np.repeat(values.ravel(), self.lengths.ravel())

    def per_token(self) -> Reals:  # [N]
        """Return the reward of every token."""
        rewards = np.zeros(int(self.lengths.sum())) if self.extra is None else self.extra.copy()
        last = self.lengths.ravel().cumsum() - 1
        has_tokens = self.lengths.ravel() > 0
        rewards[last[has_tokens]] += self.scores.ravel()[has_tokens]
        return rewards

    def returns(self, gamma: float) -> Reals:  # [N]
        """Return the discounted return of every token.

        Each later token counts `gamma` times as much.
        """
        return discounted(self.per_token(), self.lengths.ravel(), gamma)

    def whiten(self, values: Reals, eps: float) -> Reals:  # [N] -> [N]
        """Normalize token values to mean 0 and standard deviation 1.

        Tokens that are not trained on, or have no real score, do not count and become 0.
        """
        among = self.is_decided if self.trained is None else self.is_decided & self.trained
        return self._whiten(values, eps, among)

    def whitened(self, eps: float) -> TokenRewards:
        """Return a copy whose token rewards have mean 0 and standard deviation 1."""
        rewards = self._whiten(self.per_token(), eps, self.is_decided)
        return replace(self, scores=np.zeros_like(self.scores), extra=rewards)

    def _whiten(self, values: Reals, eps: float, among: NDArray[np.bool_]) -> Reals:
        """Whiten the values of every domain, of the responses in `among`."""
        if self.domains is None:
            return whiten(values, eps, self.everywhere(among), self.correction)
        result = np.zeros_like(values)
        for domain in np.unique(self.domains):
            selected = (self.domains == domain)[:, None] & among
            result += whiten(values, eps, self.everywhere(selected), self.correction)
        return result

    def _responses(self) -> NDArray[np.int64]:  # [N]
        return np.repeat(np.arange(self.lengths.size), self.lengths.ravel())


def discounted(
    values: Reals,  # [N]
    lengths: NDArray[np.int64],  # [B], their sum is N
    gamma: float,
) -> Reals:  # [N]
    """Return y_t = x_t + gamma y_{t+1} within each of B consecutive sequences."""
    order = np.argsort(-lengths, kind="stable")
    starts, longest_first = (lengths.cumsum() - lengths)[order], lengths[order]
    result, following = values.astype(np.float64), np.zeros(len(lengths))
    for t in range(int(lengths.max(initial=0)) - 1, -1, -1):
        count = int(np.searchsorted(-longest_first, -t))  # sequences of more than t tokens
        positions = starts[:count] + t
        result[positions] += gamma * following[:count]
        following[:count] = result[positions]
    return result


def whiten(
    values: Reals, eps: float, among: NDArray[np.bool_] | None = None, correction: float = 1.0
) -> Reals:
    """Return (x - mean) / (std + eps), by default with the unbiased standard deviation.

    Equal values, or fewer than two, become exactly 0.

    If `among` is set, only the selected values count and all others become 0.
    """
    counted = values if among is None else values[among]
    if len(counted) < 2 or counted.max() == counted.min():
        return np.zeros_like(values)
    whitened = (values - counted.mean()) / (counted.std(ddof=correction) + eps)
    return whitened if among is None else np.where(among, whitened, 0.0)
