"""Names that pickles in checkpoints may use, and the constructors that stand in for them.

A constructor takes values from the file, so it checks their types before it uses them, and it
returns a new plain value or one of the stand-ins below. It never returns a class, a function, a
module or an object that outlives the file.
"""

from __future__ import annotations

import math
import re
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor

_FOREIGN = ("megatron.", "mindspeed", "transformer_engine.", "torch.distributed.")
_STORAGE_MODULES = ("torch", "torch.cuda", "torch.npu", "torch_npu.npu")
_STORAGES = {
    "BFloat16Storage": torch.bfloat16, "HalfStorage": torch.float16, "FloatStorage": torch.float32, "DoubleStorage": torch.float64,
    "ByteStorage": torch.uint8, "CharStorage": torch.int8, "ShortStorage": torch.int16, "IntStorage": torch.int32,
    "LongStorage": torch.int64, "BoolStorage": torch.bool, "ComplexFloatStorage": torch.complex64, "ComplexDoubleStorage": torch.complex128,
}  # fmt: skip
_NUMPY_TYPE = re.compile(r"(b1|[iu][1248]|f[248]|c8|c16|[SU]\d{1,6})")
_MAX_AXES = 64
_MAX_REPEATED = 1 << 24  # elements of a tensor that repeats those of its storage, as `expand` does


@dataclass(frozen=True, slots=True)
class Global:
    """A name of a class or function in a pickle. Nothing was imported for it."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class StorageRef:
    """Memory of a tensor in a file."""

    dtype: torch.dtype
    memory: torch.UntypedStorage
    num_elements: int


class Foreign:
    """A value of a class that is not loaded: its name, and the arguments and the state that the
    file holds for it.
    """

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[object, ...]) -> None:
        self.name, self.arguments, self.state = name, arguments, None

    name: str
    arguments: tuple[object, ...]
    state: Any


class NumpyType:
    """An element type of NumPy, as text: one that the process shares never gets state from a file.
    """

    __slots__ = ("order", "text")

    def __init__(self, text: str) -> None:
        self.text, self.order = text, "="

    text: str
    order: str

    def dtype(self) -> np.dtype[Any]:
        """Return the type itself."""
        return np.dtype(self.order + self.text)


def unwanted(module: str, name: str) -> UnpicklingError:
    """Return the error for a name that has no place in a checkpoint."""
    return UnpicklingError(
        f"it names {module}.{name}, which a checkpoint has no use for; it may be harmful and was not run"
    )


def resolve(module: str, name: str) -> Global | torch.dtype:
    """Return the stand-in for a name. Element types of torch are immutable and stand for
    themselves.

    Raises:
        UnpicklingError: A checkpoint has no use for the name.
    """
    if module == "torch" and name in _TORCH_TYPES:
        return _TORCH_TYPES[name]
    stand_in = Global(module, name)
    if (module, name) in CONSTRUCTORS or is_foreign(stand_in) or _is_storage(module, name):
        return stand_in
    raise unwanted(module, name)


def construct(target: object, arguments: object, keywords: object = None) -> Any:
    """Return what calling `target` with values from the file stands for.

    Raises:
        UnpicklingError: `target` is no name, or its constructor does not take these arguments.
    """
    if not isinstance(target, Global) or type(arguments) is not tuple:
        raise UnpicklingError(f"it calls a {type(target).__name__}")
    if is_foreign(target):
        return _foreign(target, arguments if not keywords else (*arguments, keywords))
    constructor = CONSTRUCTORS.get((target.module, target.name))
    if constructor is None or keywords:
        raise UnpicklingError(f"it calls {target.module}.{target.name} in an unknown way")
    try:
        return constructor(*arguments)
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        raise UnpicklingError(
            f"it calls {target.module}.{target.name} with unusable values: {error}"
        ) from error


def is_foreign(name: Global) -> bool:
    """Return True for the name of a class whose values are kept as `Foreign`."""
    return (name.module, name.name) in _OPAQUE or name.module.startswith(_FOREIGN)


def check_key(key: object) -> Any:
    """Return a dict key or set member whose hash takes no recursion (hashing deeply nested tuples
    overflows the C stack).
    """
    members = key if type(key) is tuple else (key,)
    for member in members:
        if type(member) not in _KEYS:
            raise UnpicklingError(f"it uses a {type(member).__name__} as a key")
    return key


def storage_dtype(kind: object) -> torch.dtype | None:
    """Return the element type that a storage class stands for; None where `kind` is no such class.
    """
    return (
        _STORAGES[kind.name]
        if isinstance(kind, Global) and _is_storage(kind.module, kind.name)
        else None
    )


def fill_array(array: np.ndarray[Any, Any], state: object) -> None:
    """Give an array its type, shape and elements, as `numpy.ndarray.__reduce__` writes them."""
    version, shape, kind, is_fortran, data = _items(state, 5)
    if (
        type(version) is not int
        or type(is_fortran) is not bool
        or not isinstance(kind, NumpyType)
        or type(data) is not bytes
    ):
        raise UnpicklingError("it holds an array of Python objects or of an unknown form")
    dtype, sizes = kind.dtype(), _sizes(shape)
    if len(data) != dtype.itemsize * math.prod(sizes):
        raise UnpicklingError(
            f"it holds an array of {len(data)} bytes, which do not make {list(sizes)}"
        )
    array.__setstate__((1, sizes, dtype, is_fortran, data))  # pyright: ignore[reportArgumentType] - a bool, as NumPy writes it


def set_numpy_type(kind: NumpyType, state: object) -> None:
    """Give an element type its byte order."""
    _, order, *rest = _items(state, 8)
    if (
        type(order) is not str
        or order not in ("<", ">", "|", "=")
        or any(item is not None for item in rest[:3])
    ):
        raise UnpicklingError("it holds an array of structures")
    kind.order = order


# --- Constructors ---------------------------------------------------------------------------------------------------------------------


def _foreign(target: Global, arguments: tuple[object, ...]) -> Foreign:
    return Foreign(f"{target.module}.{target.name}", arguments)


def _enum_member(owner: object, name: object) -> Foreign:
    """Read an enumeration's member in the form of Python 3.11.0 to 3.11.3: getattr(class, name)."""
    if not isinstance(owner, Global) or not is_foreign(owner) or type(name) is not str:
        raise unwanted("builtins", "getattr")
    return _foreign(owner, (name,))


