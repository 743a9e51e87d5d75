"""Mismatch between the log-probabilities of trainer and sampler. N tokens.

Importance weights correct it.

w = exp(trainer logprob - sampler logprob), both of the policy that sampled. Weights are per token
or the product over a sequence, truncated from above (truncated importance sampling,
https://fengyao.notion.site/off-policy-rl). A filter sets the weight of tokens, or of sequences by
their geometric mean, to 0 outside its bounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from msrl.algorithms.tokens import LOG_RATIO_LIMIT, precise, sequence_means, sequence_sums

Level = Literal["none", "token", "sequence"]


@dataclass(frozen=True, slots=True)
class Correction:
    """Importance correction of the policy loss: its weights multiply the loss of each token.

    Filtered tokens still count in the denominators of the aggregation and of a sequence's ratio or
    mean, and in KL and entropy terms.
    """

    weight: Level = "none"
    upper: float = 2.0
    filter: Level = "none"
    low: float = 0.5
    high: float = 2.0

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
        weights, truncated = mask.to(log_ratio.dtype), torch.zeros_like(mask)
        if self.weight != "none":
            log_weight = (
                log_ratio if self.weight == "token" else sequence_sums(log_ratio, mask, sequences)
            )
            ratio = log_weight.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            weights, truncated = ratio.clamp(max=self.upper) * mask, (ratio > self.upper) & mask
        stats = {"mismatch_truncated": truncated.to(weights.dtype)}
        if self.filter != "none":
            measure = (
                log_ratio if self.filter == "token" else sequence_means(log_ratio, mask, sequences)
            )
            ratio = measure.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
            outside = ((ratio < self.low) | (ratio > self.high)) & mask
            weights = weights.masked_fill(outside, 0.0)
            stats["mismatch_filtered"] = outside.to(weights.dtype)
        return weights, {**stats, "mismatch_weight": weights}


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
