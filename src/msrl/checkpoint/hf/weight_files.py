"""The weight files of a Hugging Face folder, opened and checked one by one: safetensors, or torch's
own `pytorch_model*.bin`.

    model.safetensors          or  model.safetensors.index.json  with the shards that it names
    pytorch_model.bin          or  pytorch_model.bin.index.json  with the shards that it names

Where a folder has both kinds, safetensors are read, as transformers does. Tensors are read by mmap
when they are used. Source: `SAFE_WEIGHTS_NAME` and `WEIGHTS_NAME` in transformers.utils; the index
is {"metadata": ..., "weight_map": {tensor: file}}.
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
from msrl.checkpoint.torch_files.reader import TensorSpec, read_torch_file, spec_of
from msrl.errors import ManyErrors, MsrlError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TORCH_SINGLE = "pytorch_model.bin"
TORCH_INDEX = "pytorch_model.bin.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor on disk: the file that holds it, its type and shape, and how to read it."""

    file: Path
    spec: TensorSpec
    read: Callable[[], Tensor]


def has_weights(folder: Path) -> bool:
    """Whether a Hugging Face folder has weights beside its config.json, in any form that is read.
    """
    return (folder / "config.json").is_file() and any(
        (folder / name).is_file() for name in (SINGLE, INDEX, TORCH_SINGLE, TORCH_INDEX)
    )


def open_weight_files(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name. Raises MsrlError, or ManyErrors with one line per file,
    for whatever is not as it should be.
    """
    index, files = _weight_files(folder)
    found: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for name, expected in files.items():
        try:
            found |= _open(folder / name, expected, index)
        except MsrlError as error:
            problems.append(str(error))
    if len(problems) == 1:
        raise MsrlError(problems[0])
    if problems:
        raise ManyErrors(problems)
    return found


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises MsrlError when it is cut short or holds a type
    that is not read.
    """
    try:
        file = safe_open(path, "pt")
        names = list(file.keys())
    except (SafetensorError, OSError) as error:
        raise MsrlError(
            f"{path}: cut short or not safetensors ({error}); copy or download it again"
        ) from error
    found = dict[str, StoredTensor]()
    for name in names:
        view = file.get_slice(name)
        dtype = BY_SAFETENSORS_NAME.get(view.get_dtype())
        if dtype is None:
            raise _wrong_type(path, name, view.get_dtype())
        found[name] = StoredTensor(
            path, TensorSpec(dtype, tuple(view.get_shape())), partial(file.get_tensor, name)
        )
    return found


def open_torch(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one `pytorch_model*.bin`, unpickled without running anything. Raises MsrlError
    as `read_torch_file` does.
    """
    contents = read_torch_file(path)
    if not isinstance(contents, Mapping):
        raise MsrlError(f"{path}: holds a {type(contents).__name__}, not tensors by name")
    found = dict[str, StoredTensor]()
    for name, value in contents.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise MsrlError(f"{path}: entry {name!r} is not a tensor with a name")
        if value.dtype not in SAFETENSORS_NAMES:
            raise _wrong_type(path, name, str(value.dtype).removeprefix("torch."))
        found[name] = StoredTensor(path, spec_of(value), partial(_itself, value))
    return found


def some(names: Sequence[str]) -> str:
    """The first three of `names`, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _wrong_type(path: Path, tensor: str, dtype: str) -> MsrlError:
    known = ", ".join(BY_SAFETENSORS_NAME)
    return MsrlError(
        f"{path}: tensor {tensor} has type {dtype}, which is not supported; supported: {known}"
    )


def _open(path: Path, expected: set[str] | None, index: str) -> dict[str, StoredTensor]:
    """Open one file; with an index, it must hold exactly the tensors that the index expects in it.
    """
    if not path.is_file():
        raise MsrlError(f"{path}: the index names this file, but it is missing")
    found = open_safetensors(path) if path.suffix == ".safetensors" else open_torch(path)
    if expected is not None and found.keys() != expected:
        raise MsrlError(f"{path}: {_difference(set(found), expected)} as against {index}")
    return found


def _weight_files(folder: Path) -> tuple[str, dict[str, set[str] | None]]:
    """The index's name, and file names with the tensors that it expects in them; None where there
    is no index.
    """
    for single, index in ((SINGLE, INDEX), (TORCH_SINGLE, TORCH_INDEX)):
        has_single, has_index = (folder / single).is_file(), (folder / index).is_file()
        if has_single and not has_index:
            return index, {single: None}
        if has_index:
            files = _indexed(folder, index)
            if has_single and single not in files:
                raise MsrlError(
                    f"{folder}: {single} and {index} are both here and disagree; remove the one that is not meant"
                )
            return index, files
    raise MsrlError(
        f"{folder}: there are no weights; looked for {SINGLE}, {INDEX}, {TORCH_SINGLE} and {TORCH_INDEX}"
    )


def _indexed(folder: Path, index: str) -> dict[str, set[str] | None]:
    try:
        weight_map = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
        names = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise MsrlError(f"{folder / index}: not an index of weight files: {error!r}") from error
    files = dict[str, set[str]]()
    for tensor, file in names.items():
        if Path(file).name != file:
            raise MsrlError(f"{folder / index}: names {file}, which is not a plain file name")
        files.setdefault(file, set()).add(tensor)
    return dict(sorted(files.items()))


def _difference(names: set[str], expected: set[str]) -> str:
    missing, extra = sorted(expected - names), sorted(names - expected)
    parts = [f"lacks {some(missing)}"] if missing else []
    return " and ".join(parts + ([f"has besides {some(extra)}"] if extra else []))
