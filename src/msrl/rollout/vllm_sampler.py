"""Settings of the sampler in vLLM's worker. Nothing here imports vllm."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_MODULE, _COUNT_RANKS = "vllm.v1.sample.sampler", "batched_count_greater_than"


class SamplerSettings:
    """Methods that vLLM adds to its worker with `WeightReceiver`."""

    def skip_ranks(self) -> None:
        """Report 0 as the rank of every token instead of counting the more probable ones.

        msrl reads no ranks. On a CPU, counting them takes 3% of a decoding step of a small model.
        """
        module: Any = sys.modules.get(_MODULE)
        if hasattr(module, _COUNT_RANKS):
            setattr(module, _COUNT_RANKS, _no_ranks)


def _no_ranks(logprobs: Tensor, of_tokens: Tensor) -> Tensor:
    """Return zeros instead of ranks, [n], for log-probabilities [n, V] and [n, 1]."""
    import torch

    return torch.zeros(len(of_tokens), dtype=torch.int64, device=logprobs.device)
