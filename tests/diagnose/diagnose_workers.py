"""Training ranks with a fault for tests of `msrl diagnose`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from msrl.trainer.objective.requests import RankValues, TokenRequest
from msrl.types import MicroBatch
from msrl.workflows.diagnose.worker import DiagnoseWorker


class FaultyWorker(DiagnoseWorker):
    """Rank with adapters whose fault is set from outside."""

    _fault = ""

    def set_fault(self, fault: str) -> None:
        """Inject a fault, or undo it."""
        from msrl.models.decoder import with_attention
        from msrl.trainer.model.layers import CoreAttention
        from msrl.trainer.model.rope import RotaryTables

        policy, before = self._training_rank.policy, self._fault
        self._fault = fault
        if "rope" in (fault, before):
            theta = 500.0 if fault == "rope" else self._theta
            self._theta = policy.shape.rotary.theta
            rotary = replace(policy.shape.rotary, theta=theta)
            policy.shape = with_attention(policy.shape, rotary=rotary)
            for module in policy.model.modules():
                if isinstance(module, CoreAttention):
                    module.rotary = rotary
            position = policy.position
            policy.rotary = RotaryTables(policy.shape, position.dtype, position.device)
        if "adapter" in (fault, before):
            self._fill_adapters(0.05 if fault == "adapter" else 0.0)

    def _fill_adapters(self, value: float) -> None:
        import torch

        adapters = self._training_rank.policy.adapters
        assert adapters is not None
        with torch.no_grad():
            for adapted in adapters.all:
                adapted.parameter("B").fill_(value)

    def forward(self, micro_batches: Sequence[MicroBatch], request: TokenRequest) -> RankValues:
        """Forget the boundaries of sequences, if that is the fault."""
        if self._fault == "boundaries":
            micro_batches = [_without_boundaries(batch) for batch in micro_batches]
        return super().forward(micro_batches, request)


def _without_boundaries(batch: MicroBatch) -> MicroBatch:
    """Return the micro-batch as one sequence, whose positions go on."""
    ends: Any = batch.cu_seqlens[[0, -1]]
    return replace(batch, cu_seqlens=np.ascontiguousarray(ends))
