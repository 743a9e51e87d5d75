"""The reference model's side of an exact KL: of a pass over the micro-batches of an update, the last hidden states are kept.

Hidden states are what is small: a vocabulary is tens of times wider. Letters: m selected positions of this rank, c channels, R rows at a
time, V vocabulary columns of this rank.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from msrl.trainer.objective.chunked import made_logits
from msrl.trainer.objective.logprobs import Distribution

if TYPE_CHECKING:
    from msrl.trainer.model.gpt import PolicyModel
    from msrl.trainer.rank import TrainWorker


@dataclass(frozen=True, slots=True)
class KeepDistribution:
    """Finishes a pass of `model` that gives hidden states: keeps these on the host, and what normalises their logits."""

    worker: TrainWorker
    model: PolicyModel
    temperature: float

    def __call__(self, hidden: Tensor, batch: Any) -> dict[str, Any]:
        """`hidden` is [m, c]. Logits are made a few rows at a time, and not kept."""
        head = self.model.head().detach()
        columns = self.worker.columns(len(head), self.temperature)
        project = functools.partial(made_logits, weight=head, softcap=self.worker.shape.logit_softcap)
        parts = [columns.normaliser(project(rows)) for rows in hidden.detach().split(columns.rows_at_once)]
        return {"distribution": Distribution(hidden.detach().cpu(), project, torch.cat(parts))}
