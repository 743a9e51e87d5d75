"""FP8 weights with a scale per block, as DeepSeek V3 and Qwen3's FP8 releases are published, read
as the numbers that they stand for.

    X.weight               float8_e4m3fn, [rows, columns] X.weight_scale_inv     float32, [ceil(rows
    / block rows), ceil(columns / block columns)]: multiply a block by its entry

The block's size is `quantization_config.weight_block_size` of config.json (DeepSeek-V3 technical
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


def dequantise(
    weight: Tensor,  # [R, C] float8_e4m3fn
    scales: Tensor,  # [ceil(R / r), ceil(C / c)]
    block: tuple[int, int],  # (r, c)
    dtype: torch.dtype,
) -> Tensor:  # [R, C]
    """Each block times its scale, multiplied in float32; a block of rows at a time, so that no
    float32 copy of the whole is made.
    """
    rows, columns = block
    result = torch.empty(weight.shape, dtype=dtype)
    for start, row in zip(range(0, weight.shape[0], rows), scales.float(), strict=True):
        part = weight[start : start + rows]
        result[start : start + rows] = (
            part.float() * row.repeat_interleave(columns)[: weight.shape[1]]
        )
    return result


def dequantised(stored: Mapping[str, StoredTensor], config: HfConfig) -> dict[str, StoredTensor]:
    """The tensors of a folder with FP8 ones as what they stand for, in the type that config.json
    gives the model, and scales left out.

    Raises MsrlError for a scale or a block size that is missing or does not fit, and for a scale
    beside a weight that is not FP8: whether it has been applied is not known.
    """
    if not any(each.spec.dtype == FP8 for each in stored.values()):
        return dict(stored)
    dtype, block = BY_HF_NAME[config.dtype()], _block(config)
    scales = {
        name for name in stored if name.endswith(_SCALE) and name.removesuffix(_SCALE) in stored
    }
    idle = [name for name in sorted(scales) if stored[name.removesuffix(_SCALE)].spec.dtype != FP8]
    if idle:
        raise MsrlError(
            f"{config.where}: {len(idle)} scales stand beside weights that are not FP8: {some(idle)}; download the model again"
        )
    lonely = [
        name
        for name, each in stored.items()
        if each.spec.dtype == FP8 and name + _SCALE not in scales
    ]
    if lonely:
        raise MsrlError(
            f"{config.where}: {len(lonely)} FP8 tensors have no {_SCALE} beside them: {some(lonely)}"
        )
    found: dict[str, StoredTensor] = {}
    for name, each in stored.items():
        if each.spec.dtype == FP8:
            found[name] = _wide(name, each, stored[name + _SCALE], block, dtype)
        elif name not in scales:
            found[name] = each
    return found


def _block(config: HfConfig) -> tuple[int, int]:
    quantisation = config.values.get("quantization_config")
    size = quantisation.get("weight_block_size") if isinstance(quantisation, Mapping) else None
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(isinstance(n, int) and n > 0 for n in size)
    ):
        config.fail(
            "quantization_config",
            "weight_block_size must be two numbers, like [128, 128]: the weights are FP8 in blocks",
        )
    return size[0], size[1]


def _wide(
    name: str, weight: StoredTensor, scale: StoredTensor, block: tuple[int, int], dtype: torch.dtype
) -> StoredTensor:
    """`weight` to be read times its scales."""
    shape = weight.spec.shape
    wanted = tuple(-(-size // length) for size, length in zip(shape, block, strict=False))
    if len(shape) != 2 or scale.spec.shape != wanted:
        raise MsrlError(
            f"{scale.file}: {name}{_SCALE} is {list(scale.spec.shape)}, but blocks of {list(block)} make it {list(wanted)}"
        )
    return StoredTensor(
        weight.file, TensorSpec(dtype, shape), partial(_read, weight, scale, block, dtype)
    )


def _read(
    weight: StoredTensor, scale: StoredTensor, block: tuple[int, int], dtype: torch.dtype
) -> Tensor:
    return dequantise(weight.read(), scale.read(), block, dtype)
