"""MXFP4 weights, as gpt-oss is published, read as the numbers that they stand for. E experts, R
outputs, C inputs, G = C / 32 groups.

    X_blocks    uint8, [E, R, G, 16]: two numbers of 4 bits in a byte, the lower half first X_scales
    uint8, [E, R, G]: the exponent of two that a group of 32 numbers is multiplied by, plus 127

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


def dequantise(
    blocks: Tensor,  # [R, G, 16] uint8
    scales: Tensor,  # [R, G] uint8
    dtype: torch.dtype,
) -> Tensor:  # [R, 32 G]
    """Every number of 4 bits times its group's power of two."""
    halves = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)  # [R, G, 32]
    numbers = torch.tensor(_NUMBERS, dtype=torch.float32)[halves.int()]
    return torch.ldexp(numbers, scales.int().sub_(127).unsqueeze(-1)).to(dtype).flatten(-2)


def dequantised(stored: Mapping[str, StoredTensor], config: HfConfig) -> dict[str, StoredTensor]:
    """The tensors of a folder, of MXFP4 ones the entries (`X[0]` is expert 0, [C, R]) as what they
    stand for, in the model's type.

    Raises MsrlError for blocks or scales that are missing or do not fit together, and for any other
    tensor of bytes.
    """
    found = {name: each for name, each in stored.items() if each.spec.dtype != torch.uint8}
    packed = {name: each for name, each in stored.items() if each.spec.dtype == torch.uint8}
    stems = sorted({name.removesuffix(_BLOCKS).removesuffix(_SCALES) for name in packed})
    lonely = [stem for stem in stems if not {stem + _BLOCKS, stem + _SCALES} <= packed.keys()]
    if lonely:
        file = next(each.file for name, each in packed.items() if name.startswith(lonely[0]))
        raise MsrlError(
            f"{file}: {len(lonely)} tensors of type uint8 are not {_BLOCKS} and {_SCALES} of one MXFP4 tensor: {some(lonely)}"
        )
    for stem in stems:
        found |= _entries(
            stem, packed[stem + _BLOCKS], packed[stem + _SCALES], BY_HF_NAME[config.dtype()]
        )
    return found


def _entries(
    stem: str, blocks: StoredTensor, scales: StoredTensor, dtype: torch.dtype
) -> dict[str, StoredTensor]:
    """The entries of one MXFP4 tensor, each of which reads its own part."""
    shape = blocks.spec.shape
    if len(shape) != 4 or shape[-1] != 16 or scales.spec.shape != shape[:-1]:
        raise MsrlError(
            f"{blocks.file}: {stem}: blocks {list(shape)} and scales {list(scales.spec.shape)} do not fit together"
        )
    num_experts, rows, groups, _ = shape
    spec = TensorSpec(dtype, (32 * groups, rows))
    return {
        entry(stem, n): StoredTensor(blocks.file, spec, partial(_read, blocks, scales, n, dtype))
        for n in range(num_experts)
    }


def _read(blocks: StoredTensor, scales: StoredTensor, number: int, dtype: torch.dtype) -> Tensor:
    return dequantise(blocks.read()[number], scales.read()[number], dtype).mT
