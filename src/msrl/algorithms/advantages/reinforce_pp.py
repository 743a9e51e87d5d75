"""REINFORCE++ (arXiv:2501.03262).

The advantage is the discounted return of a token, normalized to a z-score over all trained tokens.

N tokens. Use `algo.kl.reward` for a KL penalty. Groups of one completion are allowed.
"""

from __future__ import annotations

from msrl.algorithms.token_rewards import Reals, TokenRewards


def advantages(rewards: TokenRewards, *, gamma: float, eps: float) -> Reals:  # [N]
    """Return normalized returns; exactly 0 everywhere if all are equal."""
    return rewards.whiten(rewards.returns(gamma), eps)
