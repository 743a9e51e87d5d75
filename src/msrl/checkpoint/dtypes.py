"""Names of the types that weights have: torch's, safetensors', Hugging Face's and the command line's."""

from __future__ import annotations

import torch

from msrl.models.rules import Rule

CHOICES: dict[str, torch.dtype | None] = {"keep": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BY_HF_NAME = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BY_SAFETENSORS_NAME = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "U8": torch.uint8,
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in BY_SAFETENSORS_NAME.items()}


def cast_to(rule: Rule, dtype: torch.dtype | None) -> torch.dtype | None:
    """The type that a rule's tensor gets when the model is cast to `dtype`; None: it stays as it is."""
    return dtype if dtype is None or rule.dtype is None else BY_HF_NAME[rule.dtype]


def hf_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
