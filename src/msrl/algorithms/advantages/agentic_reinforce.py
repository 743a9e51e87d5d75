"""REINFORCE over the turns of an episode, discounted by `algo.advantage.gamma` (Williams 1992).

The return of a turn is the sum over later turns k of gamma^(k - t) r_k. K turns, N tokens.
"""

from __future__ import annotations

from msrl.algorithms import turns as episodes
from msrl.algorithms.token_rewards import Reals, TokenRewards
from msrl.algorithms.turns import Turns

NEEDS_TURNS = True


def advantages(rewards: TokenRewards, *, turns: Turns | None, gamma: float) -> Reals:  # [N]
    """Return one value for all tokens of a turn. There is no baseline."""
    checked = episodes.require_turns(turns, "agentic_reinforce")
    return checked.everywhere(checked.returns(rewards, gamma))
