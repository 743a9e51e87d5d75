"""Odds ratio preference optimization, without a reference (arXiv:2403.07691). P pairs.

The loss of a pair is the negative log-likelihood of the chosen answer minus beta log sigmoid(log
odds ratio), where odds = p / (1 - p) and log p is the mean log-probability of an answer's tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from msrl.algorithms.answers import PairLosses, Pairs

BETA = 0.1


def preference_loss(pairs: Pairs, *, beta: float) -> PairLosses:
    """Return pair losses. `beta` is the paper's lambda."""
    chosen, rejected = pairs.chosen.mean_logprobs, pairs.rejected.mean_logprobs
    log_odds_ratio = chosen - rejected - (_log_complement(chosen) - _log_complement(rejected))
    loss = -chosen - beta * F.logsigmoid(log_odds_ratio)
    return PairLosses(loss, beta * chosen.detach(), beta * rejected.detach())


def _log_complement(logprobs: Tensor) -> Tensor:  # [P] -> [P]
    """Return log(1 - exp(x)) for x < 0; the log-probability of a certain answer is limited."""
    bounded = logprobs.clamp(max=-torch.finfo(torch.float32).eps)
    return torch.log(-torch.expm1(bounded))
