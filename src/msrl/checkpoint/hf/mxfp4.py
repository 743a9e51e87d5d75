"""MXFP4 weights (gpt-oss), dequantized on reading.

Letters: E experts, R outputs, C inputs, G = C / 32 groups.

    X_blocks    uint8, [E, R, G, 16]: two 4-bit numbers per byte, the lower half first
    X_scales    uint8, [E, R, G]: exponent of the power of two that a group of 32 numbers is
                multiplied by, plus 127

The model's tensor X is [E, C, R]. A number has a sign, 2 bits of exponent and 1 of fraction (OCP
Microscaling Formats specification 1.0, sections 5.2 and 5.3; arXiv:2310.10537). Nothing is ever
written in MXFP4.
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
from msrl.models.entries import entry
from msrl.models.hf_config import HfConfig

_BLOCKS, _SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = (*_POSITIVE, *(-number for number in _POSITIVE))


def dequantize(
    blocks: Tensor,  # [R, G, 16] uint8
    scales: Tensor,  # [R, G] uint8
    dtype: torch.dtype,
) -> Tensor:  # [R, 32 G]
    """Return each 4-bit number times the power of two of its group."""
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [R, G, 32]
    numbers = torch.tensor(_NUMBERS, dtype=torch.float32)[halves.int()]
    return torch.ldexp(numbers, scales.int().sub_(127).unsqueeze(-1)).to(dtype).flatten(-2)


def dequantize_tensors(
    stored: Mapping[str, StoredTensor], config: HfConfig
) -> dict[str, StoredTensor]:
    """Return the tensors of a folder with MXFP4 tensors replaced by their dequantized entries.

    Entry `X[0]` is expert 0, [C, R], in the dtype of the model.

    Raises:
        MsrlError: Blocks or scales are missing or do not match, or another tensor has type uint8.
    """
    tensors = {name: tensor for name, tensor in stored.items() if tensor.spec.dtype != torch.uint8}
    packed = {name: tensor for name, tensor in stored.items() if tensor.spec.dtype == torch.uint8}
    stems = sorted({name.removesuffix(_BLOCKS).removesuffix(_SCALES) for name in packed})
    unpaired = [stem for stem in stems if not {stem + _BLOCKS, stem + _SCALES} <= packed.keys()]
    if unpaired:
        file = next(tensor.file for name, tensor in packed.items() if name.startswith(unpaired[0]))
        raise MsrlError(
            f"{file}: {len(unpaired)} tensors of type uint8 are not a pair of {_BLOCKS} and "
            f"{_SCALES} "
            f"of an MXFP4 tensor: {some(unpaired)}"
        )
    for stem in stems:
        tensors |= _entries(
            stem, packed[stem + _BLOCKS], packed[stem + _SCALES], BY_HF_NAME[config.dtype()]
        )
    return tensors


def _entries(
    stem: str, blocks: StoredTensor, scales: StoredTensor, dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """Return the entries of one MXFP4 tensor; each reads only its part."""
    shape = blocks.spec.shape
    if len(shape) != 4 or shape[-1] != 16 or scales.spec.shape != shape[:-1]:
        raise MsrlError(
            f"{blocks.file}: {stem}: shapes {list(shape)} of blocks and {list(scales.spec.shape)} "
            "of scales do not match"
        )
    num_experts, rows, groups, _ = shape
    spec = TensorSpec(dtype, (32 * groups, rows))
    return {
        entry(stem, n): StoredTensor(blocks.file, spec, partial(_read, blocks, scales, n, dtype))
        for n in range(num_experts)
    }


def _read(blocks: StoredTensor, scales: StoredTensor, number: int, dtype: torch.dtype) -> Tensor:
    return dequantize(blocks.read()[number], scales.read()[number], dtype).mT
