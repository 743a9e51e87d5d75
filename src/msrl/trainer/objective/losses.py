"""Losses at the selected positions of a micro-batch, with global denominators that are passed in.

Each loss returns the scalar to minimize and sums for the metrics, which are added up over
micro-batches and data-parallel ranks and then divided by `num_tokens`. Letters: M positions whose
loss mask is set, K compared models.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from msrl import registry
from msrl.algorithms import kl
from msrl.algorithms.aggregate import weighted_sum
from msrl.algorithms.mismatch import Correction, mismatch_statistics, off_policy_mask
from msrl.algorithms.proximal import log_linear
from msrl.algorithms.tokens import LOG_RATIO_LIMIT, PolicyTokens, Ratio, TokenLosses
from msrl.algorithms.value import value_loss
from msrl.config.sections.algo import OldLogprobs

Sums = dict[str, Tensor]
_MEANS = ("kl", "entropy", "distill")  # reported as means over tokens for every aggregation


@dataclass(frozen=True, slots=True)
class Outputs:
    """Differentiable outputs of the model at the selected positions."""

    logprobs: Tensor  # [M] of the labels
    sequences: Tensor  # [M], number of each position's sequence in the micro-batch, ascending
    entropy: Tensor | None = None  # [M] if the loss needs it
    # [M, K] exact divergences from the models of `Loss.compared`, in their order.
    divergences: Tensor | None = None


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """A model from whose distribution a loss needs the exact divergence at every position.

    Attributes:
        teacher: Name of the teacher; None for the reference.
        divergence: Name of the divergence.
        options: Options of the divergence.
    """

    teacher: str | None = None
    divergence: str = "reverse_kl"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Loss(Protocol):
    """A loss of a language model."""

    @property
    def temperature(self) -> float: ...

    @property
    def needs_entropy(self) -> bool: ...

    @property
    def compared(self) -> tuple[ComparedModel, ...]: ...

    def __call__(
        self, outputs: Outputs, fields: Mapping[str, Tensor], num_tokens: float
    ) -> tuple[Tensor, Sums]: ...


class ValuesLoss(Protocol):
    """A loss of a model with one value per token."""

    def __call__(
        self, values: Tensor, fields: Mapping[str, Tensor], num_tokens: float
    ) -> tuple[Tensor, Sums]: ...


@dataclass(frozen=True, slots=True)
class SftLoss:
    """Negative log-likelihood, mean over the loss tokens of the global batch.

    With the field `weights`, the loss is the sum over tokens that it weights.
    """

    temperature: float = 1.0
    needs_entropy: bool = False
    compared: tuple[ComparedModel, ...] = ()

    def __call__(
        self, outputs: Outputs, fields: Mapping[str, Tensor], num_tokens: float
    ) -> tuple[Tensor, Sums]:
        if "weights" in fields:
            loss = -(outputs.logprobs * fields["weights"]).sum()
        else:
            loss = -outputs.logprobs.sum() / num_tokens
        return loss, {"loss": -outputs.logprobs.detach().sum()}


def teacher_weight(number: int) -> str:
    """Return the name of the field with the weight of a teacher at every token."""
    return f"teacher_weight_{number}"


@dataclass(frozen=True, slots=True)
class Distillation:
    """Term of a loss: coef times the weighted sum of the exact divergences from the teachers."""

    coef: float
    weights: Mapping[str, float]  # of the teachers, by name
    divergence: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def compared(self) -> tuple[ComparedModel, ...]:
        return tuple(ComparedModel(name, self.divergence, self.options) for name in self.weights)

    def per_token(
        self, divergences: Tensor, fields: Mapping[str, Tensor]
    ) -> Tensor:  # [M, K] -> [M]
        """Return the weighted sum over the teachers.

        The fields `teacher_weight(number)` of a batch, if it has them, replace the weights.
        """
        if teacher_weight(0) not in fields:
            return divergences @ divergences.new_tensor(tuple(self.weights.values()))
        rows = [fields[teacher_weight(number)] for number in range(len(self.weights))]
        return (divergences * torch.stack(rows, -1)).sum(-1)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """Policy loss with KL, likelihood, entropy and distillation terms.

    It is rl_coef * (policy loss + kl_coef * KL to the reference) + sft_coef * likelihood of good
    samples - entropy_coef * entropy + distillation.

    Each term is a sum over tokens weighted by the field `weights`, which holds the aggregation and
    its global denominators. The mismatch correction multiplies each token's policy loss and no
    other term. Without the field `old_logprobs` the current log-probabilities, detached, replace
    them (a single update per rollout). With `old_logprobs="behavior"` log-probabilities of the
    sampler replace them, with "log-linear" an approximation that reads the field `proximal_shares`.
    The KL estimator `full` is the exact divergence over the vocabulary, which the outputs must then
    contain. `kl_bias_correction` multiplies each token's KL by its likelihood ratio. The off-policy
    mask and the field `selected` also set policy losses to 0. Some losses read the field `scores`.
    """

    temperature: float
    policy_loss: str = "ppo"
    ratio: Ratio = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual: float | None = None
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    kl_bias_correction: bool = False
    entropy_coef: float = 0.0
    rl_coef: float = 1.0
    sft_coef: float = 0.0
    correction: Correction = field(default_factory=Correction)
    old_logprobs: OldLogprobs = "trainer"
    off_policy_limit: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    needs_entropy: bool = True
    distillation: Distillation | None = None

    @property
    def compared(self) -> tuple[ComparedModel, ...]:
        reference = (ComparedModel(),) if self._has_exact_kl else ()
        return reference if self.distillation is None else reference + self.distillation.compared

    @property
    def _has_exact_kl(self) -> bool:
        return self.kl_coef > 0 and self.kl_estimator == "full"

    def __call__(
        self, outputs: Outputs, fields: Mapping[str, Tensor], num_tokens: float
    ) -> tuple[Tensor, Sums]:
        """Return the loss and its metrics.

        `policy_loss`, `sft_loss` and `loss` are aggregated like the loss, all others are means over
        tokens.
        """
        mask, weights = torch.ones_like(outputs.logprobs, dtype=torch.bool), fields["weights"]
        before = self._before(outputs.logprobs, fields)
        # The ratio to the behavior policy is measured for the policy in training.
        trainer = outputs.logprobs.detach() if self.old_logprobs == "behavior" else before
        factors, sums = self._mismatch_weights(trainer, fields, mask, outputs.sequences)
        tokens = PolicyTokens.of(
            outputs.logprobs,
            before,
            fields["advantages"],
            mask,
            outputs.sequences,
            ratio=self.ratio,
            scores=fields.get("scores"),
        )
        factors = factors * self._trained_tokens(tokens, fields, before, sums)
        policy = self._policy(tokens, fields)
        # The factors multiply the loss, not the advantages: a loss may have terms without an
        # advantage, such as the drift of cpgd.
        terms = {
            "policy_loss": (self.rl_coef, policy.loss * factors),
            **self._other_terms(outputs, fields, tokens),
        }
        loss = outputs.logprobs.new_zeros(())
        for name, (coef, values) in terms.items():
            aggregated = weighted_sum(values, weights, mask)
            loss = loss + coef * aggregated if coef else loss
            sums[name] = (
                values.detach().sum() if name in _MEANS else aggregated.detach() * num_tokens
            )
        sums |= {
            name: values.detach().sum()
            for name, values in {**policy.stats, **_movement(tokens)}.items()
        }
        return loss, {**sums, "loss": loss.detach() * num_tokens}

    def _before(self, logprobs: Tensor, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probabilities in the denominator of the likelihood ratio."""
        if self.old_logprobs == "behavior":
            return fields["sampler_logprobs"]
        if self.old_logprobs == "log-linear":
            return log_linear(logprobs, fields["sampler_logprobs"], fields["proximal_shares"])
        return fields.get("old_logprobs", logprobs.detach())

    def _policy(self, tokens: PolicyTokens, fields: Mapping[str, Tensor]) -> TokenLosses:
        plugin = registry.load(registry.LOSSES, self.policy_loss, key="algo.policy_loss")
        arguments = {
            "clip_low": self.clip_low,
            "clip_high": self.clip_high,
            "dual": self.dual,
            "draws": fields.get("draws"),
        }
        return plugin.policy_loss(
            tokens, **required_arguments(plugin.policy_loss, arguments), **self.options
        )

    def _trained_tokens(
        self, tokens: PolicyTokens, fields: Mapping[str, Tensor], before: Tensor, sums: Sums
    ) -> Tensor:  # [M], 0 or 1
        """Return which tokens the policy loss trains on, and add dropped ones to `sums`."""
        selected = fields.get("selected", torch.ones_like(tokens.advantages))
        if self.off_policy_limit is None:
            return selected
        dropped = off_policy_mask(
            tokens.logprobs,
            fields.get("sampler_logprobs", before),
            tokens.advantages,
            tokens.mask,
            tokens.sequences,
            limit=self.off_policy_limit,
        )
        sums["off_policy_masked"] = dropped.to(selected.dtype).sum()
        return selected.masked_fill(dropped, 0.0)

    def _other_terms(
        self, outputs: Outputs, fields: Mapping[str, Tensor], tokens: PolicyTokens
    ) -> dict[str, tuple[float, Tensor]]:
        """Return the coefficient and the values per token of the terms besides the policy loss."""
        terms: dict[str, tuple[float, Tensor]] = {}
        if self._has_exact_kl:
            terms["kl"] = (self.rl_coef * self.kl_coef, _require(outputs.divergences)[:, 0])
        elif "reference_logprobs" in fields:
            values = kl.per_token(
                self.kl_estimator, outputs.logprobs, fields["reference_logprobs"], tokens.mask
            )
            if self.kl_bias_correction:
                bounded = tokens.token_log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
                values = values * bounded.exp()
            terms["kl"] = (self.rl_coef * self.kl_coef, values)
        if self.sft_coef:
            is_good = fields["advantages"] > 0
            terms["sft_loss"] = (self.sft_coef, -outputs.logprobs.masked_fill(~is_good, 0.0))
        if outputs.entropy is not None:  # a reported entropy is cheap, a differentiated one is not
            terms["entropy"] = (-self.entropy_coef, outputs.entropy)
        if self.distillation is not None:
            from_teachers = _require(outputs.divergences)[:, int(self._has_exact_kl) :]
            terms["distill"] = (
                self.distillation.coef,
                self.distillation.per_token(from_teachers, fields),
            )
        return terms

    def _mismatch_weights(
        self, before: Tensor, fields: Mapping[str, Tensor], mask: Tensor, sequences: Tensor
    ) -> tuple[Tensor, Sums]:
        """Return factors that correct the policy loss for the mismatch, and their metrics.

        The mismatch is between trainer and rollout engine.
        """
        if "sampler_logprobs" not in fields:
            return torch.ones_like(before), {}
        stats = mismatch_statistics(before, fields["sampler_logprobs"], mask)
        factors = torch.ones_like(before)
        if self.correction.is_on:
            factors, more = self.correction(before, fields["sampler_logprobs"], mask, sequences)
            stats |= more
        return factors, {name: values.sum() for name, values in stats.items()}


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """Mean of `algorithms.value.value_loss` over the tokens of an update on all ranks.

    With the field `weights`, the loss is the sum over tokens that it weights.
    """

    clip: float | None

    def __call__(
        self, values: Tensor, fields: Mapping[str, Tensor], num_tokens: float
    ) -> tuple[Tensor, Sums]:
        """Return the loss and its metrics.

        `values` and the fields `old_values` and `returns` are [M].
        """
        tokens = value_loss(values, fields["old_values"], fields["returns"], clip=self.clip)
        sums = {name: numbers.sum() for name, numbers in tokens.stats.items()}
        if "weights" not in fields:
            total = tokens.loss.sum()
            return total / num_tokens, {**sums, "value_loss": total.detach()}
        loss = (tokens.loss * fields["weights"]).sum()
        return loss, {**sums, "value_loss": loss.detach() * num_tokens}


def required_arguments(
    function: Callable[..., Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keyword arguments that are required parameters of the function."""
    parameters = inspect.signature(function).parameters
    return {
        name: value
        for name, value in arguments.items()
        if name in parameters and parameters[name].default is inspect.Parameter.empty
    }


def _movement(tokens: PolicyTokens) -> dict[str, Tensor]:
    """Return the change of the policy since the rollout: r - 1 - log r.

    It is an unbiased estimate of KL(old || new).
    """
    log_ratio = tokens.token_log_ratio.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return {"ppo_kl": log_ratio.exp() - 1.0 - log_ratio}


def _require(values: Tensor | None) -> Tensor:
    assert values is not None, "`compared` requests it"
    return values