def _namespace() -> Namespace:
    return Namespace()


def _ordered_dict() -> OrderedDict[Any, Any]:
    return OrderedDict()


def _dict() -> dict[Any, Any]:
    return {}


def _default_dict(factory: object = None) -> dict[Any, Any]:
    """Read a defaultdict as a plain dict; its factory is never called."""
    if factory is None or (isinstance(factory, Global) and factory in _DICT_NAMES):
        return {}
    name = (
        f"{factory.module}.{factory.name}"
        if isinstance(factory, Global)
        else type(factory).__name__
    )
    raise UnpicklingError(f"it holds a defaultdict of {name}; only one of dict is read")


def _collection(kind: Callable[[Iterable[Any]], Any]) -> Callable[..., Any]:
    def make(items: object = ()) -> Any:
        if type(items) is not list and type(items) is not tuple:
            raise UnpicklingError(f"it makes a set of a {type(items).__name__}")
        return kind(map(check_key, items))

    return make


def _encode(text: object, encoding: object) -> bytes:
    """Pickle protocol 2 writes bytes as text with their values."""
    if type(text) is not str or type(encoding) is not str or encoding != "latin1":
        raise UnpicklingError("it encodes text by another codec than latin1")
    return text.encode("latin1")


def _path(*parts: Any) -> PurePosixPath:
    if not all(type(part) is str for part in parts):
        raise UnpicklingError("it makes a path of something other than text")
    return PurePosixPath(*parts)


def _numbers(kind: Callable[..., Any], *types: type) -> Callable[..., Any]:
    def make(*values: Any) -> Any:
        if not all(type(value) in types for value in values):
            raise UnpicklingError(
                f"it makes a {getattr(kind, '__name__', 'value')} of something other than numbers"
            )
        return kind(*values)

    return make


def _empty_bytes() -> bytes:
    """Pickle protocol 2 writes empty bytes as a call of their class."""
    return b""


def _size(sizes: object) -> torch.Size:
    return torch.Size(_sizes(sizes))


def _numpy_type(text: object, *_: object) -> NumpyType:
    if type(text) is not str or _NUMPY_TYPE.fullmatch(text) is None:
        raise UnpicklingError(
            "it holds an array of Python objects or structures; only numbers and text are read"
        )
    return NumpyType(text)


def _empty_array(kind: object, *_: object) -> np.ndarray[Any, Any]:
    """Make an array that `fill_array` fills."""
    if not isinstance(kind, Global) or (kind.module, kind.name) != ("numpy", "ndarray"):
        raise UnpicklingError("it holds an array of an unknown class")
    return np.ndarray((0,), np.uint8)


