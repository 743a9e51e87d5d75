"""Optimal token baseline: the baseline of each position that minimizes the gradient's variance.

A_t = G_t - B_t with the return G_t and, over the completions of a prompt that reach token t, B_t =
sum(W_t G_t) / sum(W_t). W_t sums 1 - 2 p + sum over the vocabulary of p^2, the squared norm of the
gradient of log p by the logits, over the tokens up to t. Where only one completion continues, the
baseline is 0, as in verl.

P prompts, G completions per prompt, T tokens of the longest one, N tokens of all. There is no
discounting.
"""

from __future__ import annotations

import numpy as np

from msrl.algorithms.advantages._groups import group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True
NEEDS_DISTRIBUTION = True


def advantages(
    rewards: TokenRewards, *, logprobs: Reals, squared_probabilities: Reals
) -> Reals:  # [N]
    """Return one value per token.

    `logprobs` [N] are those of the policy that sampled, and `squared_probabilities` [N] the sums of
    p^2 over the vocabulary.
    """
    group_totals(rewards, "optimal_token_baseline")
    lengths = rewards.lengths
    runs = np.arange(int(lengths.max(initial=0))) < lengths[..., None]  # [P, G, T]
    returns, norms = np.zeros(runs.shape), np.zeros(runs.shape)
    returns[runs] = rewards.returns(1.0)
    norms[runs] = 1.0 - 2.0 * np.exp(logprobs) + squared_probabilities
    counted = runs & rewards.is_decided[..., None]
    weights = norms.cumsum(axis=2) * counted
    first = counted.argmax(axis=1)[:, None]  # [P, 1, T], the first completion that continues
    # Distances from one return, so that equal returns give exactly 0.
    origin = np.take_along_axis(returns, first, axis=1)
    shift, total = (weights * (returns - origin)).sum(axis=1), weights.sum(axis=1)  # [P, T]
    shift = np.divide(shift, total, out=np.zeros_like(shift), where=total > 0)
    baseline = np.where(counted.sum(axis=1) > 1, origin[:, 0] + shift, 0.0)
    return (returns - baseline[:, None])[runs]
