"""REINFORCE over the turns of an episode (Williams 1992).

The return of a turn is the sum over later turns k of step_gamma^(k - t) r_k.

K turns, N tokens. A turn's reward is the sum over its tokens. Discounting is by turn, so that the
length of a turn has no effect.
"""

from __future__ import annotations

from msrl.algorithms import turns as episodes
from msrl.algorithms.token_rewards import Reals, TokenRewards
from msrl.algorithms.turns import Turns

NEEDS_TURNS = True


def advantages(
    rewards: TokenRewards, *, turns: Turns | None, step_gamma: float = 0.95
) -> Reals:  # [N]
    """Return one value for all tokens of a turn.

    There is no baseline: whiten the advantages or use gigpo.
    """
    checked = episodes.require_turns(turns, "step_reinforce")
    return checked.everywhere(checked.returns(rewards, step_gamma))
