"""Weights that are neither sharded nor trained and pass through conversions unchanged.

Examples are layers for multi-token prediction, and vision towers that msrl does not compute. A
Hugging Face folder has them among its weights; an mcore checkpoint has them in a separate file next
to config and tokenizer. They keep their dtype when the model is cast. Older checkpoints have every
vision tower there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from msrl.checkpoint.hf.fp8 import dequantize_tensors
from msrl.checkpoint.hf.weight_files import StoredTensor, open_safetensors, open_weight_files
from msrl.checkpoint.hf.writer import HfWriter, Record
from msrl.errors import MsrlError
from msrl.models.families import rules_for
from msrl.models.hf_config import read_hf_config
from msrl.models.shape import Shape
from msrl.models.vision.tensors import file_prefixes, is_tower, published_names

FILE = "msrl_carried.safetensors"


def pass_through_tensors(hf_dir: Path, shape: Shape) -> dict[str, StoredTensor]:
    """Return the pass-through tensors of a model; most models have none.

    `hf_dir` is the model's folder, or the folder that a conversion made for its config.

    Raises:
        MsrlError: The model needs such tensors and the folder has none.
    """
    if not shape.pass_through:
        return {}
    stored = _stored_tensors(hf_dir, shape)
    tensors = {
        name: tensor for name, tensor in stored.items() if name.startswith(shape.pass_through)
    }
    if not tensors and not shape.may_lack_pass_through:
        raise MsrlError(f"{hf_dir}: {_missing_message(shape)}")
    return tensors


def tower_tensors(hf_dir: Path, shape: Shape) -> dict[str, StoredTensor]:
    """Return the vision tower, by Megatron's names, that an older checkpoint has beside its files.

    Raises:
        MsrlError: The folder lacks one of its tensors, or one has another shape.
    """
    if shape.vision is None:
        return {}
    stored = published_names(_stored_tensors(hf_dir, shape), shape.vision)
    tensors: dict[str, StoredTensor] = {}
    for rule in filter(is_tower, rules_for(shape).first):
        (name,), (size,) = rule.hf, rule.shapes
        if name not in stored:
            raise MsrlError(f"{hf_dir}: tensor {name} is missing; {_missing_message(shape)}")
        if stored[name].spec.shape != size:
            raise MsrlError(
                f"{stored[name].file}: tensor {name} has shape {list(stored[name].spec.shape)}, "
                f"but config.json needs {list(size)}"
            )
        tensors[rule.mcore] = stored[name]
    return tensors


def _stored_tensors(hf_dir: Path, shape: Shape) -> dict[str, StoredTensor]:
    """Return the tensors of the separate file, or else of the folder's weight files."""
    try:
        if (hf_dir / FILE).is_file():
            return open_safetensors(hf_dir / FILE)
        return _folder_tensors(hf_dir, shape)
    except MsrlError as error:
        raise MsrlError(f"{error}; {_missing_message(shape)}") from error


def _folder_tensors(hf_dir: Path, shape: Shape) -> dict[str, StoredTensor]:
    """Return the tensors in the folder's weight files.

    There may be no weight files if the model can be used without its pass-through tensors.
    """
    if (
        shape.may_lack_pass_through
        and not any(hf_dir.glob("*.safetensors"))
        and not any(hf_dir.glob("*.bin"))
    ):
        return {}
    return dequantize_tensors(open_weight_files(hf_dir), read_hf_config(hf_dir))


def _missing_message(shape: Shape) -> str:
    prefixes = shape.pass_through if shape.vision is None else file_prefixes(shape.vision)
    names = ", ".join(f"{prefix}*" for prefix in prefixes)
    return (
        f"{shape.architecture} also needs weights {names}. "
        "Name the folder of the model that has them with --hf-config."
    )


def pass_through_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    return sum(tensor.spec.num_bytes for tensor in tensors.values())


def write_pass_through(
    hf_dir: Path,
    target: Path,
    shape: Shape,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Record | None:
    """Write the pass-through tensors into a file in `target`, unless it exists.

    One tensor at a time is in memory.

    Returns:
        Size and checksum of the file, or None if none was written.
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
