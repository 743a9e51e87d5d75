"""Tasks of the package reasoning-gym: their names, parameters, entries and scores.

Data and verifiers share this module. An entry is an object with `question`, `answer` and
`metadata`; a record is an entry as JSON with everything that its score depends on.
API: https://github.com/open-thought/reasoning-gym (version 0.1.25).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import random
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any, get_type_hints

from msrl.errors import MsrlError, nearest, validation_problem

Parameters = Mapping[str, Any]
MISSING = (
    "the package reasoning-gym is not installed. Install it with `pip install 'msrl[reasoning]'`."
)
_MIXTURE = "composite"  # a task that mixes others
_ENTRY = ("question", "answer", "metadata")
# Tuples and objects with other keys than texts, which JSON does not have.
_TUPLE, _ITEMS = "!tuple", "!items"


def is_installed() -> bool:
    """Return True if reasoning-gym can be imported."""
    try:
        _package()
    except ImportError:
        return False
    return True


def installed_version() -> str:
    """Return the version of reasoning-gym."""
    return version("reasoning-gym")


def make_dataset(task: str, parameters: Parameters) -> Any:
    """Return the dataset of a task.

    Raises:
        MsrlError: The package is not installed, or the task or a parameter does not exist or has a
            value that is not allowed. The message begins with the name and its problem.
    """
    if not is_installed():
        raise MsrlError(MISSING)
    registered: dict[str, tuple[Any, Any]] = _factory().DATASETS
    if task == _MIXTURE:
        raise MsrlError(
            f"{task}: mixes tasks. Name several inputs instead, or weights in data.blend."
        )
    if task not in registered:
        hint = nearest(task, registered.keys() - {_MIXTURE})
        raise MsrlError(f"{task}: reasoning-gym has no such task; {hint}")
    dataset_class, config_class = registered[task]
    values = _values(task, config_class, parameters)
    try:
        with _seeded(f"{parameters.get('seed')}"):
            return dataset_class(config=config_class(**values))
    except (AssertionError, ValueError, TypeError, LookupError, OSError) as error:
        shown = ", ".join(f"{name}={value}" for name, value in parameters.items())
        reason = str(error) or type(error).__name__
        raise MsrlError(f"{task}: cannot be created with {shown}: {reason}") from error


def make_record(dataset: Any, task: str, parameters: Parameters, index: int) -> dict[str, Any]:
    """Return the record of an entry, which depends on nothing but the arguments.

    The hashes of texts must have a fixed seed (PYTHONHASHSEED).

    Raises:
        MsrlError: The entry has a value that a record cannot have.
    """
    with _seeded(f"{parameters.get('seed')} {index}"):
        entry = dataset[index]
    return {
        "task": task,
        "parameters": dict(parameters),
        "index": index,
        "version": installed_version(),
        "entry": {name: encode(entry[name]) for name in _ENTRY},
    }


@dataclass(frozen=True, slots=True)
class Record:
    """Entry of a task, with the dataset that scores answers to it."""

    task: str
    dataset: Any
    entry: Mapping[str, Any]


def read_record(text: str) -> Record:
    """Return the record of `make_record` from its JSON text.

    Raises:
        MsrlError: The text is no record, or the installed reasoning-gym lacks its task. The message
            is a predicate of the text.
    """
    try:
        record = json.loads(text)
        task, parameters = record["task"], record["parameters"]
        entry = {name: decode(record["entry"][name]) for name in _ENTRY}
        is_valid = isinstance(task, str) and isinstance(parameters, dict)
        is_valid = is_valid and isinstance(entry["metadata"], dict)
    except (ValueError, KeyError, TypeError, RecursionError):
        is_valid, task, parameters, entry = False, "", {}, {}
    if not is_valid:
        raise MsrlError(
            f"is no record of reasoning-gym with task, parameters and entry: {text.strip()[:60]!r}"
        )
    try:
        return Record(task, _dataset(task, json.dumps(parameters, sort_keys=True)), entry)
    except MsrlError as error:
        raise MsrlError(f"cannot be scored: {error}") from error


def encode(value: Any) -> Any:
    """Return a value as JSON that `decode` reads as the same value.

    Raises:
        MsrlError: A value has no JSON form.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value)  # numpy has a type for texts
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [encode(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and key not in (_TUPLE, _ITEMS) for key in value):
            return {str(key): encode(item) for key, item in value.items()}
        return {_ITEMS: [[encode(key), encode(item)] for key, item in value.items()]}
    raise MsrlError(f"its metadata has a {type(value).__name__}, which no row can hold")


def decode(value: Any) -> Any:
    """Return the value of `encode`."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_TUPLE}:
        return tuple(decode(value[_TUPLE]))
    if value.keys() == {_ITEMS}:
        return {decode(key): decode(item) for key, item in value[_ITEMS]}
    return {key: decode(item) for key, item in value.items()}


@functools.lru_cache(maxsize=64)
def _dataset(task: str, parameters: str) -> Any:
    return make_dataset(task, json.loads(parameters))


def _values(task: str, config_class: Any, parameters: Parameters) -> dict[str, Any]:
    """Return the arguments of a task's configuration.

    Raises:
        MsrlError: A parameter is unknown or of another type.
    """
    hints = get_type_hints(config_class)
    fields = {field.name: field for field in dataclasses.fields(config_class)}
    values: dict[str, Any] = {}
    for name, value in parameters.items():
        if name not in fields:
            raise MsrlError(f"{task}: {name}: unknown parameter; {nearest(name, fields)}")
        values[name] = _value(f"{task}: {name}={value}", hints[name], _default(fields[name]), value)
    return values


def _value(where: str, hint: Any, default: Any, value: Any) -> Any:
    """Return a value of JSON as the type of a parameter.

    The annotations of some tasks contradict their defaults, so the type of the default counts too.
    """
    from pydantic import TypeAdapter, ValidationError

    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    if type(value) is type(default):
        return value
    try:
        return TypeAdapter(hint).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        problem = validation_problem(error.errors(include_url=False)[0])
        raise MsrlError(f"{where}: {problem}") from error


def _default(field: Any) -> Any:
    """Return the default of a field of a dataclass, or None."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return None if field.default is dataclasses.MISSING else field.default


@contextlib.contextmanager
def _seeded(seed: str) -> Generator[None]:
    """Seed Python's own generator, from which some tasks draw, and restore its state."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def _package() -> Any:
    """Import reasoning-gym."""
    return import_module("reasoning_gym")


def _factory() -> Any:
    return import_module("reasoning_gym.factory")
