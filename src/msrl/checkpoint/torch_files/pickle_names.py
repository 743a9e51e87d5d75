"""Names that pickles in checkpoints may use, and constructors for their values.

A constructor receives values from the file, so it checks their types before it uses them, and it
returns a new plain value or one of the stand-ins below. It never returns a class, a function, a
module or an object that outlives the file.
"""

from __future__ import annotations

import math
import re
import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_NUMPY_TYPE = re.compile(r"(b1|[iu][1248]|f[248]|c8|c16|[SU]\d{1,6})")
_MAX_AXES = 64
MAX_TUPLE_KEYS = 1000  # of a dict or set
_MAX_REPEATED = 1 << 24  # elements of a tensor that repeats storage elements, as `expand` does


@dataclass(frozen=True, slots=True)
class Global:
    """Name of a class or function in a pickle; nothing was imported for it."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class StorageRef:
    """Memory of a tensor in a file."""

    dtype: torch.dtype
    memory: torch.UntypedStorage
    num_elements: int


class Foreign:
    """Value of a class that is not imported: its name, arguments and state in the file."""

    __slots__ = ("arguments", "name", "state")

    def __init__(self, name: str, arguments: tuple[object, ...]) -> None:
        self.name, self.arguments, self.state = name, arguments, None

    name: str
    arguments: tuple[object, ...]
    state: Any


class NumpyType:
    """Element type of NumPy as text.

    A numpy.dtype is shared in the process, so it must not receive state from a file.
    """

    __slots__ = ("order", "text")

    def __init__(self, text: str) -> None:
        self.text, self.order = text, "="

    text: str
    order: str

    def dtype(self) -> np.dtype[Any]:
        """Return the numpy.dtype."""
        return np.dtype(self.order + self.text)


def unwanted_name_error(module: str, name: str) -> UnpicklingError:
    """Return the error for a name that does not belong in a checkpoint."""
    return UnpicklingError(
        f"it names {module}.{name}, which does not belong in a checkpoint; it may be harmful and "
        "was not run"
    )


def resolve(module: str, name: str) -> Global | torch.dtype:
    """Return the stand-in for a name; torch's dtypes are immutable and represent themselves.

    Raises:
        UnpicklingError: The name does not belong in a checkpoint.
    """
    if module == "torch" and name in _TORCH_TYPES:
        return _TORCH_TYPES[name]
    stand_in = Global(module, name)
    if (module, name) in CONSTRUCTORS or is_foreign(stand_in) or _is_storage(module, name):
        return stand_in
    raise unwanted_name_error(module, name)


def construct(target: object, arguments: object, keywords: object = None) -> Any:
    """Return the value of calling `target` with values from the file.

    Raises:
        UnpicklingError: `target` is not a name, or its constructor does not accept the arguments.
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


def check_key(key: object, number: int) -> Any:
    """Return key or member `number` of a dict or set if its hash takes little time.

    Hashing deeply nested tuples overflows the C stack. Keys with one hash take time that grows with
    the square of their number. Integers below the modulus of Python's hash have different ones,
    and hashes of text are random; tuples of one hash can be computed, so their number is limited.
    """
    members: tuple[object, ...] = (key,)
    if isinstance(key, tuple):
        if number >= MAX_TUPLE_KEYS:
            raise UnpicklingError(f"it has more than {MAX_TUPLE_KEYS} keys with a tuple among them")
        members = key
    for member in members:
        if type(member) not in _KEYS:
            raise UnpicklingError(f"it uses a {type(member).__name__} as a key")
        if type(member) is int and abs(member) >= sys.hash_info.modulus:
            raise UnpicklingError("it uses an integer of more than 61 bits as a key")
    return key


def check_members(items: Iterable[object], num_before: int = 0) -> Iterator[Any]:
    """Yield the members of a set that has `num_before` others, and check them as keys."""
    for number, item in enumerate(items, num_before):
        yield check_key(item, number)


def storage_dtype(storage_class: object) -> torch.dtype | None:
    """Return the element type of a storage class; None if the value is not a storage class."""
    if not isinstance(storage_class, Global):
        return None
    if not _is_storage(storage_class.module, storage_class.name):
        return None
    return _STORAGES[storage_class.name]


def fill_array(array: np.ndarray[Any, Any], state: object) -> None:
    """Set type, shape and elements of an array from its pickled state (`ndarray.__reduce__`)."""
    version, shape, element_type, is_fortran, data = _items(state, 5)
    if (
        type(version) is not int
        or type(is_fortran) is not bool
        or not isinstance(element_type, NumpyType)
        or type(data) is not bytes
    ):
        raise UnpicklingError("it contains an array of Python objects or of an unknown form")
    dtype, sizes = element_type.dtype(), _sizes(shape)
    if len(data) != dtype.itemsize * math.prod(sizes):
        raise UnpicklingError(
            f"it contains an array of {len(data)} bytes, which do not match shape {list(sizes)}"
        )
    _check_text(dtype, data)
    # NumPy writes the Fortran flag as a bool.
    array.__setstate__((1, sizes, dtype, is_fortran, data))  # pyright: ignore[reportArgumentType]


def _check_text(dtype: np.dtype[Any], data: bytes) -> None:
    """Refuse text with numbers that are no characters, for which NumPy raises SystemError."""
    if dtype.kind == "U" and data:
        characters = np.frombuffer(data, np.dtype(np.uint32).newbyteorder(dtype.byteorder))
        if characters.max() > sys.maxunicode:
            raise UnpicklingError("it contains text with invalid characters")


