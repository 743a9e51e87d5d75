"""Names of weight dtypes in torch, safetensors, Hugging Face configs and the command line."""

from __future__ import annotations

import torch
from torch import Tensor

from msrl.models.rules import Rule

CHOICES: dict[str, torch.dtype | None] = {
    "keep": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
BY_HF_NAME = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BY_SAFETENSORS_NAME = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
# By item size in bytes.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SAFETENSORS_NAMES = {dtype: name for name, dtype in BY_SAFETENSORS_NAME.items()}


def cast_to(rule: Rule, dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of a rule's tensor when the model is cast to `dtype`; None: no cast."""
    return dtype if dtype is None or rule.dtype is None else BY_HF_NAME[rule.dtype]


def hf_name(dtype: torch.dtype) -> str:
    """Return the name in Hugging Face configs, for example `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and bits.

    A NaN equals itself, and -0 does not equal 0.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    integers = _INTEGERS[a.dtype.itemsize]
    return torch.equal(a.contiguous().view(integers), b.contiguous().view(integers))
