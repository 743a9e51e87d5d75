"""OPO (arXiv:2505.23585): the baseline is the mean reward weighted by length.

A_i = R_i - sum(l R) / sum(l) over the completions of one prompt, with lengths l in tokens.

P prompts, G completions per prompt, N tokens. This baseline minimizes the variance of the gradient
if the gradient's size grows with the length. The paper trains on-policy, without KL and entropy
terms.
"""

from __future__ import annotations

from msrl.algorithms.advantages._groups import centered, group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True


def advantages(rewards: TokenRewards) -> Reals:  # [N]
    """Return one value for all tokens of a response; exactly 0 for a group of equal rewards."""
    decided = rewards.is_decided
    distances = centered(group_totals(rewards, "opo"), decided)
    lengths = rewards.lengths * decided
    shift = (lengths * distances).sum(axis=1, keepdims=True)
    values = distances - shift / lengths.sum(axis=1, keepdims=True).clip(min=1)
    return rewards.everywhere(values * decided)
