"""Process of one episode, forked by `fork_server.py`: it runs the calls of one environment.

Input messages: first (name of the environment, row), then (answer, whether it is truncated). Frames
(kind, 0, detail): RESULT with JSON, or FAULT with JSON {reason, detail}. The process ends with its
input.
"""

from __future__ import annotations

import json
import math
import reprlib
import signal
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from msrl.environments.base import Environment, EnvironmentSource, StepResult
from msrl.environments.clean import clean_text
from msrl.environments.tools import LostError, tool_schemas
from msrl.processes.limits import limit_memory, start_alarm
from msrl.processes.messages import MAX_DETAIL_BYTES, frame, read
from msrl.types import JsonObject, Message, Role

RESULT, FAULT = 1, 2
CLOSE_LIMIT_S = 5.0
_ROLES = frozenset(get_args(Role))
Factory = Callable[[], Environment]


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """First message to the fork server: everything that episodes share."""

    sources: Mapping[str, EnvironmentSource]
    path: tuple[str, ...]  # sys.path of the parent
    tool_format: str
    opens_thought: bool  # the generation prompt begins a thought
    memory_bytes: int  # of address space beyond the size of the fork server; 0 disables the limit
    max_message_bytes: int
    control_fd: int


class _InvalidError(Exception):
    """A value that an environment returned has no meaning."""


class _OversizedError(Exception):
    """The messages of a call exceed the size limit."""


def serve_episode(
    channel: socket.socket, factories: Mapping[str, Factory], setup: EpisodeSetup
) -> None:
    """Serve the calls of an episode until its input ends."""
    limit_memory(setup.memory_bytes)
    source = channel.makefile("rb")
    message = read(source)
    if message is None:
        return
    name, row = message
    timeout_s = setup.sources[name].timeout_s
    episode = _Episode(factories[name], setup)
    call = partial(episode.open, row)
    while call is not None:
        start_alarm(timeout_s)
        reply = _reply(call, setup.max_message_bytes)
        signal.setitimer(signal.ITIMER_REAL, 0.0)  # an idle episode has no time limit
        channel.sendall(reply)
        message = read(source)
        call = None if message is None else partial(episode.step, *message)
    signal.setitimer(signal.ITIMER_REAL, CLOSE_LIMIT_S)
    episode.close()


class _Episode:
    """Environment of an episode, with its results as JSON objects."""

    def __init__(self, factory: Factory, setup: EpisodeSetup) -> None:
        self._factory, self._setup = factory, setup
        self._environment: Environment | None = None

    def open(self, row: Mapping[str, Any]) -> JsonObject:
        environment = self._factory()
        if not isinstance(environment, Environment):
            kind = type(environment).__name__
            raise _InvalidError(f"{kind} is no subclass of msrl.environments.base.Environment")
        self._environment = environment
        environment.tool_format = self._setup.tool_format
        environment.opens_thought = self._setup.opens_thought
        messages = environment.reset(row)
        tools, state = tool_schemas(environment), environment.state()
        info = {} if state is None else {"state": state}
        return {"messages": _messages(messages, info), "tools": tools, "info": info}

    def step(self, answer: str, is_truncated: bool) -> JsonObject:
        assert self._environment is not None
        self._environment.is_truncated = is_truncated
        result = self._environment.step(answer)
        if not isinstance(result, StepResult):
            raise _InvalidError(f"step returned {_excerpt(result)}, not a StepResult")
        info = dict(result.info)
        state = self._environment.state()
        if state is not None:
            info.setdefault("state", state)
        messages = _messages(result.messages, info)
        _check_step(messages, result.done)
        _check_calls(info)
        reward = None if result.reward is None else _finite(result.reward)
        return {"messages": messages, "reward": reward, "done": bool(result.done), "info": info}

    def close(self) -> None:
        if self._environment is not None:
            self._environment.close()


def _reply(call: Callable[[], JsonObject], max_bytes: int) -> bytes:
    """Return the output message of a call."""
    try:
        return frame(RESULT, detail=_encode(call(), max_bytes))
    except _InvalidError as error:
        return _fault("invalid", str(error))
    except _OversizedError as error:
        return _fault("oversized", str(error))
    except LostError as error:
        return _fault("lost", str(error))
    except BaseException:  # report any exception of an environment
        return _fault("error", traceback.format_exc(limit=-4))


def _encode(value: JsonObject, max_bytes: int) -> bytes:
    try:
        data = json.dumps(value, allow_nan=False, default=_plain_value).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise _InvalidError(f"info and fields must be JSON: {error}") from None
    if len(data) > max_bytes:
        raise _OversizedError(f"{len(data)} bytes, more than the limit of {max_bytes}")
    return data


def _fault(reason: str, detail: str) -> bytes:
    text = detail[-MAX_DETAIL_BYTES:]
    return frame(FAULT, detail=json.dumps({"reason": reason, "detail": text}).encode("ascii"))


def _messages(messages: Sequence[Message], info: dict[str, Any]) -> list[JsonObject]:
    """Return messages as JSON objects; characters without meaning in text become U+FFFD."""
    if not isinstance(messages, list | tuple):
        raise _InvalidError(f"messages must be a list, not {_excerpt(messages)}")
    entries: list[JsonObject] = []
    num_replaced = 0
    for message in messages:
        _check_message(message)
        content = clean_text(message.content)
        num_replaced += content != message.content
        fields = message.fields
        if fields is not None:
            fields = {**fields, "content": content}
        entries.append({"role": message.role, "content": content, "fields": fields})
    if num_replaced:
        info["cleaned_messages"] = num_replaced
    return entries


def _check_message(message: Message) -> None:
    if not isinstance(message, Message):
        raise _InvalidError(f"messages must be of type Message, not {_excerpt(message)}")
    if message.role not in _ROLES or not isinstance(message.content, str):
        raise _InvalidError(f"a message needs a role and text, not {_excerpt(message)}")


def _check_step(messages: Sequence[JsonObject], is_done: bool) -> None:
    """Refuse replies after which the model has nothing to answer, and answers in its name."""
    if not messages and not is_done:
        raise _InvalidError("step returned no message, although the episode is not done")
    if any(message["role"] == "assistant" for message in messages):
        raise _InvalidError("step returned a message of the role assistant")


def _check_calls(info: Mapping[str, Any]) -> None:
    """Refuse records of tool calls that metrics and penalties cannot read."""
    calls = info.get("tool_calls") or []
    if not isinstance(calls, list | tuple) or not all(isinstance(call, dict) for call in calls):
        raise _InvalidError(f"info: tool_calls must be a list of dicts, not {_excerpt(calls)}")


def _finite(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise _InvalidError(f"the reward {_excerpt(value)} is no number") from None
    if not math.isfinite(number):
        raise _InvalidError(f"the reward is {number}, not a finite number")
    return number


def _plain_value(value: Any) -> Any:
    """Return a scalar or array of numpy as JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _excerpt(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
