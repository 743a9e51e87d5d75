"""Process that runs the tests of a row apart from the program that they test.

The text of this file runs inside the sandbox (`code_harness.py`). It forks: the child runs the
program, and the parent, the tester, runs the tests. A name of the program is a `RemoteObject` in
the tester, whose calls run in the child. Only plain data crosses the pipes, as JSON, so that
patched builtins and objects that claim to be equal have no effect on the tests. The tester reads
the tests after the fork and is not dumpable, so the program cannot read its memory or files.

An object of the program that is not plain stays in the child. The tester compares only its plain
value (`1` for a subclass of int, a list for a subclass of list). Without one, it differs from every
plain value. Its arithmetic with plain values must return an object, which is marked as derived: the
program has seen the expected value, so `abs`, `float`, `len`, `<` and the like must not turn such
an object into plain data. What the tests compute from it is derived, too. So is the result of a
method that the tests call with arguments, as in `f(3).equals([1, 2])`, unless they name its class
(`Stack().push(1)`) or its object.

Text of the program never runs in the tester, where it could read the word: `_forbid_other_code`
refuses it, and `eval` of such a text runs in the child.

Messages are lines of JSON: [operation, target, arguments, keywords] and its answer
{"value": ...} or {"error": ...}. Only the standard library is used.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import io
import json
import operator
import os
import signal
import sys
import timeit
import traceback
import types
from contextlib import suppress
from itertools import islice, product
from typing import Any

DUMPABLE = 4  # prctl(2)
MAX_ITEMS = 100_000  # of an iterator of the program that a test searches
MAX_INTEGER = 1 << 62
MODULE_ALIASES = {"np": "numpy", "pd": "pandas"}
# Modules whose functions and classes a program may import for the tests.
LIBRARY = frozenset(
    (
        "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq",
        "itertools", "json", "math", "operator", "random", "re", "statistics", "string", "typing",
    )
)  # fmt: skip
# Modules of the standard library that run code which they load or generate themselves.
LOADERS = ("importlib._bootstrap", "importlib._bootstrap_external")
GENERATORS = (*LOADERS, "collections", "dataclasses", "typing")
# Types with a short list of constructor arguments.
CONSTRUCTED: dict[tuple[str, str], Any] = {
    ("builtins", "complex"): lambda v: [v.real, v.imag],
    ("builtins", "range"): lambda v: [v.start, v.stop, v.step],
    ("builtins", "bytearray"): lambda v: [bytes(v)],
    ("fractions", "Fraction"): lambda v: [v.numerator, v.denominator],
    ("decimal", "Decimal"): lambda v: [str(v)],
    ("uuid", "UUID"): lambda v: [str(v)],
    ("datetime", "date"): lambda v: [v.year, v.month, v.day],
    ("datetime", "timedelta"): lambda v: [v.days, v.seconds, v.microseconds],
    ("datetime", "time"): lambda v: [v.hour, v.minute, v.second, v.microsecond],
    ("datetime", "datetime"): lambda v: [
        v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond,
    ],
    ("collections", "deque"): lambda v: [list(v)],
    ("collections", "Counter"): lambda v: [dict(v)],
    ("collections", "OrderedDict"): lambda v: [list(v.items())],
    ("collections", "defaultdict"): lambda v: [None, dict(v)],
}  # fmt: skip
CONTAINERS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
BASES: tuple[Any, ...] = (bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset)
ITERATORS = (types.GeneratorType, map, filter, zip, enumerate, reversed, type({}.keys()),
             type({}.values()), type({}.items()), type(iter([])))  # fmt: skip
MUTABLE = (list, dict, set, bytearray)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
BINARY = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and_", "or_", "xor",
    "lshift", "rshift",
)  # fmt: skip
ORDER = ("lt", "le", "gt", "ge")
UNARY = {
    "len": len, "truth": bool, "str": str, "repr": repr, "hash": hash, "int": int, "float": float,
    "abs": abs, "neg": operator.neg, "pos": operator.pos, "invert": operator.invert,
    "index": operator.index, "iter": iter, "next": next, "reversed": reversed,
}  # fmt: skip
# Operations that return no plain data for an object that is derived from an expected value.
MEASURING = frozenset({*UNARY, "round"} - {"str", "repr", "hash"})
# Methods with which tests measure an array or a duration.
MEASURES = frozenset(
    ("all", "any", "item", "max", "mean", "min", "std", "sum", "tolist", "total_seconds")
)


class RemoteObject:
    """Object of the other process."""

    __slots__ = (
        "_remote_base", "_remote_id", "_remote_is_derived", "_remote_is_method",
        "_remote_is_named", "_remote_peer",
    )  # fmt: skip

    def __init__(self, peer: Peer, number: int, base: str) -> None:
        object.__setattr__(self, "_remote_is_derived", False)
        object.__setattr__(self, "_remote_is_method", False)
        object.__setattr__(self, "_remote_is_named", False)
        object.__setattr__(self, "_remote_peer", peer)
        object.__setattr__(self, "_remote_id", number)
        object.__setattr__(self, "_remote_base", base)

    @property
    def __class__(self) -> type:
        return next((base for base in BASES if base.__name__ == self._remote_base), RemoteObject)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._remote_peer.call(self, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        return self._remote_peer.request("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._remote_peer.request("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._remote_peer.request("del", self, name)

    def __getitem__(self, key: Any) -> Any:
        return self._remote_peer.request("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._remote_peer.request("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._remote_peer.request("delitem", self, key)

    def __contains__(self, item: Any) -> bool:
        return self._remote_peer.contains(self, item)

    def __eq__(self, other: object) -> Any:
        return self._remote_peer.equal(self, other)

    def __ne__(self, other: object) -> Any:
        result = self._remote_peer.equal(self, other)
        return result if result is NotImplemented else not result

    def __enter__(self) -> Any:
        return self._remote_peer.request("enter", self)

    def __exit__(self, *error: object) -> None:
        self._remote_peer.request("exit", self)

    def __round__(self, digits: int | None = None) -> Any:
        return self._remote_peer.request("round", self, digits)

    def __instancecheck__(self, value: Any) -> bool:
        return bool(self._remote_peer.request("instance", self, value))


def _unary_method(name: str) -> Any:
    return lambda self: self._remote_peer.request(name, self)


def _binary_method(name: str, *, reflected: bool) -> Any:
    return lambda self, other: self._remote_peer.binary(name, self, other, reflected)


def _add_operators() -> None:
    for name in UNARY:
        setattr(RemoteObject, "__bool__" if name == "truth" else f"__{name}__", _unary_method(name))
    for name in BINARY:
        bare = name.strip("_")
        setattr(RemoteObject, f"__{bare}__", _binary_method(name, reflected=False))
        setattr(RemoteObject, f"__r{bare}__", _binary_method(name, reflected=True))
    for name in ORDER:
        setattr(RemoteObject, f"__{name}__", _binary_method(name, reflected=False))


_add_operators()


class Peer:
    """One end of the connection, with the objects that the other end may name."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader = os.fdopen(reader, "rb")
        self._writer = os.fdopen(writer, "wb")
        self._objects: list[Any] = []

    # --- Requests to the other process ---

    def request(self, operation: str, target: Any, *arguments: Any) -> Any:
        """Perform an operation on an object of the other process."""
        return self.decode(self._exchange(operation, target, arguments, {})["value"])

    def call(self, target: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        """Call an object of the other process, which may change mutable arguments."""
        answer = self._exchange("call", target, arguments, keywords)
        for name, encoded in answer.get("changed", {}).items():
            old = keywords[name] if name in keywords else arguments[int(name)]
            _write_back(old, self.decode(encoded))
        sys.stdout.write(answer.get("printed", ""))
        return self.decode(answer["value"])

    def binary(self, name: str, target: Any, other: Any, reflected: bool) -> Any:
        """Perform a binary operation."""
        return self.request("binary", target, name, other, reflected)

    def equal(self, target: Any, other: Any) -> Any:
        """Compare an object of the other process."""
        return bool(self.request("eq", target, other))

    def contains(self, target: Any, item: Any) -> bool:
        """Return True if an object of the other process contains an item."""
        return bool(self.request("contains", target, item))

    def _exchange(self, operation: str, target: Any, arguments: Any, keywords: Any) -> Any:
        encoded = [self.encode(argument) for argument in arguments]
        named = {name: self.encode(value) for name, value in keywords.items()}
        self._send([operation, self.encode(target), encoded, named])
        while True:
            message = self._receive()
            if isinstance(message, list):
                self._send(self._answer(message))
                continue
            if "error" in message:
                raise self._error(message["error"], operation)
            return message

    # --- Requests of the other process ---

    def serve(self) -> None:
        """Answer requests until the other process ends."""
        while True:
            self._send(self._answer(self._receive()))

    def _answer(self, message: list[Any]) -> dict[str, Any]:
        try:
            operation, target, arguments, keywords = message
            values = [self.decode(argument) for argument in arguments]
            named = {name: self.decode(value) for name, value in keywords.items()}
            if operation == "call":
                return self._answer_call(self.decode(target), message, values, named)
            result = self.perform(operation, self.decode(target), values)
            return {"value": self.encode(result)}
        except BaseException as error:
            return {"error": self._describe(error)}

    def _answer_call(
        self, target: Any, message: list[Any], values: list[Any], named: dict[str, Any]
    ) -> dict[str, Any]:
        printed, stdout = io.StringIO(), sys.stdout
        sys.stdout = printed
        try:
            result = self.perform("call", target, [values, named])
        finally:
            sys.stdout = stdout
        changed = {}
        sent = {**dict(enumerate(message[2])), **message[3]}
        for name, value in {**dict(enumerate(values)), **named}.items():
            encoded = self.encode(value) if type(value) in MUTABLE else sent[name]
            if encoded != sent[name]:
                changed[str(name)] = encoded
        answer = {"value": self.encode(result), "changed": changed}
        return {**answer, "printed": printed.getvalue()}

    def perform(self, operation: str, target: Any, arguments: list[Any]) -> Any:
        """Perform an operation on an object of this process."""
        if operation == "call":
            return target(*arguments[0], **arguments[1])
        if operation in UNARY:
            return UNARY[operation](target)
        if operation == "binary":
            name, other, reflected = arguments
            function: Any = getattr(operator, name) if name in (*BINARY, *ORDER) else None
            return function(other, target) if reflected else function(target, other)
        return OPERATIONS[operation](target, *arguments)

    def _describe(self, error: BaseException) -> dict[str, Any]:
        names = [kind.__name__ for kind in type(error).__mro__]
        attributes = {}
        for name, value in getattr(error, "__dict__", {}).items():
            if not name.startswith("_"):
                attributes[name] = self.encode(value)
        arguments = [self.encode(value) for value in error.args]
        return {"names": names, "arguments": arguments, "attributes": attributes}

    def _error(self, description: dict[str, Any], operation: str) -> BaseException:
        """Return an exception of the other process as one of this process."""
        kind = self.error_class(description["names"], operation)
        error = kind.__new__(kind)
        error.args = tuple(self.decode(value) for value in description["arguments"])
        for name, value in description["attributes"].items():
            if not name.startswith("_"):
                setattr(error, name, self.decode(value))
        return error

    def error_class(self, names: list[str], operation: str) -> type[BaseException]:
        """Return the first class of the names that this process has."""
        if names[0] == "StopIteration":
            return StopIteration if operation == "next" else RuntimeError
        for name in names:
            kind = getattr(builtins, name, None)
            if isinstance(kind, type) and issubclass(kind, Exception):
                return kind
        return RuntimeError

    # --- Values ---

    def encode(self, value: Any) -> Any:
        """Return a value as JSON data."""
        kind = type(value)
        if value is None or kind in (bool, float, str) or (kind is int and _is_short(value)):
            return value
        if kind in (int, bytes):
            return [kind.__name__, hex(value) if kind is int else value.hex()]
        if kind is dict:
            return ["dict", [[self.encode(k), self.encode(v)] for k, v in value.items()]]
        if CONTAINERS.get(kind.__name__) is kind:
            return [kind.__name__, [self.encode(item) for item in value]]
        if kind is RemoteObject and value._remote_peer is self:
            return ["yours", value._remote_id]
        return self._encode_object(value, kind)

    def _encode_object(self, value: Any, kind: type) -> Any:
        name = (kind.__module__, kind.__name__)
        if name in CONSTRUCTED and getattr(value, "tzinfo", None) is None:
            module = sys.modules.get(name[0])
            if getattr(module, name[1], None) is kind:
                return ["new", *name, self.encode(CONSTRUCTED[name](value))]
        array = _encode_array(value, kind)
        return array or self.encode_reference(value)

    def encode_reference(self, value: Any) -> Any:
        """Return a value that stays in this process."""
        self._objects.append(value)
        if isinstance(value, types.CoroutineType):
            base = "coroutine"
        elif isinstance(value, type):
            base = "class"
        else:
            base = next((base.__name__ for base in BASES if isinstance(value, base)), "")
        return ["mine", len(self._objects) - 1, base]

    def decode(self, data: Any) -> Any:
        """Return the value of JSON data."""
        if not isinstance(data, list):
            return data
        kind, content = data[0], data[1]
        if kind in CONTAINERS:
            return CONTAINERS[kind](self.decode(item) for item in content)
        if kind == "dict":
            return {self.decode(key): self.decode(value) for key, value in content}
        if kind == "yours":
            return self._objects[content]
        if kind == "mine":
            remote = RemoteObject(self, int(content), str(data[2]))
            return _wait(remote) if data[2] == "coroutine" else remote
        return SCALARS[kind](*data[1:]) if kind in SCALARS else self.decode_named(kind, data[1:])

    def decode_named(self, kind: str, content: list[Any]) -> Any:
        """Return an object of the standard library."""
        if kind == "new" and (content[0], content[1]) in CONSTRUCTED:
            constructor = getattr(importlib.import_module(content[0]), content[1])
            return constructor(*self.decode(content[2]))
        raise ValueError(f"unknown value {kind}")

    # --- Messages ---

    def _send(self, message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")
        self._writer.flush()

    def _receive(self) -> Any:
        line = self._reader.readline()
        if not line:
            raise EOFError("the other process has ended")
        return json.loads(line)


class Program(Peer):
    """End of the process with the program. It performs every operation."""

    def __init__(self, reader: int, writer: int, namespace: dict[str, Any]) -> None:
        super().__init__(reader, writer)
        self._namespace = namespace

    def perform(self, operation: str, target: Any, arguments: list[Any]) -> Any:
        if operation == "names":
            return self._names(*arguments)
        return super().perform(operation, target, arguments)

    def _names(self, names: list[str], imports: list[str]) -> dict[str, Any]:
        """Return the kind and value of each name of the program, and add the tests' imports."""
        for statement in imports:
            added: dict[str, Any] = {}
            try:
                exec(statement, added)
            except ImportError:
                continue
            for name, value in added.items():
                self._namespace.setdefault(name, value)
        return {
            name: self._name(self._namespace[name]) for name in names if name in self._namespace
        }

    def _name(self, value: Any) -> tuple[str, Any]:
        if isinstance(value, types.ModuleType):
            return "module", value.__name__
        if isinstance(value, type) and issubclass(value, Exception):
            return "error", (value, [kind.__name__ for kind in value.__mro__])
        if isinstance(value, type):
            return "class", (value, value.__module__, value.__qualname__)
        if isinstance(value, FUNCTIONS):
            return "function", (value, value.__module__ or "", value.__qualname__)
        return "value", value

    def decode_named(self, kind: str, content: list[Any]) -> Any:
        if kind == "global":
            return operator.attrgetter(content[1])(importlib.import_module(content[0]))
        if kind == "module":
            return importlib.import_module(content[0])
        return super().decode_named(kind, content)


class Tester(Peer):
    """End of the process with the tests. It trusts nothing that the program sends."""

    def __init__(self, reader: int, writer: int) -> None:
        super().__init__(reader, writer)
        self._errors: dict[str, type[Exception]] = {}

    def names(
        self, names: list[str], called: set[str], stored: set[str], imports: list[str]
    ) -> dict[str, Any]:
        """Return the program's values of the names that the tests use.

        Names of builtins and modules keep their meaning. A program may define the function that the
        tests call under the name of a builtin, if they read no other name of the program.
        """
        defined = self.request("names", None, names, imports)
        values = {
            name: self._value_of_name(name, *defined[name], is_called=name in called)
            for name in names
            if name in defined
        }
        own = {name for name in values if not hasattr(builtins, name)} - stored
        return {
            name: value for name, value in values.items() if not (own and hasattr(builtins, name))
        }

    def _value_of_name(self, name: str, kind: str, value: Any, *, is_called: bool) -> Any:
        """Return the value of a name. The names of modules mean the real modules."""
        module = name if name in sys.stdlib_module_names else MODULE_ALIASES.get(name)
        if kind == "module" or (module and not is_called):
            return importlib.import_module(module or str(value))
        if kind == "error":
            return self._add_error(name, value[1])
        if kind == "value":
            return _mark(value, "_remote_is_named")
        remote, module, path = value
        if name[0].isupper():
            _mark(remote, "_remote_is_named")
        if module in LIBRARY:
            own = _attribute(importlib.import_module(module), path)
            if (getattr(own, "__module__", ""), getattr(own, "__qualname__", "")) == (module, path):
                return own
        return remote

    def _add_error(self, name: str, bases: list[str]) -> type[Exception]:
        """Return a class for an exception class of the program.

        It never catches a failed assertion of the tests, also as another name of AssertionError.
        """
        known = getattr(builtins, bases[0], None)
        if isinstance(known, type) and issubclass(known, Exception):
            if not issubclass(AssertionError, known):
                return known
            parent: Any = Exception
        else:
            parent = self.error_class(bases[1:], "")
        self._errors[bases[0]] = type(name, (parent,), {})
        return self._errors[bases[0]]

    def decode(self, data: Any) -> Any:
        value = super().decode(data)
        is_empty = isinstance(data, list) and data[0] == "array" and not value.size
        return value.view(_empty_array()) if is_empty else value

    def error_class(self, names: list[str], operation: str) -> type[BaseException]:
        own = next((self._errors[name] for name in names if name in self._errors), None)
        return own or super().error_class(names, operation)

    def request(self, operation: str, target: Any, *arguments: Any) -> Any:
        is_derived = _is_derived(target)
        if is_derived and operation == "get" and _is_measure(arguments[0]):
            raise AttributeError(arguments[0])
        result = super().request(operation, target, *arguments)
        if operation == "get":
            is_named = _has_mark(target, "_remote_is_named")
            _mark(result, "_remote_is_named" if is_named else "_remote_is_method")
        if not is_derived:
            return result
        if operation in MEASURING and type(result) is not RemoteObject:
            raise TypeError(f"the tests do not allow {operation} of a difference to a plain value")
        return _derived(result)

    def call(self, target: Any, arguments: Any, keywords: dict[str, Any]) -> Any:
        result = super().call(target, arguments, keywords)
        operands = (target, *arguments, *keywords.values())
        if len(operands) > 1 and _has_mark(target, "_remote_is_method"):
            if type(result) is not RemoteObject:
                raise TypeError("a method of the program must not compare with a plain value")
            return _derived(result)
        if _has_mark(target, "_remote_is_named") and target._remote_base == "class":
            _mark(result, "_remote_is_named")
        return _derived(result) if any(map(_is_derived, operands)) else result

    def binary(self, name: str, target: Any, other: Any, reflected: bool) -> Any:
        is_derived = _is_derived(target) or _is_derived(other)
        if type(other) is RemoteObject and not is_derived:
            return super().binary(name, target, other, reflected)
        plain = [] if is_derived else self.request("plain", target)
        function = getattr(operator, name)
        if plain:
            return function(other, plain[0]) if reflected else function(plain[0], other)
        result = None if name in ORDER else super().binary(name, target, other, reflected)
        if type(result) is not RemoteObject:
            raise TypeError("an object of the program cannot be compared with a plain value")
        return _derived(result)

    def equal(self, target: Any, other: Any) -> Any:
        if type(other) is RemoteObject:
            return super().equal(target, other)
        plain = [] if _is_derived(target) else self.request("plain", target)
        if plain:
            return plain[0] == other
        return False if other is None or isinstance(other, BASES) else NotImplemented

    def evaluate(self, text: Any, *namespaces: Any) -> Any:
        """Return the value of a text of the program, which the other process evaluates."""
        return super().request("evaluate", text, *namespaces)

    def contains(self, target: Any, item: Any) -> bool:
        members = [] if _is_derived(target) else self.request("members", target)
        if not members:
            raise TypeError("the tests do not search an object of the program")
        return item in members[0]

    def perform(self, operation: str, target: Any, arguments: list[Any]) -> Any:
        """Perform an operation of the program on an object of the tests.

        Attributes lead from most objects to the tests, so only attributes of objects whose class
        the tests define can be read.
        """
        is_own = type(target).__module__ == "__main__" and not isinstance(target, type)
        is_stream = isinstance(target, (io.StringIO, io.BytesIO))
        if operation in ("get", "set", "del"):
            if not (is_own or is_stream) or arguments[0].startswith("_"):
                raise AttributeError(arguments[0])
        elif operation not in ("call", "iter", "next") and not is_own:
            raise TypeError(f"the tests do not allow {operation}")
        return super().perform(operation, target, arguments)

    def encode_reference(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
            module = sys.modules.get(str(value.__module__))
            if value.__module__ != "__main__" and _attribute(module, value.__qualname__) is value:
                return ["global", value.__module__, value.__qualname__]
        return super().encode_reference(value)


def _is_derived(value: Any) -> bool:
    """Return True for an object that the program computed from a plain value of the tests."""
    return type(value) is RemoteObject and value._remote_is_derived


def _derived(result: Any) -> Any:
    """Mark a result of an operation on a derived object."""
    return _mark(result, "_remote_is_derived")


def _mark(value: Any, name: str) -> Any:
    """Mark an object of the program; plain data needs no mark."""
    if type(value) is RemoteObject:
        object.__setattr__(value, name, True)
    return value


def _has_mark(value: Any, name: str) -> bool:
    return type(value) is RemoteObject and object.__getattribute__(value, name)


def _is_measure(name: str) -> bool:
    """Return True for methods that return plain data, including `__array__` of NumPy."""
    return name in MEASURES or name.startswith("__")


def _attribute(module: Any, path: str) -> Any:
    """Return an object of a module, or None."""
    try:
        return operator.attrgetter(path)(module)
    except AttributeError:
        return None


def _await(coroutine: Any) -> Any:
    """Return the result of a coroutine."""
    import asyncio

    return asyncio.run(coroutine)


async def _wait(remote: RemoteObject) -> Any:
    """Return the result of a coroutine of the other process."""
    return remote._remote_peer.request("await", remote)


def _plain(value: Any) -> list[Any]:
    """Return the plain value of an object as a list, or an empty list."""
    for base in BASES:
        if isinstance(value, base):
            return [base(value)] if base is not bool else [bool(value)]
    return []


def _members(value: Any) -> list[Any]:
    """Return the items of a container or of a finite iterator as a list, or an empty list."""
    plain = _plain(value)
    if plain:
        return plain
    if isinstance(value, ITERATORS):
        items = list(islice(value, MAX_ITEMS + 1))
        return [items] if len(items) <= MAX_ITEMS else []
    return []


def _write_back(old: Any, new: Any) -> None:
    """Change a mutable argument as the program changed its copy."""
    if type(old) is not type(new) or type(old) not in MUTABLE:
        return
    if type(old) is list:
        for index, (before, after) in enumerate(zip(old, new, strict=False)):
            if type(before) is type(after) and type(before) in MUTABLE:
                _write_back(before, after)
                new[index] = before
        old[:] = new
    elif type(old) is bytearray:
        old[:] = new
    else:
        old.clear()
        old.update(new)


def _encode_array(value: Any, kind: type) -> Any:
    """Return a NumPy array or number as JSON data, or None for other values."""
    numpy = sys.modules.get("numpy")
    if numpy is None or kind.__module__ != "numpy":
        return None
    array = numpy.asarray(value)
    if array.dtype.kind not in "biufcSU":
        return None
    return ["array", array.dtype.str, list(array.shape), array.tobytes().hex(), array is value]


def _decode_array(dtype: str, shape: list[int], data: str, is_array: bool) -> Any:
    numpy = importlib.import_module("numpy")
    kind = numpy.dtype(dtype)
    if kind.kind not in "biufcSU":
        raise ValueError(f"unknown type {dtype}")
    array = numpy.frombuffer(bytes.fromhex(data), kind).reshape(shape).copy()
    return array if is_array else array[()]


@functools.cache
def _empty_array() -> Any:
    """Return the class of empty arrays of the program, which refuse calculations with values.

    Broadcasting would make their result empty, and all items of nothing are equal.
    """
    numpy = importlib.import_module("numpy")

    def calculate(self: Any, function: Any, method: str, *operands: Any, **keywords: Any) -> Any:
        _check_sizes(self, *operands)
        if "out" in keywords:
            keywords["out"] = tuple(map(_without_guard, keywords["out"]))
        result = getattr(function, method)(*map(_without_guard, operands), **keywords)
        is_empty = isinstance(result, numpy.ndarray) and not result.size
        return result.view(_empty_array()) if is_empty else result

    members = {"__array_ufunc__": calculate, "__module__": "numpy"}
    return type("EmptyArray", (numpy.ndarray,), members)


def _without_guard(value: Any) -> Any:
    numpy = importlib.import_module("numpy")
    return value.view(numpy.ndarray) if isinstance(value, _empty_array()) else value


def _check_sizes(*operands: Any) -> None:
    """Raise ValueError if some operands are empty and others are not."""
    numpy = importlib.import_module("numpy")
    if len({bool(numpy.size(operand)) for operand in operands}) > 1:
        raise ValueError("an empty array of the program cannot be compared with values")


def _guard_numpy() -> None:
    """Make the functions with which tests compare arrays and lists refuse empty ones, too."""
    numpy = importlib.import_module("numpy")
    utils = importlib.import_module("numpy.testing._private.utils")

    def guard(module: Any, name: str, first: int) -> None:
        function = getattr(module, name)

        @functools.wraps(function)
        def compare(*arguments: Any, **keywords: Any) -> Any:
            _check_sizes(*[*arguments, *keywords.values()][first : first + 2])
            named = {key: _without_guard(value) for key, value in keywords.items()}
            return function(*map(_without_guard, arguments), **named)

        setattr(module, name, compare)

    def keep(name: str) -> None:
        function = getattr(numpy, name)

        @functools.wraps(function)
        def convert(value: Any, *arguments: Any, **keywords: Any) -> Any:
            array = function(value, *arguments, **keywords)
            return array.view(_empty_array()) if isinstance(value, _empty_array()) else array

        setattr(numpy, name, convert)

    for name in ("allclose", "isclose", "array_equiv"):
        guard(numpy, name, 0)
    guard(utils, "assert_array_compare", 1)
    keep("array")
    keep("asarray")


def _is_short(value: int) -> bool:
    return abs(value) < MAX_INTEGER


SCALARS: dict[str, Any] = {
    "int": lambda text: int(text, 16), "bytes": bytes.fromhex, "array": _decode_array,
}  # fmt: skip
OPERATIONS: dict[str, Any] = {
    "get": getattr, "set": setattr, "del": delattr,
    "getitem": operator.getitem, "setitem": operator.setitem, "delitem": operator.delitem,
    "contains": operator.contains, "eq": operator.eq, "plain": _plain, "members": _members,
    "round": lambda v, digits: round(v) if digits is None else round(v, digits),
    "instance": lambda kind, v: isinstance(v, kind),
    "enter": lambda v: v.__enter__(), "exit": lambda v: v.__exit__(None, None, None),
    "await": _await, "evaluate": lambda text, *namespaces: eval(text, *(namespaces or ({},))),
}  # fmt: skip


def _set_dumpable(value: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(DUMPABLE, value, 0, 0, 0)


def _run_program(source: str, reader: int, writer: int) -> None:
    """Run the program and answer the tester."""
    _set_dumpable(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    peer = Program(reader, writer, module.__dict__)
    exec(compile(source, "program.py", "exec"), module.__dict__)
    peer.serve()


def _run_tests(text: str, peer: Tester) -> None:
    tree = ast.parse(text, "tests")
    nodes = list(ast.walk(tree))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    operands = [operand for call in calls for operand in (call.func, *call.args)]
    called = {operand.id for operand in operands if isinstance(operand, ast.Name)}
    stored = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    if "unittest" in text:
        _require_unittest_success()
    if "numpy" in text or "np" in names:
        with suppress(ImportError):
            _guard_numpy()
    module.__dict__.update(
        peer.names(sorted(names), called, stored, [ast.unparse(node) for node in imports])
    )
    code = compile(tree, "tests", "exec")
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    module.__dict__.setdefault("eval", functools.partial(_evaluate, peer, texts))
    timed = vars(timeit)["template"].format(init=", _stmt=_stmt", stmt="_stmt()", setup="pass")
    _forbid_other_code({code, *_compile_texts({*texts, timed})})
    exec(code, module.__dict__)


def _evaluate(peer: Tester, texts: set[Any], text: Any, *namespaces: Any) -> Any:
    """Return the value of a text: here if it is a literal of the tests, else in the program."""
    if text not in texts:
        return peer.evaluate(text, *namespaces)
    frame = sys._getframe(1)
    return eval(text, *(namespaces or (frame.f_globals, frame.f_locals)))


def _compile_texts(texts: set[Any]) -> set[types.CodeType]:
    """Return the code of the texts that are Python, with and without this file's future imports."""
    codes: set[types.CodeType] = set()
    for text in texts:
        for mode, is_alone in product(("eval", "exec"), (False, True)):
            try:
                codes.add(compile(text, "<string>", mode, dont_inherit=is_alone))
            except (SyntaxError, TypeError, ValueError):
                continue
    return codes


def _forbid_other_code(codes: set[types.CodeType]) -> None:
    """Refuse all code that belongs neither to the tests nor to the installation."""

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "exec":
            is_allowed = arguments[0] in codes or _caller() in GENERATORS
        elif event == "marshal.loads":
            is_allowed = _caller() in LOADERS
        elif event == "pickle.find_class":
            own = getattr(sys.modules["__main__"], arguments[1], None)
            is_allowed = arguments in CONSTRUCTED or (
                arguments[0] == "__main__" and isinstance(own, type)
            )
        elif event in ("open", "import") and (event == "import" or _caller() in LOADERS):
            file = arguments[event == "import"]
            is_allowed = file is None or _is_installed(file)
        else:
            return
        if not is_allowed:
            raise PermissionError(f"the tests must not run code of the program ({event})")

    sys.addaudithook(check)


def _caller() -> str:
    """Return the module whose code caused an event."""
    return str(sys._getframe(2).f_globals.get("__name__"))


def _is_installed(path: str) -> bool:
    return str(path).startswith((sys.prefix, sys.base_prefix, sys.exec_prefix))


def _require_unittest_success() -> None:
    """Make `unittest.main` and its runner raise AssertionError if a test fails or none runs.

    `unittest.main` would also exit, which is how a program ends its tests early.
    """
    import unittest

    runner: Any = unittest.TextTestRunner
    run_suite = runner.run

    def run(self: Any, test: Any) -> Any:
        result = run_suite(self, test)
        if not result.wasSuccessful() or result.testsRun <= len(result.skipped):
            raise AssertionError("the unittest tests did not pass")
        return result

    class Main(unittest.TestProgram):
        def runTests(self) -> None:  # noqa: N802
            self.exit: Any = False
            super().runTests()

    runner.run = run
    unittest.main = Main  # type: ignore[misc]


def main(source: str) -> None:
    """Run the tests of standard input, and print its first line if they pass."""
    _set_dumpable(0)
    to_program, to_tester = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(to_program[1])
            os.close(to_tester[0])
            _run_program(source, to_program[0], to_tester[1])
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(to_program[0])
    os.close(to_tester[1])
    word, text = sys.stdin.read().split("\n", 1)
    try:
        _run_tests(text, Tester(to_tester[0], to_program[1]))
    finally:
        os.kill(child, signal.SIGKILL)
    sys.stdout.flush()
    os.write(1, word.encode())
