"""Identity preference optimization (arXiv:2310.12036, equation 17). P pairs.

The loss of a pair is (mean log-ratio of chosen - mean log-ratio of rejected - 1 / (2 beta))^2. The
means are over tokens, so that the target does not depend on the lengths.
"""

from __future__ import annotations

from msrl.algorithms.answers import PairLosses, Pairs

BETA = 0.1
NEEDS_REFERENCE = True


def preference_loss(pairs: Pairs, *, beta: float) -> PairLosses:
    """Return pair losses."""
    difference = pairs.chosen.mean_log_ratios - pairs.rejected.mean_log_ratios
    loss = (difference - 1 / (2 * beta)).square()
    rewards = [beta * side.log_ratios.detach() for side in (pairs.chosen, pairs.rejected)]
    return PairLosses(loss, *rewards)
