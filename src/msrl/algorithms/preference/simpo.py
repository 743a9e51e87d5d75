"""Simple preference optimization, without a reference (arXiv:2405.14734). P pairs.

The loss of a pair is -log sigmoid(beta (mean log-probability of chosen - that of rejected) - gamma
- margin). The means are over tokens.
"""

from __future__ import annotations

from typing import Literal

from msrl.algorithms.answers import PairLosses, Pairs, logistic_loss

BETA = 2.0
READS_MARGINS = True
OPTION_RANGES = {"gamma": (-1e-9, None), "label_smoothing": (-1e-9, 0.5)}


def preference_loss(
    pairs: Pairs,
    *,
    beta: float,
    gamma: float = 1.0,
    form: Literal["sigmoid", "hinge"] = "sigmoid",
    label_smoothing: float = 0.0,
) -> PairLosses:
    """Return pair losses.

    gamma: difference of the rewards that is aimed at.
    form: `sigmoid`, or `hinge`, which stops at a difference of 1 + gamma and takes no label
        smoothing.
    label_smoothing: assumed probability that a pair is swapped.
    """
    chosen, rejected = beta * pairs.chosen.mean_logprobs, beta * pairs.rejected.mean_logprobs
    logits = chosen - rejected - gamma - pairs.margins
    is_hinge = form == "hinge"
    loss = (1 - logits).relu() if is_hinge else logistic_loss(logits, label_smoothing)
    return PairLosses(loss, chosen.detach(), rejected.detach())
