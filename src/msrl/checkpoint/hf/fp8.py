"""FP8 weights with a scale per block (DeepSeek V3, FP8 releases of Qwen3), dequantized on reading.

    X.weight               float8_e4m3fn, [rows, columns]
    X.weight_scale_inv     float32, [ceil(rows / block rows), ceil(columns / block columns)];
                           each block is multiplied by its entry

The block size is `quantization_config.weight_block_size` of config.json (DeepSeek-V3 technical
report, arXiv:2412.19437, section 3.3.2; the repository's README_WEIGHTS.md). Nothing is ever
written in FP8.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from msrl.checkpoint.dtypes import BY_HF_NAME
from msrl.checkpoint.hf.weight_files import StoredTensor, some
from msrl.checkpoint.torch_files.reader import TensorSpec
from msrl.errors import MsrlError
from msrl.models.hf_config import HfConfig

FP8 = torch.float8_e4m3fn
_SCALE = "_scale_inv"


def dequantize(
    weight: Tensor,  # [R, C] float8_e4m3fn
    scales: Tensor,  # [ceil(R / r), ceil(C / c)]
    block: tuple[int, int],  # (r, c)
    dtype: torch.dtype,
) -> Tensor:  # [R, C]
    """Return each block times its scale, multiplied in float32.

    One row of blocks is converted at a time, which avoids a float32 copy of the weight.
    """
    rows, columns = block
    result = torch.empty(weight.shape, dtype=dtype)
    for start, row in zip(range(0, weight.shape[0], rows), scales.float(), strict=True):
        block_rows = weight[start : start + rows]
        result[start : start + rows] = (
            block_rows.float() * row.repeat_interleave(columns)[: weight.shape[1]]
        )
    return result


def dequantize_tensors(
    stored: Mapping[str, StoredTensor], config: HfConfig
) -> dict[str, StoredTensor]:
    """Return the tensors of a folder with FP8 weights dequantized to the dtype of config.json.

    The scales are omitted.

    Raises:
        MsrlError: A scale or the block size is missing or invalid, or a scale belongs to a weight
            that is not FP8, so that it is unknown if the scale was applied.
    """
    if not any(tensor.spec.dtype == FP8 for tensor in stored.values()):
        return dict(stored)
    dtype, block = BY_HF_NAME[config.dtype()], _block(config)
    scales = {
        name for name in stored if name.endswith(_SCALE) and name.removesuffix(_SCALE) in stored
    }
    unused = [
        name for name in sorted(scales) if stored[name.removesuffix(_SCALE)].spec.dtype != FP8
    ]
    if unused:
        raise MsrlError(
            f"{config.where}: {len(unused)} scales belong to weights that are not FP8: "
            f"{some(unused)}. "
            "Download the model again."
        )
    unscaled = [
        name
        for name, tensor in stored.items()
        if tensor.spec.dtype == FP8 and name + _SCALE not in scales
    ]
    if unscaled:
        raise MsrlError(
            f"{config.where}: {len(unscaled)} FP8 tensors have no {_SCALE}: {some(unscaled)}"
        )
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        if tensor.spec.dtype == FP8:
            tensors[name] = _scaled_tensor(name, tensor, stored[name + _SCALE], block, dtype)
        elif name not in scales:
            tensors[name] = tensor
    return tensors


def _block(config: HfConfig) -> tuple[int, int]:
    quantization = config.values.get("quantization_config")
    size = quantization.get("weight_block_size") if isinstance(quantization, Mapping) else None
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(isinstance(n, int) and n > 0 for n in size)
    ):
        config.fail(
            "quantization_config",
            "weight_block_size must be two numbers such as [128, 128] for FP8 weights",
        )
    return size[0], size[1]


def _scaled_tensor(
    name: str, weight: StoredTensor, scale: StoredTensor, block: tuple[int, int], dtype: torch.dtype
) -> StoredTensor:
    """Return `weight` as a tensor that is multiplied by its scales on reading."""
    shape = weight.spec.shape
    expected = tuple(-(-size // length) for size, length in zip(shape, block, strict=False))
    if len(shape) != 2 or scale.spec.shape != expected:
        raise MsrlError(
            f"{scale.file}: {name}{_SCALE} has shape {list(scale.spec.shape)}, "
            f"but blocks of {list(block)} need {list(expected)}"
        )
    return StoredTensor(
        weight.file, TensorSpec(dtype, shape), partial(_read, weight, scale, block, dtype)
    )


def _read(
    weight: StoredTensor, scale: StoredTensor, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    return dequantize(weight.read(), scale.read(), block, dtype)
