"""Losses at the selected positions of a micro-batch: what a rank minimises, with denominators that are global and passed in.

Letters: M positions whose loss_mask is set. Each loss returns the scalar to minimise and sums for the report, which are divided by
`num_tokens` once they have been added up over micro-batches and data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from msrl import registry
from msrl.algorithms import kl

Sums = dict[str, Tensor]


class Loss(Protocol):
    """Something that can be minimised."""

    @property
    def temperature(self) -> float: ...

    @property
    def needs_entropy(self) -> bool: ...

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, fields: Mapping[str, Tensor], num_tokens: int) -> tuple[Tensor, Sums]:
        """`entropy` is there if `needs_entropy`."""
        ...


@dataclass(frozen=True, slots=True)
class SftLoss:
    """Negative log-likelihood, mean over the loss tokens of the global batch."""

    temperature: float = 1.0
    needs_entropy: bool = False

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, fields: Mapping[str, Tensor], num_tokens: int) -> tuple[Tensor, Sums]:
        loss = -logprobs.sum() / num_tokens
        return loss, {"loss": -logprobs.detach().sum()}


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Clipped policy loss, KL to the reference, entropy bonus: each a mean over the loss tokens of the update.

    Without `old_logprobs` in the fields the current ones, detached, take their place (a single update per rollout).
    """

    temperature: float
    policy_loss: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual: float | None = None
    kl_coef: float = 0.0
    kl_estimator: kl.Estimator = "k3"
    entropy_coef: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    needs_entropy: bool = True

    def __call__(self, logprobs: Tensor, entropy: Tensor | None, fields: Mapping[str, Tensor], num_tokens: int) -> tuple[Tensor, Sums]:
        assert entropy is not None
        old = fields.get("old_logprobs", logprobs.detach())
        plugin = registry.load("msrl.algorithms.losses", self.policy_loss, key="algo.policy_loss")
        everywhere = torch.ones_like(logprobs, dtype=torch.bool)
        policy = plugin.policy_loss(
            logprobs, old, fields["advantages"], everywhere,
            clip_low=self.clip_low, clip_high=self.clip_high, dual=self.dual, num_tokens=num_tokens, **self.options,
        )  # fmt: skip
        loss = policy.loss
        if self.entropy_coef:  # a reported entropy is cheap, a differentiated one is not
            loss = loss - self.entropy_coef * entropy.sum() / num_tokens
        sums = {
            "policy_loss": policy.loss.detach() * num_tokens,
            "clip_fraction": policy.clip_fraction_sum,
            "ppo_kl": policy.approx_kl_sum,
            "entropy": entropy.detach().sum(),
        }
        if "reference_logprobs" in fields:
            divergence = kl.per_token(self.kl_estimator, logprobs, fields["reference_logprobs"], everywhere).sum()
            loss = loss + self.kl_coef * divergence / num_tokens
            sums["kl"] = divergence.detach()
        sums["loss"] = loss.detach() * num_tokens
        sums |= _mismatch(logprobs.detach() if "old_logprobs" not in fields else old, fields)
        return loss, sums


def _mismatch(trainer: Tensor, fields: Mapping[str, Tensor]) -> Sums:
    """How far the sampler's log-probabilities are from the trainer's for the policy that sampled."""
    if "sampler_logprobs" not in fields:
        return {}
    difference = trainer - fields["sampler_logprobs"]
    return {"sampler_logprob_difference": difference.abs().sum(), "sampler_kl": difference.exp().sub(1).sub(difference).sum()}
