"""Weight files of a Hugging Face folder: safetensors, or torch's `pytorch_model*.bin`.

    model.safetensors    or  model.safetensors.index.json  with the shards that it names
    pytorch_model.bin    or  pytorch_model.bin.index.json  with the shards that it names

As in transformers, safetensors take precedence. Tensors are memory-mapped and read on use. Source:
`SAFE_WEIGHTS_NAME` and `WEIGHTS_NAME` in transformers.utils; the index is {"metadata": ...,
"weight_map": {tensor: file}}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from msrl.checkpoint.dtypes import BY_SAFETENSORS_NAME, SAFETENSORS_NAMES
from msrl.checkpoint.torch_files.reader import TensorSpec, read_torch_file, tensor_spec
from msrl.errors import MALFORMED, ManyErrors, MsrlError
from msrl.files import is_file_name, read_text_within

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk: its file, type and shape, and a function that reads it."""

    file: Path
    spec: TensorSpec
    read: Callable[[], Tensor]


def has_weights(folder: Path) -> bool:
    """Return True if a Hugging Face folder has a config.json and weights in a supported form."""
    return (folder / "config.json").is_file() and any(
        (folder / name).is_file() for name in (SINGLE, INDEX, TORCH_SINGLE, TORCH_INDEX)
    )


def open_weight_files(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the folder by name.

    Raises:
        MsrlError: A file is missing, damaged or unsupported.
        ManyErrors: Several files are; one line per file.
    """
    index, files = _weight_files(folder)
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for name, expected in files.items():
        try:
            tensors |= _open(folder / name, expected, index)
        except MsrlError as error:
            problems.append(str(error))
    if len(problems) == 1:
        raise MsrlError(problems[0])
    if problems:
        raise ManyErrors(problems)
    return tensors


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one safetensors file.

    Raises:
        MsrlError: The file is truncated or contains an unsupported type.
    """
    try:
        file = safe_open(path, "pt")
        names = list(file.keys())
    except (SafetensorError, OSError) as error:
        raise MsrlError(
            f"{path}: truncated or not safetensors ({error}). Copy or download it again."
        ) from error
    tensors = dict[str, StoredTensor]()
    for name in names:
        view = file.get_slice(name)
        dtype = BY_SAFETENSORS_NAME.get(view.get_dtype())
        if dtype is None:
            raise _wrong_type(path, name, view.get_dtype())
        tensors[name] = StoredTensor(
            path, TensorSpec(dtype, tuple(view.get_shape())), partial(file.get_tensor, name)
        )
    return tensors


def open_torch(path: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one `pytorch_model*.bin`, read without executing anything.

    Raises the errors of `read_torch_file`.
    """
    contents = read_torch_file(path)
    if not isinstance(contents, Mapping):
        raise MsrlError(f"{path}: contains a {type(contents).__name__} instead of tensors by name")
    tensors = dict[str, StoredTensor]()
    for name, value in contents.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise MsrlError(f"{path}: entry {name!r} is not a named tensor")
        if value.dtype not in SAFETENSORS_NAMES:
            raise _wrong_type(path, name, str(value.dtype).removeprefix("torch."))
        tensors[name] = StoredTensor(path, tensor_spec(value), partial(_itself, value))
    return tensors


def some(names: Sequence[str]) -> str:
    """Return the first three of `names` and the number of further names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _wrong_type(path: Path, tensor: str, dtype: str) -> MsrlError:
    known = ", ".join(BY_SAFETENSORS_NAME)
    return MsrlError(f"{path}: tensor {tensor} has unsupported type {dtype}. Supported: {known}.")


def _open(path: Path, expected: set[str] | None, index: str) -> dict[str, StoredTensor]:
    """Open one file; with an index, it must contain exactly the tensors of the index."""
    if not path.is_file():
        raise MsrlError(f"{path}: the file is missing, but the index names it")
    tensors = open_safetensors(path) if path.suffix == ".safetensors" else open_torch(path)
    if expected is not None and tensors.keys() != expected:
        raise MsrlError(f"{path}: compared with {index}, it {_difference(set(tensors), expected)}")
    return tensors


def _weight_files(folder: Path) -> tuple[str, dict[str, set[str] | None]]:
    """Return the name of the index, and the expected tensors by file (None without an index)."""
    for single, index in ((SINGLE, INDEX), (TORCH_SINGLE, TORCH_INDEX)):
        has_single, has_index = (folder / single).is_file(), (folder / index).is_file()
        if has_single and not has_index:
            return index, {single: None}
        if has_index:
            files = _read_index(folder, index)
            if has_single and single not in files:
                raise MsrlError(
                    f"{folder}: {single} and {index} both exist and disagree. Remove one of them."
                )
            return index, files
    raise MsrlError(
        f"{folder}: no weights found. Expected {SINGLE}, {INDEX}, {TORCH_SINGLE} or {TORCH_INDEX}."
    )


def _read_index(folder: Path, index: str) -> dict[str, set[str] | None]:
    try:
        weight_map = json.loads(read_text_within(folder / index))["weight_map"]
        names = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except MALFORMED as error:
        raise MsrlError(f"{folder / index}: not an index of weight files ({error!r})") from error
    files = dict[str, set[str]]()
    for tensor, file in names.items():
        if not is_file_name(file):
            raise MsrlError(f"{folder / index}: names {file[:300]}, which is not a plain file name")
        files.setdefault(file, set()).add(tensor)
    return dict(sorted(files.items()))


def _difference(names: set[str], expected: set[str]) -> str:
    missing, extra = sorted(expected - names), sorted(names - expected)
    problems = [f"lacks {some(missing)}"] if missing else []
    if extra:
        problems.append(f"also has {some(extra)}")
    return " and ".join(problems)
