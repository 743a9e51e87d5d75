"""Direct preference optimization (arXiv:2305.18290). P pairs.

The loss of a pair is -log sigmoid(beta (log-ratio of chosen - log-ratio of rejected) - margin). The
hinge form is that of SLiC (arXiv:2305.10425).
"""

from __future__ import annotations

from typing import Literal

from msrl.algorithms.answers import PairLosses, Pairs, logistic_loss

BETA = 0.1
NEEDS_REFERENCE = True
READS_MARGINS = True
OPTION_RANGES = {"label_smoothing": (-1e-9, 0.5)}


def preference_loss(
    pairs: Pairs,
    *,
    beta: float,
    form: Literal["sigmoid", "hinge"] = "sigmoid",
    label_smoothing: float = 0.0,
) -> PairLosses:
    """Return pair losses.

    form: `sigmoid`, or `hinge`, which stops at a difference of 1 and takes no label smoothing.
    label_smoothing: assumed probability that a pair is swapped.
    """
    chosen, rejected = beta * pairs.chosen.log_ratios, beta * pairs.rejected.log_ratios
    logits = chosen - rejected - pairs.margins
    is_hinge = form == "hinge"
    loss = (1 - logits).relu() if is_hinge else logistic_loss(logits, label_smoothing)
    return PairLosses(loss, chosen.detach(), rejected.detach())
