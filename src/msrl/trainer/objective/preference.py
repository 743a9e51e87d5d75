"""Losses of preference data at the selected positions of a micro-batch.

Sequences of a micro-batch come in rows: a chosen and a rejected answer, or one labeled answer. The
fields of a row have the same value at all of its positions. `num_tokens` is the sum of the weights
of all rows of the update, so results are means over rows. Letters: M positions whose loss mask is
set, S sequences, P rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from msrl import registry
from msrl.algorithms.answers import Answers, LabeledAnswers, PairLosses, Pairs
from msrl.algorithms.reward_model import bradley_terry
from msrl.algorithms.tokens import per_sequence
from msrl.trainer.objective.losses import ComparedModel, Outputs, Sums

VALUE, WEIGHT, REFERENCE = "values", "weights", "reference_logprobs"


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """Weighted mean of a preference loss over the pairs or labeled answers of an update.

    The field `reference_logprobs` holds the reference's log-probability of the complete answer at
    each of its positions. `baseline` is the baseline of kto, for the weights before the update.
    """

    name: str
    beta: float
    sft_coef: float = 0.0
    baseline: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    temperature: float = 1.0
    needs_entropy: bool = False
    compared: tuple[ComparedModel, ...] = ()

    def __call__(
        self, outputs: Outputs, fields: Mapping[str, Tensor], num_tokens: float
    ) -> tuple[Tensor, Sums]:
        """Return the loss and its metrics; `num_tokens` is the total weight of the rows."""
        plugin = registry.load(registry.PREFERENCES, self.name, key="algo.preference.loss")
        arguments = {"beta": self.beta, **self.options}
        answers = _answers(outputs, fields)
        first = _at_starts(outputs.sequences)
        values, weights = fields[VALUE][first], fields[WEIGHT][first]
        if getattr(plugin, "DATA", "pairs") == "labeled":
            baseline = values.new_tensor(self.baseline)
            labeled = LabeledAnswers(answers, values > 0.5, baseline)
            losses = plugin.preference_loss(labeled, **arguments)
            sums = _labeled_sums(losses.rewards, labeled.is_desirable, weights)
            chosen, per_row = answers.mean_logprobs, losses.loss
            chosen = chosen.masked_fill(~labeled.is_desirable, 0.0)
        else:
            values, weights = values[0::2], weights[0::2]
            pairs = Pairs(_every_second(answers, 0), _every_second(answers, 1), values)
            losses = plugin.preference_loss(pairs, **arguments)
            sums = pair_sums(losses, weights)
            chosen, per_row = pairs.chosen.mean_logprobs, losses.loss
        loss = (per_row * weights).sum()
        if self.sft_coef:
            likelihood = -(chosen * weights).sum()
            loss = loss + self.sft_coef * likelihood
            sums["sft_loss"] = likelihood.detach()
        return loss / num_tokens, {**sums, "loss": loss.detach()}


@dataclass(frozen=True, slots=True)
class ScoreLoss:
    """Weighted mean of the Bradley-Terry loss over the pairs of an update."""

    center_coef: float = 0.0

    def __call__(
        self, values: Tensor, fields: Mapping[str, Tensor], num_tokens: float
    ) -> tuple[Tensor, Sums]:
        """Return the loss and its metrics; `values` [2 P] are the scores of both answers."""
        margins, weights = fields[VALUE][0::2], fields[WEIGHT][0::2]
        losses = bradley_terry(values[0::2], values[1::2], margins, center_coef=self.center_coef)
        loss = (losses.loss * weights).sum()
        return loss / num_tokens, {**pair_sums(losses, weights), "loss": loss.detach()}


def pair_sums(losses: PairLosses, weights: Tensor) -> Sums:
    """Return weighted sums of the metrics of pairs. A tie counts as half."""
    margins = losses.chosen_rewards - losses.rejected_rewards
    accuracy = (torch.sign(margins) + 1) / 2
    metrics = {
        "accuracy": accuracy,
        "margin": margins,
        "chosen_reward": losses.chosen_rewards,
        "rejected_reward": losses.rejected_rewards,
    }
    return {name: (values * weights).sum() for name, values in metrics.items()}


def _labeled_sums(rewards: Tensor, is_desirable: Tensor, weights: Tensor) -> Sums:
    """Return weighted sums of the rewards of desirable and of undesirable answers."""
    desirable = weights * is_desirable
    return {
        "desirable_share": desirable.sum(),
        "desirable_reward": (rewards * desirable).sum(),
        "undesirable_reward": (rewards * (weights - desirable)).sum(),
    }


def _answers(outputs: Outputs, fields: Mapping[str, Tensor]) -> Answers:
    """Return all answers of a micro-batch, [S]."""
    sequences = outputs.sequences
    reference = fields.get(REFERENCE)
    return Answers(
        logprobs=per_sequence(outputs.logprobs, sequences),
        num_tokens=per_sequence(torch.ones_like(outputs.logprobs), sequences),
        reference_logprobs=None if reference is None else reference[_at_starts(sequences)],
    )


def _at_starts(sequences: Tensor) -> Tensor:  # [M] -> [S]
    """Return the first position of each sequence."""
    is_start = torch.ones_like(sequences, dtype=torch.bool)
    is_start[1:] = sequences[1:] != sequences[:-1]
    return is_start.nonzero().squeeze(-1)


def _every_second(answers: Answers, first: int) -> Answers:
    """Return the chosen (0) or the rejected (1) answers of pairs."""
    reference = answers.reference_logprobs
    return Answers(
        answers.logprobs[first::2],
        answers.num_tokens[first::2],
        None if reference is None else reference[first::2],
    )
