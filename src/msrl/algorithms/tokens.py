"""Input of the policy losses: tokens of a micro-batch with their likelihood ratios.

N tokens, S sequences.

The ratio of token t is r_t = exp(logprob - old logprob). The ratio of its sequence has the value s
= exp(mean over tokens of log r) and is differentiated by the token's own log-probability: sg[s]
pi_t / sg[pi_t], where sg stops the gradient (GSPO-token, arXiv:2507.18071, section 4.3). So each
token's advantage, weight and clip affect only that token. If advantages are equal within a
sequence, value and gradient are those of GSPO. Masked positions are replaced before any exp or
product.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

Ratio = Literal["token", "sequence"]
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """Values that a policy loss can use. They are 0, without gradient, at masked positions."""

    logprobs: Tensor  # [N], differentiable
    token_log_ratio: Tensor  # [N], differentiable; log r of each token
    # Log-ratio of the token or of its sequence, clamped to +-20 and differentiable by the token's
    # own log-probability.
    log_ratio: Tensor  # [N]
    advantages: Tensor  # [N]
    mask: Tensor  # [N] bool
    sequences: Tensor  # [N], number of the sequence that a token belongs to, ascending
    scores: Tensor | None = None  # [N], reward of the token's sample before normalization

    @classmethod
    def of(
        cls,
        logprobs: Tensor,  # [N] of the policy in training, differentiable
        old_logprobs: Tensor,  # [N] of the policy before the first update of this rollout
        advantages: Tensor,  # [N]
        mask: Tensor,  # [N] bool
        sequences: Tensor,  # [N], ascending from 0
        *,
        ratio: Ratio = "token",
        scores: Tensor | None = None,  # [N]
    ) -> PolicyTokens:
        """Compute ratios. Log-ratios are clamped to +-20 to prevent overflow.

        Beyond the clamp, a ratio has no gradient.
        """
        clean, old = (
            precise(logprobs).masked_fill(~mask, 0.0),
            precise(old_logprobs).detach().masked_fill(~mask, 0.0),
        )
        token = clean - old
        log_ratio = (
            token if ratio == "token" else _sequence_log_ratio(clean, token, mask, sequences)
        )
        return cls(
            logprobs=clean,
            token_log_ratio=token,
            log_ratio=log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT),
            advantages=precise(advantages).detach().masked_fill(~mask, 0.0),
            mask=mask,
            sequences=sequences,
            scores=scores,
        )


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Loss of every token, and detached per-token statistics whose means are reported."""

    loss: Tensor  # [N], differentiable, 0 at masked positions
    stats: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # each [N]


def precise(values: Tensor) -> Tensor:
    """Return `values` in float32 or float64.

    Half precision has too few digits for a difference of log-probabilities.
    """
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _sequence_log_ratio(
    logprobs: Tensor, token_log_ratio: Tensor, mask: Tensor, sequences: Tensor
) -> Tensor:  # [N] each -> [N]
    """Return log(sg[s] pi_t / sg[pi_t]). Its value is exactly log s: the added term is 0."""
    return sequence_means(token_log_ratio.detach(), mask, sequences) + (
        logprobs - logprobs.detach()
    )


def sequence_sums(values: Tensor, mask: Tensor, sequences: Tensor) -> Tensor:  # [N] each -> [N]
    """Return the sum over the unmasked tokens of each sequence, repeated at each of its positions.

    The sum runs along the rows of a padded matrix, because scattered additions are not
    deterministic on all devices.
    """
    clean = values.masked_fill(~mask, 0.0)
    if not len(clean):
        return clean
    padded, column = _padded(clean, sequences)
    return padded.sum(1, keepdim=True).expand_as(padded)[sequences, column].masked_fill(~mask, 0.0)


def per_sequence(values: Tensor, sequences: Tensor) -> Tensor:  # [N] each -> [S]
    """Return the sum over the tokens of each sequence, in the order of the sequences."""
    return _padded(values, sequences)[0].sum(1) if len(values) else values


def _padded(values: Tensor, sequences: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values as a padded matrix, one row per sequence, and the column of each, [N]."""
    starts = torch.searchsorted(
        sequences, torch.arange(int(sequences[-1]) + 1, device=sequences.device)
    )
    column = torch.arange(len(values), device=values.device) - starts[sequences]
    padded = values.new_zeros(len(starts), int(column.max()) + 1)
    return padded.index_put((sequences, column), values), column


def sequence_means(values: Tensor, mask: Tensor, sequences: Tensor) -> Tensor:  # [N] each -> [N]
    """Return the mean over the unmasked tokens of each sequence, at each of its positions."""
    return sequence_sums(values, mask, sequences) / sequence_sums(
        mask.to(values.dtype), mask, sequences
    ).clamp(min=1.0)