def _array(*_: object) -> np.ndarray[Any, Any]:
    """Refuse the class of arrays itself, which only `_empty_array` takes."""
    raise UnpicklingError("it describes an array in an unknown way")


def _numpy_scalar(kind: object, data: object) -> Any:
    if (
        not isinstance(kind, NumpyType)
        or type(data) is not bytes
        or len(data) != kind.dtype().itemsize
    ):
        raise UnpicklingError("it holds a number of an unknown type")
    return np.frombuffer(data, kind.dtype())[0].item() if data else ""


def _tensor(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    requires_grad: object = False,
    _hooks: object = None,
    bits: object = None,
) -> Tensor:
    """Rebuild a tensor on the memory of its storage, within which all of its elements must lie."""
    sizes, steps, begin = _sizes(shape), _sizes(strides), _sizes((offset,))[0]
    if (
        not isinstance(storage, StorageRef)
        or len(sizes) != len(steps)
        or len(sizes) > _MAX_AXES
        or type(requires_grad) is not bool
    ):
        raise UnpicklingError("it describes a tensor in an unknown way")
    if bits:
        raise UnpicklingError(
            "it holds a conjugated or negated view of a tensor, which is not read"
        )
    end = begin + (
        1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        if all(sizes)
        else 0
    )
    num_elements = math.prod(sizes)
    if end > storage.num_elements or num_elements > max(storage.num_elements, _MAX_REPEATED):
        message = f"{list(sizes)} with strides {list(steps)} at {begin}, beyond the {storage.num_elements} elements of its storage"
        raise UnpicklingError(f"it holds a tensor of {message}")
    tensor = torch.empty(0, dtype=storage.dtype).set_(storage.memory, begin, sizes, steps)
    return tensor.requires_grad_(requires_grad)


def _parameter(data: object, requires_grad: object, _hooks: object = None) -> torch.nn.Parameter:
    if not isinstance(data, Tensor) or type(requires_grad) is not bool:
        raise UnpicklingError("it describes a parameter in an unknown way")
    return torch.nn.Parameter(data, requires_grad)


def _is_storage(module: str, name: str) -> bool:
    return module in _STORAGE_MODULES and name in _STORAGES


def _items(state: object, count: int) -> tuple[Any, ...]:
    if type(state) is not tuple or len(state) < count:
        raise UnpicklingError("it holds an array in an unknown form")
    return state[:count]


def _sizes(values: Any) -> tuple[int, ...]:
    """Return sizes, strides or offsets: whole numbers that are not negative and fit into 64 bits.
    """
    if type(values) not in (tuple, list, torch.Size) or not all(
        type(value) is int and 0 <= value < 1 << 63 for value in values
    ):
        raise UnpicklingError("it holds a tensor or array whose sizes are no whole numbers")
    return tuple(values)


_KEYS = frozenset(
    {
        type(None),
        bool,
        int,
        float,
        str,
        bytes,
        torch.dtype,
        torch.Size,
        PurePosixPath,
        Global,
        Foreign,
    }
)
_DICT_NAMES = (Global("builtins", "dict"), Global("__builtin__", "dict"))
_OPAQUE = {
    ("torch", "device"),
    ("torch.serialization", "_get_layout"),
    ("_io", "BytesIO"),
    ("signal", "Signals"),
}
_TORCH_TYPES: Mapping[str, torch.dtype] = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}

CONSTRUCTORS: Mapping[tuple[str, str], Callable[..., Any]] = {
    ("argparse", "Namespace"): _namespace,
    ("types", "SimpleNamespace"): _namespace,
    ("collections", "OrderedDict"): _ordered_dict,
    ("collections", "defaultdict"): _default_dict,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "PurePosixPath"): _path,
    ("pathlib._local", "PosixPath"): _path,
    ("pathlib._local", "PurePosixPath"): _path,
    ("torch", "Size"): _size,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("_codecs", "encode"): _encode,
    ("numpy", "ndarray"): _array,
    ("numpy", "dtype"): _numpy_type,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _empty_array for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _numpy_scalar for core in ("core", "_core")},
    **{
        (module, name): constructor
        for module in ("builtins", "__builtin__")
        for name, constructor in {
            "dict": _dict,
            "set": _collection(set),
            "frozenset": _collection(frozenset),
            "bytes": _empty_bytes,
            "complex": _numbers(complex, float),
            "range": _numbers(range, int),
            "xrange": _numbers(range, int),
            "slice": _numbers(slice, int, type(None)),
            "getattr": _enum_member,
        }.items()
    },
}
