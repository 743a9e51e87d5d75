"""Worker process of `pool.py`, started as `python -m msrl.rewards.worker`.

Messages on standard input: first a Setup, then lists of calls (function, response, answer, extra,
files of images).

Frames on standard output: first READY, or RAISED if a user's file cannot be loaded, then one per
call in order. Output that a verifier prints goes to standard error. The process ends with its
input.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import json
import math
import os
import reprlib
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from msrl.processes.limits import limit_memory, start_alarm
from msrl.processes.messages import READY, error_frame, frame, read
from msrl.processes.parent import leave_signals_to_parent
from msrl.rewards import functions
from msrl.user_files import NotLoadedError, load_function

SCORED = 1  # kind of frames with a score

_VerifierCall = Callable[[str, str, Mapping[str, str], Sequence[str]], float]


@dataclass(frozen=True, slots=True)
class Function:
    """Location and options of a verifier: `attribute` of `module`.

    It is called as `(response, answer, **options)`. With a `file`, the module is loaded from that
    file under this name, and the function is called by the names of its parameters
    (`functions.py`). A parameter `extra` receives the extra columns of the row. With
    `reads_images`, the calls have the files of the images of the prompt.
    """

    module: str
    attribute: str
    options: Mapping[str, Any]
    timeout_s: float
    file: str | None = None
    reads_images: bool = False


@dataclass(frozen=True, slots=True)
class Setup:
    """First message to a worker."""

    functions: tuple[Function, ...]
    path: tuple[str, ...]  # sys.path of the parent
    memory_bytes: int  # of address space beyond the loaded functions; 0 disables the limit


def main() -> None:
    """Serve calls until the input ends."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    leave_signals_to_parent()
    setup: Setup = read(source)
    sys.path[:] = setup.path
    try:
        verifiers = [_load(function) for function in setup.functions]
    except NotLoadedError as error:
        sink.write(error_frame(str(error)))
        return
    limit_memory(setup.memory_bytes)
    sink.write(frame(READY))
    while (calls := read(source)) is not None:
        for index, *arguments in calls:
            start_alarm(setup.functions[index].timeout_s)
            sink.write(_call(verifiers[index], *arguments))
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _load(function: Function) -> _VerifierCall:
    """Return the function with its options.

    Raises:
        NotLoadedError: A user's file cannot be executed or does not define the function.
    """
    if function.file is None:
        module = importlib.import_module(function.module)
        if hasattr(module, "prepare"):
            module.prepare()
        target = getattr(module, function.attribute)
    else:
        target = load_function(function.file, function.module, function.attribute)
        return bind(target, function)
    verifier = partial(target, **function.options)
    if "extra" in inspect.signature(target).parameters:
        return lambda response, answer, extra, _: verifier(response, answer, extra=extra)
    return lambda response, answer, *_: verifier(response, answer)


def bind(target: Callable[..., Any], function: Function) -> _VerifierCall:
    """Return a user's function as a verifier that is called by the names of its parameters.

    Raises:
        NotLoadedError: A call would be wrong.
    """
    name = function.attribute
    if isinstance(target, type) or not callable(target):
        raise NotLoadedError(f"{function.file}:{name}: is no function")
    signature = _signature(target)
    if reason := functions.signature_mistake(name, signature, function.options):
        raise NotLoadedError(f"{function.file}: {reason}")
    takes_images = signature.takes_images(function.options)
    if takes_images and not function.reads_images:
        raise NotLoadedError(
            f"{function.file}: {name}{signature}: images are passed only to a function that the "
            "file itself defines. Call it from one"
        )

    arguments = _batch_arguments if signature.is_batch else _row_arguments

    def call(response: str, answer: str, extra: Mapping[str, str], images: Sequence[str]) -> Any:
        positional = (response, answer) if signature.by_position else ()
        values = arguments(signature, response, answer, extra)
        if takes_images and functions.IMAGES not in values:  # TRL's columns come first
            values[functions.IMAGES] = [list(images)] if signature.is_batch else list(images)
        result = target(*positional, **{**values, **function.options})
        return _result(result, is_batch=signature.is_batch)

    return call


def _row_arguments(
    signature: functions.Signature, response: str, answer: str, extra: Mapping[str, str]
) -> dict[str, Any]:
    """Return what a function of one response receives by name."""
    values: dict[str, Any] = {}
    if not signature.by_position:
        texts = {signature.response: response, signature.answer: answer}
        values = {name: text for name, text in texts.items() if name is not None}
    for name in signature.columns:
        if name != "data_source" or name in extra or name in signature.required:
            values[name] = _column(name, extra)
    return values


def _batch_arguments(
    signature: functions.Signature, response: str, answer: str, extra: Mapping[str, str]
) -> dict[str, Any]:
    """Return the lists of one value that a function of TRL receives by name."""
    columns = {**dict.fromkeys(functions.BATCH_ANSWER, answer), **extra, functions.BATCH: response}
    return {
        name: [value]
        for name, value in columns.items()
        if name in signature.named
        or (signature.has_more and name not in functions.BATCH_ANSWER[1:])
    }


def _signature(target: Callable[..., Any]) -> functions.Signature:
    """Return the parameters of a function."""
    parameters = inspect.signature(target).parameters.values()
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return functions.Signature(
        tuple(p.name for p in plain if p.kind is not p.KEYWORD_ONLY),
        frozenset(p.name for p in plain if p.kind is not p.POSITIONAL_ONLY),
        frozenset(p.name for p in plain if p.default is p.empty),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _column(name: str, extra: Mapping[str, str]) -> Any:
    """Return the value of a parameter that describes the row.

    `extra_info` is the object of the column `extra_info`, if it is there, else all columns.
    """
    if name == "data_source":
        if name not in extra:
            raise ValueError(
                "the row has no data_source; keep the column with preprocess.map_keys: "
                "{extra.data_source: COLUMN}"
            )
        return extra[name]
    if name == "extra_info" and name in extra:
        return json.loads(extra[name])
    return dict(extra)


def _result(value: Any, *, is_batch: bool) -> Any:
    """Return the score of a result: a number, verl's mapping with `score`, or TRL's list."""
    if inspect.isawaitable(value):
        value = asyncio.run(_await_value(value))
    if is_batch:
        (value,) = value
    return value["score"] if isinstance(value, Mapping) else value


async def _await_value(value: Awaitable[Any]) -> Any:
    return await value


def _call(
    function: _VerifierCall,
    response: str,
    answer: str,
    extra: Mapping[str, str],
    images: Sequence[str],
) -> bytes:
    """Call a verifier and return the output message."""
    try:
        value = function(response, answer, extra, images)
        score = _number(value)
        if score is None:
            text = f"{reprlib.repr(value)} ({type(value).__name__})"
            detail = f"could not convert the score {text} to a number"
        elif math.isfinite(score):
            return frame(SCORED, score)
        else:
            detail = f"the score is {score}, not a finite number"
    except BaseException:  # report any exception of a verifier, and continue with the next call
        detail = traceback.format_exc(limit=-4)
    return error_frame(detail)


def _number(value: Any) -> float | None:
    """Return a score as a number, or None. The error of `float` would repeat the complete text."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
