"""Unpickler that never imports, calls or changes anything that a checkpoint file names.

`load` is a stack machine for the opcodes that pickle protocols 2 to 5 write (PEP 307, PEP 3154,
PEP 574). It differs from Python's unpickler in three ways:

- A name in the file becomes a `Global`, an immutable pair of strings. No class, function or module
  is ever on the stack.
- Calls are replaced by the constructors in `pickle_names`, which check their arguments and return
  plain values or stand-ins.
- Opcodes that add items or set state dispatch on the exact type of a value that this machine has
  built. No method or attribute of the value is looked up, so an instance cannot provide a
  `__setstate__`.

The machine does not recurse. It limits the size of the pickle, the number of opcodes and the
nesting of the result.
"""

from __future__ import annotations

import io
import itertools
import pickle
import struct
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch

from msrl.checkpoint.torch_files.pickle_names import (
    Foreign,
    Global,
    NumpyType,
    StorageRef,
    check_key,
    check_members,
    construct,
    fill_array,
    is_foreign,
    resolve,
    set_numpy_type,
    unwanted_name_error,
)

MAX_BYTES = 512 << 20
MAX_OPCODES = 50_000_000
MAX_DEPTH = 100
MAX_VALUES = 100_000_000  # counting a value again for every container that refers to it

_LATEST_PROTOCOL = 5
_LEAVES = frozenset({
    type(None), bool, int, float, complex, str, bytes, bytearray, slice, range, PurePosixPath,
    torch.dtype, torch.Size, torch.Tensor, torch.nn.Parameter, np.ndarray, NumpyType,
})  # fmt: skip


def load(data: bytes, load_storage: Callable[[object], StorageRef] | None = None) -> Any:
    """Return the value of a pickle.

    Args:
        data: The complete pickle.
        load_storage: Function from a persistent id to the storage of a tensor; None refuses
            persistent ids.

    Raises:
        UnpicklingError: The pickle contains something that a checkpoint does not, or is too large.
        ValueError, TypeError, LookupError, struct.error: The pickle is malformed.
    """
    if len(data) > MAX_BYTES:
        raise UnpicklingError(
            f"it has {len(data)} bytes besides tensors, more than the limit of {MAX_BYTES}"
        )
    value = _Machine(data, load_storage).run()
    _check_result(value)
    return value


