"""Padding of matrix products in vLLM's worker on CPU. Nothing here imports vllm.

oneDNN compiles a bfloat16 product for each number of rows, which takes milliseconds, and a decoding
step has as many rows as running sequences, whose number falls from step to step.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_OPERATORS, _PRODUCT = "vllm._custom_ops", "onednn_mm"
_DECODING_ROWS, _DECODING_MULTIPLE = 256, 16  # rows of a tile of AMX
_PROMPT_MULTIPLE = 64


def padded_rows(rows: int) -> int:
    """Return the number of rows that a product of `rows` rows is computed with."""
    if rows <= 1:  # one sequence, as in a chat
        return rows
    multiple = _DECODING_MULTIPLE if rows <= _DECODING_ROWS else _PROMPT_MULTIPLE
    return -(-rows // multiple) * multiple


class ProductChanges:
    """Methods that vLLM adds to its worker with `WeightReceiver`; `self` is that worker."""

    def pad_products(self) -> None:
        """Compute bfloat16 products with one of few numbers of rows.

        Replaces `onednn_mm` of vllm/_custom_ops.py (vLLM 0.23 to 0.32), which layers look up in
        each call.
        """
        module: Any = sys.modules.get(_OPERATORS)
        product: Any = getattr(module, _PRODUCT, None)
        if product is None or getattr(product, "is_padded", False):
            return

        def padded_product(handler: Any, x: Tensor, bias: Tensor | None) -> Tensor:
            import torch
            import torch.nn.functional as F

            count = x.shape[:-1].numel()
            missing = padded_rows(count) - count
            if x.dtype != torch.bfloat16 or not missing:
                return product(handler, x, bias)
            rows = product(handler, F.pad(x.reshape(count, -1), (0, 0, 0, missing)), bias)
            return rows[:count].view(*x.shape[:-1], -1)

        padded_product.is_padded = True  # pyright: ignore[reportFunctionMemberAccess]
        setattr(module, _PRODUCT, padded_product)
