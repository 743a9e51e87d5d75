"""REINFORCE over the turns of an episode (Williams 1992).

The return of a turn is the sum over later turns k of step_gamma^(k - t) r_k.

K turns, N tokens. A turn's reward is the sum over its tokens. Discounting is by turn, so that the
length of a turn has no effect. The returns may be normalized: by their mean and unbiased deviation
over the step (`batch`), over the prompts of a tag or environment (`tag`), over the episodes of a
prompt (`group`), or over the turns of a prompt that began in the same state (`state`).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from msrl.algorithms import turns as episodes
from msrl.algorithms.token_rewards import Reals, TokenRewards
from msrl.algorithms.turns import Turns

NEEDS_TURNS = True


def advantages(
    rewards: TokenRewards,
    *,
    turns: Turns | None,
    eps: float,
    step_gamma: float = 0.95,
    center: Literal["none", "batch", "tag", "group", "state"] = "none",
    scale: Literal["none", "batch", "tag", "group", "state"] = "none",
    zero_alone: Literal["none", "tag", "group", "state"] = "none",
) -> Reals:  # [N]
    """Return one value for all tokens of a turn. By default there is no baseline.

    With `zero_alone`, turns that no other turn shares this scope with have 0, as in ROLL with
    deviations of the step.
    """
    checked = episodes.require_turns(turns, "step_reinforce")
    values = episodes.normalized(
        checked.returns(rewards, step_gamma),
        center=None if center == "none" else checked.labels(center),
        scale=None if scale == "none" else checked.labels(scale),
        eps=eps,
        among=checked.complete_turns,
    )
    if zero_alone != "none":
        labels = checked.labels(zero_alone)
        counts = np.bincount(labels[checked.complete_turns], minlength=int(labels.max()) + 1)
        values = np.where(counts[labels] > 1, values, 0.0)
    return checked.everywhere(values)
