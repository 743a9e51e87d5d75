"""REINFORCE (Williams 1992) without a baseline. N tokens.

The advantage is the return: A_t = sum over k >= t of gamma^(k - t) r_k.

This estimator has the highest variance: if all rewards have the same sign, the probability of all
responses moves in the same direction.
"""

from __future__ import annotations

from msrl.algorithms.token_rewards import Reals, TokenRewards


def advantages(rewards: TokenRewards, *, gamma: float) -> Reals:  # [N]
    """Return the discounted return of every token. Groups of one completion are allowed."""
    return rewards.returns(gamma)
