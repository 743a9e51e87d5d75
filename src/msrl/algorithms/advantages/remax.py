"""ReMax (arXiv:2310.10505, section 3.3): the baseline is the reward of a greedy response.

A_t = R_t - R(greedy), where R_t is the sum of the response's rewards from token t on.

P prompts, G completions per prompt, N tokens. The baseline depends on the prompt only, so one
completion per prompt is enough.
"""

from __future__ import annotations

import numpy as np

from msrl.algorithms.token_rewards import Reals, TokenRewards

NEEDS_GREEDY = True


def advantages(
    rewards: TokenRewards,
    *,
    greedy_rewards: Reals | None,  # [P]
) -> Reals:  # [N]
    """Return the return of every token minus the reward of the prompt's greedy response."""
    assert greedy_rewards is not None, "rollouts have greedy responses for this estimator"
    baselines = np.broadcast_to(greedy_rewards[:, None], rewards.scores.shape)
    return rewards.returns(1.0) - rewards.everywhere(baselines)
