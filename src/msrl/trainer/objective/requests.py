"""Requests to the models on the ranks: values of tokens, and updates.

A request passes unchanged from a workflow through `TrainerGroup`, `TrainWorker` and `TrainingRank`
to the replica of its model. A new value of a token is added to `TokenValue` and computed where the
replica measures the others. N tokens of a packed micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from msrl.types import Floats, StageRoutes

if TYPE_CHECKING:
    from msrl.trainer.objective.losses import Loss, ValuesLoss
    from msrl.trainer.objective.steps import StepLoss

TokenValue = Literal["logprobs", "entropies", "squared_probabilities", "values"]


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """Values of every token from one pass of a model without gradients.

    Attributes:
        values: Log-probabilities, entropies, or sums of squared probabilities over the vocabulary
            of a language model; values of a critic or a reward model.
        model: `policy`, `reference`, `critic`, or `reward:NAME`.
        temperature: Temperature of the distributions.
        records_routes: Also return the routes of all tokens. Only the policy has them.
        in_float32: Compute in float32 with the weights as they are, one layer at a time.
    """

    values: tuple[TokenValue, ...] = ("logprobs",)
    model: str = "policy"
    temperature: float = 1.0
    records_routes: bool = False
    in_float32: bool = False

    @property
    def role(self) -> str:
        """The model, without the name of a reward model."""
        return self.model.partition(":")[0]


@dataclass(frozen=True, slots=True)
class UpdateRequest:
    """One update of a model, or the metrics of its loss.

    Attributes:
        loss: Loss to minimize.
        lr: Learning rate; None computes the metrics without an update.
        model: `policy` or `critic`.
        divisor: Divisor of loss and metrics, by default the number of loss tokens of all ranks.
    """

    loss: Loss | StepLoss | ValuesLoss
    lr: float | None
    model: str = "policy"
    divisor: float | None = None


@dataclass(frozen=True, slots=True)
class RankValues:
    """Result of a `TokenRequest` on one rank.

    Attributes:
        by_name: Values at the labels of each micro-batch, [N] each, 0 where the loss mask is not
            set. None except on the last stage.
        routes: Routes of this stage. None unless requested, and except on the first of the ranks
            that share the micro-batches.
    """

    by_name: Mapping[str, list[Floats]] | None
    routes: StageRoutes | None = None
