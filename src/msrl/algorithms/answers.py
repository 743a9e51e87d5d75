"""Input and output of the preference losses. P pairs, or P labeled answers.

Log-probabilities of an answer are sums over its tokens. The reward of an answer is the implicit one
of its loss: beta times a log-ratio or a log-probability.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers with the log-probabilities of their tokens."""

    logprobs: Tensor  # [P], sums over tokens, differentiable
    num_tokens: Tensor  # [P]
    reference_logprobs: Tensor | None = None  # [P], sums over tokens, of the frozen reference

    @property
    def log_ratios(self) -> Tensor:  # [P]
        """Log-ratio of policy to reference."""
        assert self.reference_logprobs is not None, "NEEDS_REFERENCE requests it"
        return self.logprobs - self.reference_logprobs.detach()

    @property
    def mean_logprobs(self) -> Tensor:  # [P]
        """Mean log-probability of a token."""
        return self.logprobs / self.num_tokens

    @property
    def mean_log_ratios(self) -> Tensor:  # [P]
        """Mean log-ratio of a token."""
        return self.log_ratios / self.num_tokens


@dataclass(frozen=True, slots=True)
class Pairs:
    """Chosen and rejected answers to the same prompts."""

    chosen: Answers
    rejected: Answers
    margins: Tensor  # [P], by how much the chosen answer is better; 0 if unknown


@dataclass(frozen=True, slots=True)
class LabeledAnswers:
    """Answers that are desirable or not, and the baseline of their log-ratios."""

    answers: Answers
    is_desirable: Tensor  # [P] bool
    baseline: Tensor  # scalar: mean log-ratio of unrelated answers, at least 0


@dataclass(frozen=True, slots=True)
class PairLosses:
    """Loss and detached rewards of each pair."""

    loss: Tensor  # [P], differentiable
    chosen_rewards: Tensor  # [P]
    rejected_rewards: Tensor  # [P]


@dataclass(frozen=True, slots=True)
class LabeledLosses:
    """Loss and detached reward of each labeled answer."""

    loss: Tensor  # [P], differentiable
    rewards: Tensor  # [P]


def logistic_loss(logits: Tensor, label_smoothing: float) -> Tensor:  # [P] -> [P]
    """Return the negative log-likelihood that the chosen answer is preferred.

    `label_smoothing` is the assumed probability of a swapped pair (arXiv:2305.18290, cDPO).
    """
    likelihood = (1 - label_smoothing) * F.logsigmoid(logits)
    return -likelihood - label_smoothing * F.logsigmoid(-logits)
