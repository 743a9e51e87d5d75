"""REINFORCE++ (arXiv:2501.03262): the discounted return of every token, then the z-score over all tokens that the step learns from.

N tokens. The penalty for leaving the reference belongs into the rewards of tokens (`algo.kl.reward`). Groups of one completion are fine.
"""

from __future__ import annotations

from msrl.algorithms.token_rewards import Reals, TokenRewards


def advantages(rewards: TokenRewards, *, gamma: float, eps: float) -> Reals:  # [N]
    """Normalised returns; exactly 0 everywhere when all are equal."""
    return rewards.whiten(rewards.returns(gamma), eps)
