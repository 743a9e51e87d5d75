"""Logits of a few tokens: P positions of the output layer, K tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from msrl.trainer.model.outputs import HiddenStates


def token_logits(output: HiddenStates, token_ids: Sequence[int], *, first: int) -> Tensor:  # [P, K]
    """Return the logits of a few tokens, equal on all tensor-parallel ranks.

    `first` is the token of this rank's first vocabulary column. Other logits are not computed.
    """
    weight = output.output_weight
    local = torch.tensor(token_ids, device=weight.device) - first
    is_here = (local >= 0) & (local < len(weight))
    rows = weight[local.clamp(0, len(weight) - 1)]
    logits = (output.values @ rows.to(output.values.dtype).t()).float()
    logits = reduce_from_tensor_model_parallel_region(logits.masked_fill(~is_here, 0.0))
    cap = output.softcap
    return logits if cap is None else (logits / cap).tanh() * cap
