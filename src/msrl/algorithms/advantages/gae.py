"""Generalized advantage estimation (arXiv:1506.02438, equation 16): PPO with a critic.

A_t = sum over k >= 0 of (gamma lambda)^k d_{t+k} with d_t = r_t + gamma V_{t+1} - V_t. P prompts, G
completions per prompt, N tokens. V_t is the critic's value of the tokens before token t, and 0
after the last token of a response. lambda 0 relies on the critic alone, lambda 1 on the rewards.
"""

from __future__ import annotations

import numpy as np

from msrl.algorithms.token_rewards import Reals, TokenRewards, discounted

NEEDS_VALUES = True


def advantages(
    rewards: TokenRewards, *, values: Reals, gamma: float, lam: float
) -> Reals:  # [N] -> [N]
    """Return one advantage per token. The target of the critic is A + V.

    `values` [N] are the critic's predictions. Groups of one completion are allowed.
    """
    lengths = rewards.lengths.ravel()
    last = lengths.cumsum() - 1
    following = np.append(values[1:], 0.0)
    following[last[lengths > 0]] = 0.0
    return discounted(rewards.per_token() + gamma * following - values, lengths, gamma * lam)
