"""REINFORCE over the turns of an episode (Williams 1992): the return of a turn, sum over later turns k of step_gamma^(k - t) r_k.

K turns, N tokens. A turn gets what all of its tokens get; discounting goes by turns, so that long answers are no further away.
"""

from __future__ import annotations

from msrl.algorithms import turns as episodes
from msrl.algorithms.token_rewards import Reals, TokenRewards
from msrl.algorithms.turns import Turns

NEEDS_TURNS = True


def advantages(rewards: TokenRewards, *, turns: Turns | None, step_gamma: float = 0.95) -> Reals:  # [N]
    """The same number on all tokens of a turn. No baseline: whiten it, or use gigpo."""
    given = episodes.needed(turns, "step_reinforce")
    return given.everywhere(given.returns(rewards, step_gamma))
