"""Responses of others as a record: JSON lines with a prompt and one or more responses.

`docs/reinforcement.md` describes the fields for users.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from msrl.data.render import Renderer
from msrl.data.spans import encode_texts
from msrl.errors import ManyErrors, MsrlError, nearest
from msrl.strict_json import loads
from msrl.types import (
    Completion,
    Conversation,
    Floats,
    Ints,
    Message,
    Prompt,
    Reward,
    RolloutGroup,
    ScoredGroup,
)
from msrl.workflows.rl.replay.recording import RecordedStep, RecordFacts, Recording

_PROMPTS = ("prompt", "messages", "prompt_ids")
_RESPONSES = ("response", "response_ids")
_OWN = (*_RESPONSES, "logprobs", "reward", "finish_reason")  # fields of a response
FIELDS = (*_PROMPTS, *_OWN, "responses", "group", "answer", "tag", "extra")
_LARGEST = sys.float_info.max
_LEAST = -1e30  # log-probability, which float32 can hold
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Response:
    """Response of a row of the file.

    Attributes:
        where: File and line, for messages.
        group: Value of the field; None if the prompt decides.
        prompt: Prompt, whose index is the number of the row.
        token_ids: Tokens of the response.
        logprobs: Log-probabilities of the sampling distribution; None if they are not known.
        finish_reason: End of the response.
        text: Text of the response, for reward sources.
        reward: Reward; None if it is to be computed.
    """

    where: str
    group: str | int | None
    prompt: Prompt
    token_ids: Ints  # [R]
    logprobs: Floats | None  # [R]
    finish_reason: Literal["stop", "length"]
    text: str
    reward: float | None


class ResponseFile(Recording):
    """Responses of a JSONL file in groups.

    Without `needs_rewards`, the rows need no rewards. `with_logprobs` adds log-probabilities to
    rows that have none.

    Raises:
        ManyErrors: Rows are invalid, one line each.
    """

    def __init__(
        self, path: Path, renderer: Callable[[], Renderer], vocab_size: int, *, needs_rewards: bool
    ) -> None:
        reader = _Reader(renderer, vocab_size, needs_rewards=needs_rewards)
        rows = list(_rows(path, reader))
        by_group = _grouped(rows)
        _check_groups(by_group)
        self._groups = tuple(map(_scored_group, by_group))
        self.facts = RecordFacts(
            num_steps=0,
            num_groups=len(by_group),
            groups_per_step=0,
            group_size=len(by_group[0]),
            max_prompt_tokens=max(len(row.prompt.token_ids) for row in rows),
            max_response_tokens=max(len(row.token_ids) for row in rows),
            num_epochs=1,
            temperature=None,
            has_logprobs=_have_logprobs(rows),
        )

    def with_logprobs(self, logprobs: Floats) -> ResponseFile:  # of all response tokens
        """Return the record with these log-probabilities, end to end in the order of the groups."""
        recording, start = copy(self), 0
        groups = list[ScoredGroup]()
        for group in self._groups:
            completions = list[Completion]()
            for completion in group.rollout.completions:
                end = start + len(completion.token_ids)
                completions.append(replace(completion, logprobs=logprobs[start:end]))
                start = end
            rollout = replace(group.rollout, completions=tuple(completions))
            groups.append(replace(group, rollout=rollout))
        recording._groups = tuple(groups)
        recording.facts = replace(self.facts, has_logprobs=True)
        return recording

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all responses."""
        return sum(group.rollout.num_tokens for group in self._groups)

    def step(self, number: int) -> RecordedStep:
        raise NotImplementedError("a file of responses has no steps")

    def group(self, number: int) -> ScoredGroup:
        return self._groups[number]


