"""Contrastive preference optimization, without a reference (arXiv:2401.08417). P pairs.

The loss of a pair is -log sigmoid(beta (log-probability of chosen - that of rejected) - margin)
plus alpha times the negative log-likelihood of the chosen answer, as a mean over its tokens.
"""

from __future__ import annotations

from msrl.algorithms.answers import PairLosses, Pairs, logistic_loss

BETA = 0.1
READS_MARGINS = True
OPTION_RANGES = {"alpha": (-1e-9, None), "label_smoothing": (-1e-9, 0.5)}


def preference_loss(
    pairs: Pairs, *, beta: float, alpha: float = 1.0, label_smoothing: float = 0.0
) -> PairLosses:
    """Return pair losses.

    alpha: coefficient of the likelihood of the chosen answers.
    label_smoothing: assumed probability that a pair is swapped.
    """
    chosen, rejected = beta * pairs.chosen.logprobs, beta * pairs.rejected.logprobs
    loss = logistic_loss(chosen - rejected - pairs.margins, label_smoothing)
    loss = loss - alpha * pairs.chosen.mean_logprobs
    return PairLosses(loss, chosen.detach(), rejected.detach())
