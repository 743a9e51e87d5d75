"""GPG (arXiv:2504.02546): group-relative rewards, scaled up for uninformative groups.

A = alpha (R - mean of the group) with alpha = B / (B - M): B completions of a step, M of them in
groups of equal rewards, which have no gradient. With `count: rewards`, alpha is B divided by the
number of rewards that are not 0, as in verl.

P prompts, G completions per prompt, N tokens. Its policy loss is `algo.policy_loss: gpg`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from msrl.algorithms.advantages._groups import centered, group_totals
from msrl.algorithms.token_rewards import Reals, TokenRewards

COMPARES_GROUPS = True


def advantages(
    rewards: TokenRewards, *, count: Literal["groups", "rewards"] = "groups"
) -> Reals:  # [N]
    """Return one value for all tokens of a response; exactly 0 for a group of equal rewards."""
    totals, decided = group_totals(rewards, "gpg"), rewards.is_decided
    distances = centered(totals, decided)
    if count == "groups":
        num_counted = np.count_nonzero(decided[distances.any(axis=1)])
    elif count == "rewards":
        num_counted = np.count_nonzero(totals[decided])
    else:
        raise ValueError(f"count={count}: must be groups or rewards")
    return rewards.everywhere(distances * (decided.sum() / max(num_counted, 1)))