class _Reader:
    """Reader of one row."""

    def __init__(
        self, renderer: Callable[[], Renderer], vocab_size: int, *, needs_rewards: bool
    ) -> None:
        self._make_renderer, self._vocab_size = renderer, vocab_size
        self._needs_rewards = needs_rewards
        self._renderer: Renderer | None = None

    @property
    def renderer(self) -> Renderer:
        """Renderer of prompts and responses that are texts."""
        if self._renderer is None:
            self._renderer = self._make_renderer()
        return self._renderer

    def read(self, where: str, index: int, row: Any) -> list[Response]:
        """Return the responses of a row. Raises MsrlError with the reason why it is invalid."""
        if not isinstance(row, dict):
            raise MsrlError("must be a JSON object with a prompt and a response.")
        values = cast("dict[str, Any]", row)
        _refuse_others(values, FIELDS)
        group, prompt = _group(values.get("group")), self._prompt(values, index)
        if "responses" not in values:
            return [self._read(where, group, prompt, values)]
        if own := [name for name in _OWN if name in values]:
            raise MsrlError(f"{own[0]}: belongs to each of responses. Move it there.")
        group = where if group is None else group
        responses = list[Response]()
        for number, item in enumerate(_objects(values["responses"])):
            try:
                _refuse_others(item, _OWN)
                responses.append(self._read(where, group, prompt, item))
            except MsrlError as error:
                raise MsrlError(f"responses.{number}.{error}") from error
        return responses

    def _read(
        self, where: str, group: str | int | None, prompt: Prompt, values: Mapping[str, Any]
    ) -> Response:
        response = _one_of(values, _RESPONSES)
        finish_reason = values.get("finish_reason", "stop")
        if finish_reason not in ("stop", "length"):
            raise MsrlError("finish_reason: must be stop or length.")
        token_ids, text = self._response(response, values[response], finish_reason)
        logprobs = _logprobs(values, len(token_ids))
        reward = self._reward(values)
        return Response(where, group, prompt, token_ids, logprobs, finish_reason, text, reward)

    def _prompt(self, values: Mapping[str, Any], index: int) -> Prompt:
        name = _one_of(values, _PROMPTS)
        prompt_ids = self._prompt_ids(name, values[name])
        return Prompt(index, prompt_ids, _text(values, "answer"), _extra(values))

    def _prompt_ids(self, name: str, value: Any) -> Ints:
        if name == "prompt_ids":
            return self._ids(name, value)
        turns = [{"role": "user", "content": value}] if name == "prompt" else value
        ids = self.renderer.prompt(Conversation(_messages(name, turns)))
        return np.asarray(ids, np.int64)

    def _response(self, name: str, value: Any, finish_reason: str) -> tuple[Ints, str]:
        """Return the tokens of a response, and its text without the token that ends it."""
        if name == "response_ids":
            ids = self._ids(name, value)
            decode = self.renderer.tokenizer.backend.decode
            return ids, decode(ids.tolist(), skip_special_tokens=True)
        if not isinstance(value, str):
            raise MsrlError("response: must be a text.")
        (ids,) = encode_texts(self.renderer.tokenizer, [value])
        if finish_reason == "stop":
            ids = [*ids, *self.renderer.stop_token_ids[:1]]
        if not ids:
            raise MsrlError("response: has no tokens. Remove the row.")
        return np.array(ids, np.int64), value

    def _ids(self, name: str, value: Any) -> Ints:
        """Return token ids. Raises MsrlError for other values."""
        ids = cast("list[Any]", value) if isinstance(value, list) else []
        if not ids or not all(type(number) is int for number in ids):
            raise MsrlError(f"{name}: must be a list of token ids that is not empty.")
        stray = next((number for number in ids if not 0 <= number < self._vocab_size), None)
        if stray is not None:
            raise MsrlError(
                f"{name}: token {stray} is outside of the model's vocabulary of "
                f"{self._vocab_size} tokens. Use the tokenizer of the model."
            )
        return np.array(ids, np.int64)

    def _reward(self, values: Mapping[str, Any]) -> float | None:
        reward = values.get("reward")
        if reward is None and self._needs_rewards:
            raise MsrlError("reward: missing. Add it, or set rollout.replay.rewards=computed.")
        if reward is not None and not _is_number(reward):
            raise MsrlError("reward: must be a finite number.")
        return None if reward is None else float(reward)


def _rows(path: Path, reader: _Reader) -> Iterator[Response]:
    """Yield the responses of a file. Raises ManyErrors with a line for each invalid row."""
    mistakes, number = list[str](), 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{path}:{number}"
                try:
                    yield from reader.read(where, number - 1, _json(line))
                except MsrlError as error:
                    mistakes.append(f"{where}: {error}")
    except OSError as error:
        raise MsrlError(f"{path}: cannot be read: {error.strerror or error}") from error
    if mistakes:
        raise ManyErrors(mistakes)
    if not number:
        raise MsrlError(f"{path}: has no rows. Write one JSON object per line.")


def _json(line: bytes) -> Any:
    try:
        value = loads(line.decode("utf-8"))
        if b"\\u" in line:  # which may write half of a character
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeError:
        raise MsrlError("is not UTF-8 text, or has half of a character. Correct it.") from None
    except json.JSONDecodeError as error:
        raise MsrlError(f"not JSON at character {error.pos + 1}: {error.msg}.") from None
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"not JSON: {error}.") from None


