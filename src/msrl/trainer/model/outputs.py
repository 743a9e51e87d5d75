"""Output of the last pipeline stage where logits are made later, a few positions at a time."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Last hidden states of P positions with the output layer that turns them into logits.

    The logits are `values @ output_weight.T` in the dtype of `values`, or softcap * tanh(logits /
    softcap) of them where the model caps its logits.
    """

    values: Tensor  # [P, c]
    output_weight: Tensor  # [V, c], the columns of the vocabulary on this rank; in any dtype
    softcap: float | None = None
