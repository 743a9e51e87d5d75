"""Rewards of whole responses and of single tokens, from which every advantage is computed.

P prompts, G completions of each, N tokens of all responses end to end, prompt by prompt. Everything is float64.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Reals = NDArray[np.float64]
Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class TokenRewards:
    """The reward of a response is given at its last token; `extra` is what single tokens get besides (a KL penalty, say). `learnt` are the
    responses that count where advantages are whitened, all of them where it is None.
    """

    scores: Reals  # [P, G]
    lengths: NDArray[np.int64]  # [P, G]
    extra: Reals | None = None  # [N]
    learnt: NDArray[np.bool_] | None = None  # [P, G]

    def __post_init__(self) -> None:
        if self.scores.ndim != 2 or self.scores.shape != self.lengths.shape:
            raise ValueError(f"scores {self.scores.shape} and lengths {self.lengths.shape}: [prompts, completions] is wanted for both")
        if self.extra is not None and self.extra.shape != (int(self.lengths.sum()),):
            raise ValueError(f"{self.extra.shape} rewards of tokens for {int(self.lengths.sum())} tokens")

    def totals(self) -> Reals:  # [P, G]
        """All that a response got."""
        if self.extra is None:
            return self.scores
        sums = np.bincount(self._responses(), weights=self.extra, minlength=self.lengths.size)
        return self.scores + sums.reshape(self.lengths.shape)

    def everywhere(self, values: NDArray[Number]) -> NDArray[Number]:  # [P, G] -> [N]
        """A number of each response, on all of its tokens."""
        return np.repeat(values.ravel(), self.lengths.ravel())

    def per_token(self) -> Reals:  # [N]
        """What each token got."""
        found = np.zeros(int(self.lengths.sum())) if self.extra is None else self.extra.copy()
        last = self.lengths.ravel().cumsum() - 1
        has_tokens = self.lengths.ravel() > 0
        found[last[has_tokens]] += self.scores.ravel()[has_tokens]
        return found

    def returns(self, gamma: float) -> Reals:  # [N]
        """What each token and those after it got, a token later counting `gamma` times as much."""
        return discounted(self.per_token(), self.lengths.ravel(), gamma)

    def whiten(self, values: Reals, eps: float) -> Reals:  # [N] -> [N]
        """Numbers of all tokens at mean 0 and deviation 1; what is not learnt from does not count, and becomes 0."""
        return whiten(values, eps, None if self.learnt is None else self.everywhere(self.learnt))

    def whitened(self, eps: float) -> TokenRewards:
        """The same with the rewards of all tokens at mean 0 and deviation 1."""
        return TokenRewards(np.zeros_like(self.scores), self.lengths, whiten(self.per_token(), eps), self.learnt)

    def _responses(self) -> NDArray[np.int64]:  # [N]
        return np.repeat(np.arange(self.lengths.size), self.lengths.ravel())


def discounted(
    values: Reals,  # [N]
    lengths: NDArray[np.int64],  # [B], their sum is N
    gamma: float,
) -> Reals:  # [N]
    """y_t = x_t + gamma y_{t+1} within each of B sequences that lie end to end."""
    order = np.argsort(-lengths, kind="stable")
    starts, longest_first = (lengths.cumsum() - lengths)[order], lengths[order]
    result, carried = values.astype(np.float64), np.zeros(len(lengths))
    for t in range(int(lengths.max(initial=0)) - 1, -1, -1):
        count = int(np.searchsorted(-longest_first, -t))  # sequences of more than t tokens
        places = starts[:count] + t
        result[places] += gamma * carried[:count]
        carried[:count] = result[places]
    return result


def whiten(values: Reals, eps: float, among: NDArray[np.bool_] | None = None) -> Reals:
    """(x - mean) / (standard deviation + eps), the deviation divided by N - 1; equal values, or fewer than two, become exactly 0.

    With `among` these are counted alone, and all others become 0.
    """
    counted = values if among is None else values[among]
    if len(counted) < 2 or counted.max() == counted.min():
        return np.zeros_like(values)
    whitened = (values - counted.mean()) / (counted.std(ddof=1) + eps)
    return whitened if among is None else np.where(among, whitened, 0.0)
