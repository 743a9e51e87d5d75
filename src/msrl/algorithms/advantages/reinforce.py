"""REINFORCE (Williams 1992): the return, A_t = sum over k >= t of gamma^(k - t) r_k, with no baseline. N tokens.

Of all estimators the one of highest variance: where every reward has the same sign, all responses are pushed the same way.
"""

from __future__ import annotations

from msrl.algorithms.token_rewards import Reals, TokenRewards


def advantages(rewards: TokenRewards, *, gamma: float) -> Reals:  # [N]
    """The discounted return of every token. Groups of one completion are fine."""
    return rewards.returns(gamma)
