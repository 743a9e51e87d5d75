"""Loss of a process reward model: M labeled steps, K reward tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from msrl.algorithms.step_rewards import step_losses
from msrl.trainer.objective.losses import ComparedModel, Sums

LABEL = "step_labels"  # field with the index of the reward token


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Mean loss over the labeled steps of an update.

    `token_ids` are the reward tokens. The field `step_labels` holds their indices.
    """

    token_ids: tuple[int, ...]
    temperature: float = 1.0
    compared: tuple[ComparedModel, ...] = ()

    def __call__(
        self,
        logits: Tensor,  # [M, K]
        fields: Mapping[str, Tensor],
        num_tokens: float,
    ) -> tuple[Tensor, Sums]:
        """Return the loss and its metrics; `num_tokens` is the number of steps of the update."""
        losses = step_losses(logits, fields[LABEL].long())
        loss = losses.loss.sum()
        return loss / num_tokens, {"loss": loss.detach(), "accuracy": losses.is_right.sum()}
