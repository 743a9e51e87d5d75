"""Generalised advantage estimation (arXiv:1506.02438, equation 16), the advantages of PPO with a
critic.

A_t = sum over k >= 0 of (gamma lambda)^k d_{t+k} with d_t = r_t + gamma V_{t+1} - V_t. P prompts, G
completions per prompt, N tokens; V_t is the critic's value of what precedes token t, and 0 behind a
response's last token. lambda 0 trusts the critic alone, lambda 1 the rewards.
"""

from __future__ import annotations

import numpy as np

from msrl.algorithms.token_rewards import Reals, TokenRewards, discounted

NEEDS_VALUES = True


def advantages(
    rewards: TokenRewards, *, values: Reals, gamma: float, lam: float
) -> Reals:  # [N] -> [N]
    """`values` are the critic's, [N]. Groups of one completion are fine. What the critic is to
    learn is A + V.
    """
    lengths = rewards.lengths.ravel()
    last = lengths.cumsum() - 1
    following = np.append(values[1:], 0.0)
    following[last[lengths > 0]] = 0.0
    return discounted(rewards.per_token() + gamma * following - values, lengths, gamma * lam)
