"""Weights that are neither cut nor trained (a vision tower, layers for multi-token prediction):
carried through conversions as they came.

A Hugging Face folder has them among its weights; beside an mcore checkpoint they lie in a file of
their own, with config and tokenizer. They keep their own type, whatever the rest is cast to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from msrl.checkpoint.hf.fp8 import dequantised
from msrl.checkpoint.hf.weight_files import StoredTensor, open_safetensors, open_weight_files
from msrl.checkpoint.hf.writer import HfWriter, Record
from msrl.errors import MsrlError
from msrl.models.hf_config import read_hf_config
from msrl.models.shape import Shape

FILE = "msrl_carried.safetensors"


def pass_through_tensors(hf_dir: Path, shape: Shape) -> dict[str, StoredTensor]:
    """The carried tensors of a model whose folder (or the folder that a conversion made for its
    config) is `hf_dir`; often none.

    Raises MsrlError where the model has some and the folder does not.
    """
    if not shape.carried:
        return {}
    try:
        stored = (
            open_safetensors(hf_dir / FILE)
            if (hf_dir / FILE).is_file()
            else _weights(hf_dir, shape)
        )
    except MsrlError as error:
        raise MsrlError(f"{error}; {_missing(shape)}") from error
    found = {name: tensor for name, tensor in stored.items() if name.startswith(shape.carried)}
    if not found and not shape.may_lack_carried:
        raise MsrlError(f"{hf_dir}: {_missing(shape)}")
    return found


def _weights(hf_dir: Path, shape: Shape) -> dict[str, StoredTensor]:
    """What is in the folder's weight files; none need be there where the model may lack what it
    carries.
    """
    if (
        shape.may_lack_carried
        and not any(hf_dir.glob("*.safetensors"))
        and not any(hf_dir.glob("*.bin"))
    ):
        return {}
    return dequantised(open_weight_files(hf_dir), read_hf_config(hf_dir))


def _missing(shape: Shape) -> str:
    names = ", ".join(f"{prefix}*" for prefix in shape.carried)
    return f"{shape.architecture} consists of weights {names} too; name the folder of the model that has them with --hf-config"


def pass_through_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    return sum(tensor.spec.num_bytes for tensor in tensors.values())


def carry(
    hf_dir: Path,
    target: Path,
    shape: Shape,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Record | None:
    """Write the carried tensors into `target` in a file of their own, unless they are there; one
    tensor at a time is in memory.

    Size and checksum of the file that was written, if one was.
    """
    tensors = {} if (target / FILE).is_file() else pass_through_tensors(hf_dir, shape)
    if not tensors:
        return None
    staged = target / f".{FILE}.partial"
    staged.unlink(missing_ok=True)
    writer = HfWriter(
        target, {name: tensor.spec for name, tensor in tensors.items()}, single=staged.name
    )
    for name, tensor in tensors.items():
        writer.write(name, tensor.read(), advance)
    (record,) = writer.close().values()
    staged.rename(target / FILE)
    return record