def _refuse_others(values: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise MsrlError if an object has a field that is none of `names`."""
    for name in values:
        if name not in names:
            raise MsrlError(f"{name}: unknown field; {nearest(name, names)}")


def _objects(value: Any) -> list[dict[str, Any]]:
    items = cast("list[Any]", value) if isinstance(value, list) else []
    if not items or not all(isinstance(item, dict) for item in items):
        raise MsrlError("responses: must be a list of objects that is not empty.")
    return items


def _one_of(values: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the only one of some fields that a row has."""
    own = [name for name in names if name in values]
    if len(own) != 1:
        problem = "missing" if not own else f"has {' and '.join(own)}"
        raise MsrlError(f"{names[0]}: {problem}. Set exactly one of {', '.join(names)}.")
    return own[0]


def _messages(name: str, turns: Any) -> tuple[Message, ...]:
    messages = list[Message]()
    for turn in cast("list[Any]", turns) if isinstance(turns, list) else []:
        fields = cast("dict[str, Any]", turn) if isinstance(turn, dict) else {}
        if fields.keys() != {"role", "content"} or not isinstance(fields["content"], str):
            raise MsrlError(f"{name}: each message has role and content as text, nothing else.")
        if fields["role"] not in _ROLES:
            raise MsrlError(f"{name}: a role must be one of {', '.join(_ROLES)}.")
        messages.append(Message(fields["role"], fields["content"]))
    if not messages or messages[-1].role not in ("user", "tool"):
        raise MsrlError(f"{name}: must be a list of messages whose last role is user or tool.")
    return tuple(messages)


def _logprobs(values: Mapping[str, Any], count: int) -> Floats | None:
    logprobs = values.get("logprobs")
    if logprobs is None:
        return None
    if "response_ids" not in values:
        raise MsrlError(
            "logprobs: need response_ids, because a text has several tokenizations. Add them, or "
            "remove the log-probabilities."
        )
    numbers = cast("list[Any]", logprobs) if isinstance(logprobs, list) else []
    if len(numbers) != count or not all(_is_number(n) and _LEAST <= n <= 0 for n in numbers):
        raise MsrlError(
            f"logprobs: must be a list of {count} numbers of at most 0, one per response token."
        )
    return np.array(numbers, np.float32)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= _LARGEST


def _group(value: Any) -> str | int | None:
    if value is None or type(value) in (str, int):
        return value
    raise MsrlError("group: must be a text or an integer.")


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name, "")
    if not isinstance(value, str):
        raise MsrlError(f"{name}: must be a text.")
    return value


def _extra(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the columns of a row for reward sources, with its tag."""
    extra = values.get("extra", {})
    columns = dict[str, str]()
    for name, text in cast("dict[str, Any]", extra).items() if isinstance(extra, dict) else ():
        if isinstance(text, str):
            columns[name] = text
    if not isinstance(extra, dict) or len(columns) < len(cast("dict[str, Any]", extra)):
        raise MsrlError("extra: must be an object of texts.")
    return {**columns, **({"tag": _text(values, "tag")} if "tag" in values else {})}


def _grouped(rows: Sequence[Response]) -> list[list[Response]]:
    """Return the rows of each group: by its name, or consecutive rows with equal prompts."""

    def key(row: Response) -> object:
        return ("group", row.group) if row.group is not None else row.prompt.token_ids.tobytes()

    groups = [list(own) for _, own in groupby(rows, key)]
    by_name = dict[object, list[Response]]()
    for number, own in enumerate(groups):
        name = own[0].group
        by_name.setdefault(number if name is None else ("group", name), []).extend(own)
    return list(by_name.values())


def _check_groups(groups: Iterable[Sequence[Response]]) -> None:
    """Raise ManyErrors if rows of a group differ in the prompt, or groups in size."""
    mistakes, first = list[str](), None
    for rows in groups:
        first = rows if first is None else first
        for row in rows[1:]:
            if not np.array_equal(row.prompt.token_ids, rows[0].prompt.token_ids):
                mistakes.append(
                    f"{row.where}: group {row.group!r} has another prompt in {rows[0].where}. "
                    "Give each prompt its own group."
                )
        if len(rows) != len(first):
            mistakes.append(
                f"{rows[0].where}: its group has {len(rows)} responses, and the first group has "
                f"{len(first)}. All need the same number; name the groups with the field group."
            )
    if mistakes:
        raise ManyErrors(mistakes)


def _have_logprobs(rows: Sequence[Response]) -> bool:
    """Return True if rows have log-probabilities. Raises MsrlError if only some have them."""
    without = [row.where for row in rows if row.logprobs is None]
    if 0 < len(without) < len(rows):
        raise MsrlError(
            f"{without[0]}: logprobs: missing, but other rows have them. Add them to all rows, or "
            "remove them from all."
        )
    return not without


def _scored_group(rows: Sequence[Response]) -> ScoredGroup:
    completions = tuple(
        Completion(
            row.token_ids,
            np.zeros(len(row.token_ids), np.float32) if row.logprobs is None else row.logprobs,
            row.finish_reason,
            0,
            row.text,
        )
        for row in rows
    )
    rewards = tuple(Reward(0.0 if row.reward is None else row.reward, {}) for row in rows)
    return ScoredGroup(RolloutGroup(rows[0].prompt, completions), rewards)
