"""Mismatch between the log-probabilities of trainer and sampler. N tokens.

Importance weights correct it.

w = exp(trainer logprob - sampler logprob), both of the policy that sampled. Weights are per token
or the product over a sequence, truncated from above (truncated importance sampling,
https://fengyao.notion.site/off-policy-rl). A filter sets the weight of tokens, or of sequences by
the geometric mean or the product of their ratios, to 0 outside its bounds. The off-policy mask
(DeepSeek-V3.2, arXiv:2512.02556) drops sequences that the policy has left. Log-ratios are clamped
to +-20.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from msrl.algorithms.tokens import LOG_RATIO_LIMIT, precise, sequence_means, sequence_sums

Level = Literal["none", "token", "sequence"]
FilterLevel = Literal["none", "token", "sequence", "sequence-product"]


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance correction of the policy loss: its weights multiply the loss of each token.

    Weights are multiplied by `scale`, 1 over their mean if they are normalized. Filtered tokens
    still count in the denominators of the aggregation and of a sequence's ratio or
    mean, and in KL and entropy terms.
    """

    weight: Level = "none"
    upper: float = 2.0
    filter: FilterLevel = "none"
    low: float = 0.5
    high: float = 2.0
    scale: float = 1.0

    @property
    def is_on(self) -> bool:
        return self.weight != "none" or self.filter != "none"

    def __call__(
        self,
        trainer_logprobs: Tensor,  # [N]
        sampler_logprobs: Tensor,  # [N]
        mask: Tensor,  # [N] bool
        sequences: Tensor,  # [N], ascending from 0
    ) -> tuple[Tensor, dict[str, Tensor]]:  # [N]; each [N]
        """Return detached weights and per-token statistics: weight, truncated, filtered."""
        log_ratio = _log_ratio(trainer_logprobs, sampler_logprobs, mask)
        weights, truncated = self._weights(log_ratio, mask, sequences)
        weights = weights * self.scale
        stats = {"mismatch_truncated": truncated.to(weights.dtype)}
        if self.filter != "none":
            ratio = _ratio(_measure(self.filter, log_ratio, mask, sequences))
            outside = ((ratio < self.low) | (ratio > self.high)) & mask
            weights = weights.masked_fill(outside, 0.0)
            stats["mismatch_filtered"] = outside.to(weights.dtype)
        return weights, {**stats, "mismatch_weight": weights}

    def mean_weight(
        self,
        trainer_logprobs: Tensor,  # [N]
        sampler_logprobs: Tensor,  # [N]
        sequences: Tensor,  # [N], ascending from 0
    ) -> float:
        """Return the mean of the truncated weights, over tokens or over sequences by their level.

        Filters do not change it.
        """
        mask = torch.ones_like(sequences, dtype=torch.bool)
        log_ratio = _log_ratio(trainer_logprobs, sampler_logprobs, mask)
        weights, _ = self._weights(log_ratio, mask, sequences)
        if self.weight == "sequence":
            is_first = torch.ones_like(mask)
            is_first[1:] = sequences[1:] != sequences[:-1]
            weights = weights[is_first]
        return float(weights.mean())

    def _weights(
        self, log_ratio: Tensor, mask: Tensor, sequences: Tensor
    ) -> tuple[Tensor, Tensor]:  # [N] each
        """Return truncated weights, and which of them are truncated."""
        if self.weight == "none":
            return mask.to(log_ratio.dtype), torch.zeros_like(mask)
        level = "sequence-product" if self.weight == "sequence" else "token"
        ratio = _ratio(_measure(level, log_ratio, mask, sequences))
        return ratio.clamp(max=self.upper) * mask, (ratio > self.upper) & mask


def off_policy_mask(
    logprobs: Tensor,  # [N] of the policy in training
    behavior_logprobs: Tensor,  # [N] of the policy that sampled
    advantages: Tensor,  # [N]
    mask: Tensor,  # [N] bool
    sequences: Tensor,  # [N], ascending from 0
    *,
    limit: float,  # nats per token
) -> Tensor:  # [N] bool
    """Return which tokens the off-policy mask drops (arXiv:2512.02556).

    They have a negative advantage, and the mean of behavior - current log-probability over their
    sequence is above `limit`.
    """
    distance = sequence_means(-_log_ratio(logprobs, behavior_logprobs, mask), mask, sequences)
    return (advantages < 0) & (distance > limit) & mask


def _measure(level: str, log_ratio: Tensor, mask: Tensor, sequences: Tensor) -> Tensor:
    """Return the log-ratio of each token, or the sum or mean over its sequence."""
    if level == "token":
        return log_ratio
    reduce = sequence_sums if level == "sequence-product" else sequence_means
    return reduce(log_ratio, mask, sequences)


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def mismatch_statistics(
    trainer_logprobs: Tensor,  # [N]
    sampler_logprobs: Tensor,  # [N]
    mask: Tensor,  # [N] bool
) -> dict[str, Tensor]:  # each [N]
    """Return per-token statistics whose means measure the distance between sampler and trainer.

    sampler_logprob_difference: |d|; sampler_kl: exp(d) - 1 - d, unbiased for KL(sampler ||
    trainer); sampler_chi2: exp(2 d) - 1, for the chi-squared divergence, the variance that a
    correction by these weights adds. d = trainer - sampler.
    """
    difference = _log_ratio(trainer_logprobs, sampler_logprobs, mask)
    bounded = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {
        "sampler_logprob_difference": difference.abs(),
        "sampler_kl": bounded.exp() - 1.0 - bounded,
        "sampler_chi2": ((2.0 * bounded).exp() - 1.0) * mask,
    }


def _log_ratio(trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
    return (precise(trainer_logprobs) - precise(sampler_logprobs)).detach().masked_fill(~mask, 0.0)