def set_numpy_type(element_type: NumpyType, state: object) -> None:
    """Set the byte order of an element type."""
    _, order, *fields = _items(state, 8)
    if (
        type(order) is not str
        or order not in ("<", ">", "|", "=")
        or any(item is not None for item in fields[:3])
    ):
        raise UnpicklingError("it contains an array of structures")
    element_type.order = order


# --- Constructors ---


def _foreign(target: Global, arguments: tuple[object, ...]) -> Foreign:
    return Foreign(f"{target.module}.{target.name}", arguments)


def _enum_member(owner: object, name: object) -> Foreign:
    """Read an enumeration member as pickled by Python 3.11.0 to 3.11.3: getattr(class, name)."""
    if not isinstance(owner, Global) or not is_foreign(owner) or type(name) is not str:
        raise unwanted_name_error("builtins", "getattr")
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
    raise UnpicklingError(f"it contains a defaultdict of {name}; only one of dict is supported")


def _collection(constructor: Callable[[Iterable[Any]], Any]) -> Callable[..., Any]:
    def make(items: object = ()) -> Any:
        if type(items) is not list and type(items) is not tuple:
            raise UnpicklingError(f"it builds a set from a {type(items).__name__}")
        return constructor(check_members(items))

    return make


def _encode(text: object, encoding: object) -> bytes:
    """Read bytes, which pickle protocol 2 writes as text with the same values."""
    if type(text) is not str or type(encoding) is not str or encoding != "latin1":
        raise UnpicklingError("it encodes text with a codec other than latin1")
    return text.encode("latin1")


def _path(*segments: Any) -> PurePosixPath:
    if not all(type(segment) is str for segment in segments):
        raise UnpicklingError("it builds a path from something other than text")
    return PurePosixPath(*segments)


def _numbers(constructor: Callable[..., Any], *types: type) -> Callable[..., Any]:
    def make(*values: Any) -> Any:
        if not all(type(value) in types for value in values):
            raise UnpicklingError(
                f"it builds a {getattr(constructor, '__name__', 'value')} from something other "
                "than numbers"
            )
        return constructor(*values)

    return make


def _empty_bytes() -> bytes:
    """Read empty bytes, which pickle protocol 2 writes as a call of their class."""
    return b""


def _size(sizes: object) -> torch.Size:
    return torch.Size(_sizes(sizes))


def _numpy_type(text: object, *_: object) -> NumpyType:
    if type(text) is not str or _NUMPY_TYPE.fullmatch(text) is None:
        raise UnpicklingError(
            "it contains an array of Python objects or structures; only numbers and text are "
            "supported"
        )
    return NumpyType(text)


def _empty_array(array_class: object, *_: object) -> np.ndarray[Any, Any]:
    """Return an array for `fill_array` to fill."""
    if not isinstance(array_class, Global) or (array_class.module, array_class.name) != (
        "numpy",
        "ndarray",
    ):
        raise UnpicklingError("it contains an array of an unknown class")
    return np.ndarray((0,), np.uint8)


def _array(*_: object) -> np.ndarray[Any, Any]:
    """Refuse the class of arrays, which is only an argument of `_empty_array`."""
    raise UnpicklingError("it describes an array in an unknown form")


def _numpy_scalar(element_type: object, data: object) -> Any:
    if (
        not isinstance(element_type, NumpyType)
        or type(data) is not bytes
        or len(data) != element_type.dtype().itemsize
    ):
        raise UnpicklingError("it contains a number of an unknown type")
    _check_text(element_type.dtype(), data)
    return np.frombuffer(data, element_type.dtype())[0].item() if data else ""


def _tensor(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    requires_grad: object = False,
    _hooks: object = None,
    bits: object = None,
) -> Tensor:
    """Rebuild a tensor on the memory of its storage, within which all of its elements must be."""
    sizes, steps, begin = _sizes(shape), _sizes(strides), _sizes((offset,))[0]
    if (
        not isinstance(storage, StorageRef)
        or len(sizes) != len(steps)
        or len(sizes) > _MAX_AXES
        or type(requires_grad) is not bool
    ):
        raise UnpicklingError("it describes a tensor in an unknown form")
    if bits:
        raise UnpicklingError(
            "it contains a conjugated or negated view of a tensor, which is not supported"
        )
    end = begin
    if all(sizes):
        end += 1 + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    num_elements = math.prod(sizes)
    if end > storage.num_elements or num_elements > max(storage.num_elements, _MAX_REPEATED):
        raise UnpicklingError(
            f"it contains a tensor of {list(sizes)} with strides {list(steps)} at {begin}, "
            f"beyond the {storage.num_elements} elements of its storage"
        )
    tensor = torch.empty(0, dtype=storage.dtype).set_(storage.memory, begin, sizes, steps)
    return tensor.requires_grad_(requires_grad)


def _parameter(data: object, requires_grad: object, _hooks: object = None) -> torch.nn.Parameter:
    if not isinstance(data, Tensor) or type(requires_grad) is not bool:
        raise UnpicklingError("it describes a parameter in an unknown form")
    return torch.nn.Parameter(data, requires_grad)


def _is_storage(module: str, name: str) -> bool:
    return module in _STORAGE_MODULES and name in _STORAGES


def _items(state: object, count: int) -> tuple[Any, ...]:
    if type(state) is not tuple or len(state) < count:
        raise UnpicklingError("it contains an array in an unknown form")
    return state[:count]


def _sizes(values: Any) -> tuple[int, ...]:
    """Return sizes, strides or offsets: non-negative integers that fit into 64 bits."""
    if type(values) not in (tuple, list, torch.Size) or not all(
        type(value) is int and 0 <= value < 1 << 63 for value in values
    ):
        raise UnpicklingError("it contains a tensor or array whose sizes are not integers")
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
