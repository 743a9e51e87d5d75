"""Names of the types that weights have: torch's, safetensors', Hugging Face's and the command line's."""

from __future__ import annotations

import torch

CHOICES: dict[str, torch.dtype | None] = {"keep": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BY_HF_NAME = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
BY_SAFETENSORS_NAME = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
SAFETENSORS_NAMES = {dtype: name for name, dtype in BY_SAFETENSORS_NAME.items()}


def hf_name(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