class _Machine:
    """Stack, memo and position in one pickle."""

    def __init__(self, data: bytes, load_storage: Callable[[object], StorageRef] | None) -> None:
        self.load_storage = load_storage
        self.stack: list[Any] = []
        self._file = io.BytesIO(data)
        self.read = self._file.read
        self._marked: list[list[Any]] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Execute opcodes up to STOP and return the value on top of the stack."""
        opcodes = iter(partial(self.read, 1), pickle.STOP)
        for opcode in itertools.islice(opcodes, MAX_OPCODES):
            _HANDLERS[opcode](self)
        if next(opcodes, None) is not None:
            raise UnpicklingError(f"it has more than {MAX_OPCODES} pickle opcodes")
        return self.stack.pop()

    def read_sized(self, size: int) -> bytes:
        data = self.read(size)
        if len(data) != size:
            raise UnpicklingError("its pickle is truncated")
        return data

    def read_number(self, layout: struct.Struct) -> Any:
        return layout.unpack(self.read(layout.size))[0]

    def read_byte(self) -> int:
        return self.read(1)[0]

    def read_line(self) -> str:
        return self._file.readline().decode().removesuffix("\n")

    def push_mark(self) -> None:
        if len(self._marked) >= MAX_DEPTH:  # each mark begins a container in the one before it
            raise UnpicklingError(f"its values are nested more than {MAX_DEPTH} deep")
        self._marked.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """Return the items above the topmost mark and remove both."""
        items, self.stack = self.stack, self._marked.pop()
        return items

    def memoize(self, index: int) -> None:
        self._memo[index] = self.stack[-1]

    def memoize_next(self) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def recall(self, index: int) -> None:
        self.stack.append(self._memo[index])


# --- Opcodes that push a value ---


def _constant(make: Callable[[], object]) -> Callable[[_Machine], None]:
    def push(machine: _Machine) -> None:
        machine.stack.append(make())

    return push


def _number(layout: str) -> Callable[[_Machine], None]:
    compiled = struct.Struct(layout)

    def push(machine: _Machine) -> None:
        machine.stack.append(machine.read_number(compiled))

    return push


def _sized_handler(layout: str, convert: Callable[[bytes], object]) -> Callable[[_Machine], None]:
    """Return a handler that pushes data prefixed with its length."""
    compiled = struct.Struct(layout)

    def push(machine: _Machine) -> None:
        machine.stack.append(convert(machine.read_sized(machine.read_number(compiled))))

    return push


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _tuple(size: int) -> Callable[[_Machine], None]:
    def push(machine: _Machine) -> None:
        items = tuple(machine.stack[-size:])
        if len(items) < size:
            raise UnpicklingError("its pickle builds a tuple from missing values")
        machine.stack[-size:] = [items]

    return push


def _marked_tuple(machine: _Machine) -> None:
    items = machine.pop_mark()
    machine.stack.append(tuple(items))


def _frozen_set(machine: _Machine) -> None:
    items = machine.pop_mark()
    machine.stack.append(frozenset(check_members(items)))


# --- Opcodes that change a container ---


def _append(machine: _Machine) -> None:
    item = machine.stack.pop()
    _extend(machine.stack[-1], [item])


def _append_marked(machine: _Machine) -> None:
    items = machine.pop_mark()
    _extend(machine.stack[-1], items)


def _extend(target: object, items: list[Any]) -> None:
    if type(target) is not list:
        raise UnpicklingError(f"it appends to a {_type_name(target)}")
    target.extend(items)


def _set_item(machine: _Machine) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    _update(machine.stack[-1], [key, value])


def _set_marked_items(machine: _Machine) -> None:
    items = machine.pop_mark()
    _update(machine.stack[-1], items)


def _update(target: object, items: list[Any]) -> None:
    if type(target) is not dict and type(target) is not OrderedDict:
        raise UnpicklingError(f"it sets items of a {_type_name(target)}")
    if len(items) % 2:
        raise UnpicklingError("it sets a key without a value")
    for index in range(0, len(items), 2):
        target[check_key(items[index], len(target))] = items[index + 1]


def _add_marked_items(machine: _Machine) -> None:
    items = machine.pop_mark()
    target = machine.stack[-1]
    if type(target) is not set:
        raise UnpicklingError(f"it adds members to a {_type_name(target)}")
    target.update(check_members(items, len(target)))


# --- Opcodes that name, call and set state ---


def _global(machine: _Machine) -> None:
    module, name = machine.read_line(), machine.read_line()
    machine.stack.append(resolve(module, name))


def _stack_global(machine: _Machine) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise UnpicklingError("the name of a class is not text")
    machine.stack.append(resolve(module, name))


def _call(machine: _Machine) -> None:
    """Handle REDUCE and NEWOBJ, which use the same constructors."""
    arguments = machine.stack.pop()
    machine.stack[-1] = construct(machine.stack[-1], arguments)


def _call_with_keywords(machine: _Machine) -> None:
    keywords, arguments = machine.stack.pop(), machine.stack.pop()
    machine.stack[-1] = construct(machine.stack[-1], arguments, keywords)


def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    setter = _STATE_SETTERS.get(type(target))
    if setter is None:
        raise UnpicklingError(
            f"it sets the state of a {_type_name(target)}, which may be harmful and was not done"
        )
    setter(target, state)


def _set_foreign(target: Foreign, state: object) -> None:
    target.state = state


def _set_namespace(target: Namespace, state: object) -> None:
    if type(state) is not dict or not all(type(key) is str for key in state):
        raise UnpicklingError("its arguments are not named values")
    vars(target).update(state)


def _set_ordered(_: object, state: object) -> None:
    """Ignore the attributes that torch adds to a state dict: the versions of its modules."""
    if type(state) is not dict:
        raise UnpicklingError(
            "it sets the state of an OrderedDict to something other than attributes"
        )


def _persistent(machine: _Machine) -> None:
    if machine.load_storage is None:
        raise UnpicklingError("it refers to a tensor outside of the pickle, but there is none")
    machine.stack[-1] = machine.load_storage(machine.stack[-1])


def _type_name(value: object) -> str:
    return f"{value.module}.{value.name}" if isinstance(value, Global) else type(value).__name__


_STATE_SETTERS: dict[type, Callable[[Any, object], None]] = {
    Foreign: _set_foreign,
    Namespace: _set_namespace,
    OrderedDict: _set_ordered,
    np.ndarray: fill_array,
    NumpyType: set_numpy_type,
}

_WORD, _LONG_WORD = struct.Struct("<I"), struct.Struct("<Q")


def _protocol(machine: _Machine) -> None:
    version = machine.read_byte()
    if version > _LATEST_PROTOCOL:
        raise UnpicklingError(f"it has unknown pickle protocol {version}")


class _OpcodeHandlers(dict[bytes, Callable[[_Machine], object]]):
    """Opcode handlers."""

    def __missing__(self, opcode: bytes) -> Any:
        if not opcode:
            raise UnpicklingError("its pickle is truncated")
        raise UnpicklingError(
            f"it contains the pickle opcode {opcode!r}, which torch.save does not write"
        )


_HANDLERS = _OpcodeHandlers(
    {
        pickle.PROTO: _protocol,
        pickle.FRAME: lambda machine: machine.read_number(_LONG_WORD),
        pickle.MARK: _Machine.push_mark,
        pickle.POP: lambda machine: machine.stack.pop(),
        pickle.POP_MARK: _Machine.pop_mark,
        pickle.DUP: lambda machine: machine.stack.append(machine.stack[-1]),
        pickle.NONE: _constant(lambda: None),
        pickle.NEWTRUE: _constant(lambda: True),
        pickle.NEWFALSE: _constant(lambda: False),
        pickle.EMPTY_TUPLE: _constant(tuple),
        pickle.EMPTY_LIST: _constant(list),
        pickle.EMPTY_DICT: _constant(dict),
        pickle.EMPTY_SET: _constant(set),
        pickle.BININT: _number("<i"),
        pickle.BININT1: lambda machine: machine.stack.append(machine.read_byte()),
        pickle.BININT2: _number("<H"),
        pickle.BINFLOAT: _number(">d"),
        # LONG4 is for integers of more than 2040 bits, which no checkpoint contains.
        pickle.LONG1: _sized_handler("<B", _integer),
        pickle.SHORT_BINUNICODE: _sized_handler("<B", _text),
        pickle.BINUNICODE: _sized_handler("<I", _text),
        pickle.BINUNICODE8: _sized_handler("<Q", _text),
        pickle.SHORT_BINBYTES: _sized_handler("<B", bytes),
        pickle.BINBYTES: _sized_handler("<I", bytes),
        pickle.BINBYTES8: _sized_handler("<Q", bytes),
        pickle.BYTEARRAY8: _sized_handler("<Q", bytearray),
        pickle.TUPLE1: _tuple(1),
        pickle.TUPLE2: _tuple(2),
        pickle.TUPLE3: _tuple(3),
        pickle.TUPLE: _marked_tuple,
        pickle.FROZENSET: _frozen_set,
        pickle.APPEND: _append,
        pickle.APPENDS: _append_marked,
        pickle.SETITEM: _set_item,
        pickle.SETITEMS: _set_marked_items,
        pickle.ADDITEMS: _add_marked_items,
        pickle.BINPUT: lambda machine: machine.memoize(machine.read_byte()),
        pickle.LONG_BINPUT: lambda machine: machine.memoize(machine.read_number(_WORD)),
        pickle.MEMOIZE: _Machine.memoize_next,
        pickle.BINGET: lambda machine: machine.recall(machine.read_byte()),
        pickle.LONG_BINGET: lambda machine: machine.recall(machine.read_number(_WORD)),
        pickle.GLOBAL: _global,
        pickle.STACK_GLOBAL: _stack_global,
        pickle.REDUCE: _call,
        pickle.NEWOBJ: _call,
        pickle.NEWOBJ_EX: _call_with_keywords,
        pickle.BUILD: _build,
        pickle.BINPERSID: _persistent,
    }
)


# --- The result ---


@dataclass(frozen=True, slots=True)
class _Extent:
    """Nesting depth and number of values of a container.

    A value is counted again for every container that refers to it.
    """

    depth: int
    num_values: int


def _check_result(root: object) -> None:
    """Refuse values that other code cannot traverse, and internal values of this machine.

    These are cycles, deep nesting, and shared containers that multiply.
    """
    extents: dict[int, _Extent | None] = {}  # by id; None while a container is being visited
    pending: list[tuple[object, list[object] | None]] = [([root], None)]
    num_open = 0  # containers around the value
    while pending:
        value, members = pending.pop()
        if members is not None:
            extents[id(value)] = _extent(members, extents)
            num_open -= 1
        elif id(value) not in extents:
            extents[id(value)] = None
            members = _members(value)
            num_open += 1
            if num_open > MAX_DEPTH + 1:  # with the list around the root
                raise _too_large()
            pending.append((value, members))
            pending.extend((member, None) for member in members if type(member) not in _LEAVES)


def _extent(members: list[object], extents: dict[int, _Extent | None]) -> _Extent:
    depth, num_values = 0, len(members)
    for member in members:
        if type(member) in _LEAVES:
            continue
        inner = extents[id(member)]
        if inner is None:
            raise UnpicklingError("it has a value that contains itself")
        depth, num_values = max(depth, inner.depth), num_values + inner.num_values
    if depth > MAX_DEPTH or num_values > MAX_VALUES:
        raise _too_large()
    return _Extent(depth + 1, num_values)


def _too_large() -> UnpicklingError:
    return UnpicklingError(
        f"its values are nested more than {MAX_DEPTH} deep, "
        f"or are more than {MAX_VALUES} with shared values expanded"
    )


def _members(value: Any) -> list[object]:
    """Return the values inside a container; raise UnpicklingError if it does not belong there."""
    value_type = type(value)
    if value_type is dict or value_type is OrderedDict:
        return [*value.keys(), *value.values()]
    if value_type in (list, tuple, set, frozenset):
        return list(value)
    if value_type is Namespace:
        return list(vars(value).values())
    if value_type is Foreign:
        state = list(value.state.values()) if type(value.state) is dict else [value.state]
        return [*value.arguments, *state]
    if value_type is Global and is_foreign(value):
        return []
    if value_type is Global:
        raise unwanted_name_error(value.module, value.name)
    raise UnpicklingError(
        f"it contains a {value_type.__name__}, which does not belong in a checkpoint"
    )
