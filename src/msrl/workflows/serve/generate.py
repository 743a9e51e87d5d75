"""msrl generate: a prompt or a file of prompts in, completions out.

A row of the input has `prompt` (a text, or a list of messages) or `messages`, perhaps with `tools`; its other columns are carried over. A
row of the output is the row of the input with `completions`: a list of `text`, `finish_reason` and `num_tokens`.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from msrl.config.schema import Config, GenerateConfig
from msrl.data.handlers.sharegpt import read_message, tools_text
from msrl.data.readers import read_batches
from msrl.data.render import Renderer, with_system
from msrl.errors import ManyErrors, MsrlError
from msrl.rollout.engine import Engine
from msrl.tracking.progress import progress
from msrl.types import Completion, Conversation, Ints, Message, Prompt, SamplingParams
from msrl.workflows.serve.answers import Take, free_output, line, opened, shown, takes_no_unicode
from msrl.workflows.serve.engine import choose_renderer, engine_settings, is_mcore, open_model, raw_ids, running_engine, sampling_of

_MESSAGE = ("role", "content", "tool_calls", "reasoning_content")
_ROLES = ("system", "user", "assistant", "tool")
_BATCH = 512  # completions that the engine is asked for at once: progress is seen, and rows are written, between batches
_MAX_MISTAKES = 20


@dataclass(frozen=True, slots=True)
class Request:
    """One row of the input. `where` names it in messages."""

    where: str
    row: Mapping[str, Any]
    token_ids: Ints  # [P]


AsText: TypeAlias = Callable[[Request, Sequence[Completion]], str]  # what is written of a request and its answers


def run(config: Config) -> None:
    """Generate as `config.generate` says. Raises MsrlError for input that cannot be answered, before the engine is started."""
    section = config.generate
    output = free_output(section.output)
    source = open_model(section.model, "generate.model")
    renderer = choose_renderer(source.hf_dir, section.template)
    requests = read_requests(section, renderer)
    limit = config.rollout.engine.max_model_len or source.shape.max_position_embeddings
    check_lengths(requests, limit)
    longest = max(len(request.token_ids) for request in requests)
    settings = engine_settings(
        config,
        source.hf_dir,
        dtype=section.dtype,
        max_model_len=min(limit, longest + section.max_tokens),
        max_num_seqs=len(requests) * section.num_samples,
        random_weights=is_mcore(source, section.model),
    )
    sampling = sampling_of(config, section, () if section.raw else renderer.stop_token_ids, section.num_samples)
    with running_engine(config, source, settings) as engine, opened(output) as take:
        _generate(engine, requests, sampling, _as_text(section, output), take)


def read_requests(section: GenerateConfig, renderer: Renderer) -> list[Request]:
    """The prompt, or every row of the input, as token ids. Raises MsrlError for rows that are not prompts, or when there are none."""
    if (section.prompt is None) == (section.input is None):
        raise MsrlError("generate.prompt: give either a prompt or an input file, one of the two")
    if section.prompt is not None:
        return [_request("--prompt", {"prompt": section.prompt}, section, renderer)]
    path = Path(str(section.input))
    rows = [(batch.where(offset), row) for batch in read_batches((path,)) for offset, row in batch.values()]
    if not rows:
        raise MsrlError(f"{path}: holds no rows; every row must be a JSON object with prompt or messages")
    return _all_or_mistakes(rows, lambda where, row: _request(where, row, section, renderer))


def _all_or_mistakes(rows: Iterable[tuple[str, Any]], make: Callable[[str, Any], Request]) -> list[Request]:
    """`make` of every row; all mistakes in one error."""
    made: list[Request] = []
    mistakes: list[str] = []
    for where, row in rows:
        try:
            made.append(make(where, row))
        except MsrlError as error:
            mistakes.append(str(error))
    _refuse(mistakes)
    return made


def _refuse(mistakes: Sequence[str]) -> None:
    """Raises the mistakes, if there are any, at most 20 of them by name."""
    if mistakes:
        more = len(mistakes) - _MAX_MISTAKES
        raise ManyErrors([*mistakes[:_MAX_MISTAKES], *([f"and {more} more rows"] if more > 0 else [])])


def _request(where: str, row: Any, section: GenerateConfig, renderer: Renderer) -> Request:
    if not isinstance(row, dict):
        raise MsrlError(f"{where}: must be a JSON object with prompt or messages, not {type(row).__name__}")
    if "completions" in row:
        raise MsrlError(f"{where}: already has completions; rename that column")
    _check_columns(where, row)
    if section.raw:
        text = row.get("prompt")
        if not isinstance(text, str):
            raise MsrlError(f"{where}: with raw, prompt must be a text")
        return Request(where, row, raw_ids(renderer, text))
    conversation = with_system(Conversation(_messages(where, row), extra=_tools(where, row)), section.system)
    with _placed(where):
        return Request(where, row, renderer.prompt(conversation))


@contextlib.contextmanager
def _placed(where: str) -> Generator[None, None, None]:
    """Mistakes within it get the place where they are."""
    try:
        yield
    except MsrlError as error:
        raise MsrlError(f"{where}: {error}") from error


def _tools(where: str, row: Mapping[str, Any]) -> dict[str, str]:
    """What the template shows as tools. Beside a prompt that is a text, a column of that name may be something else."""
    try:
        tools = tools_text(row.get("tools"))
    except MsrlError as error:
        if isinstance(row.get("prompt"), str):
            return {}
        raise MsrlError(f"{where}: {error}") from error
    return {"tools": tools} if tools else {}


def _check_columns(where: str, row: Mapping[str, Any]) -> None:
    """That the row can be written behind its completions, before they cost anything."""
    for column, value in row.items():
        try:
            json.dumps({column: value}, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            told = f"{where}: column {column!r} cannot be written as JSON ({error})"
            raise MsrlError(f"{told}; make it text or numbers, or leave it out") from error


def _messages(where: str, row: Mapping[str, Any]) -> tuple[Message, ...]:
    """The turns of a row, the last of which is to be answered."""
    if ("prompt" in row) == ("messages" in row):
        raise MsrlError(f"{where}: must have either prompt or messages; it has {', '.join(sorted(row)) or 'nothing'}")
    given = row.get("messages", row.get("prompt"))
    if isinstance(given, str) and "prompt" in row:
        return (Message("user", given),)
    if not isinstance(given, list) or not given:
        wanted = (
            "messages must be a list of role and content" if "messages" in row else "prompt must be a list of role and content, or a text"
        )
        raise MsrlError(f"{where}: {wanted}")
    messages = tuple(_message(where, number, turn) for number, turn in enumerate(given, 1))
    if messages[-1].role not in ("user", "tool"):
        raise MsrlError(f"{where}: the last message is the {messages[-1].role}'s; it must be the user's, for the model to answer")
    return messages


def _message(where: str, number: int, turn: Any) -> Message:
    """A message, its tool calls and thought in it as `preprocess` writes them."""
    is_text = isinstance(turn, dict) and (isinstance(turn.get("content"), str) or (turn.get("content") is None and turn.get("tool_calls")))
    if not is_text or turn.get("role") not in _ROLES:
        raise MsrlError(f"{where}: message {number} must have role ({', '.join(_ROLES)}) and content (a text)")
    return read_message({key: turn.get(key) for key in _MESSAGE}, f"{where}: message {number}")


def check_lengths(requests: Iterable[Request], limit: int) -> None:
    """Raises ManyErrors that names every row that is empty or leaves no room for an answer in `limit` tokens."""
    mistakes = [
        f"{request.where}: the prompt has {length} tokens, but prompt and answer together may have {limit}; shorten it"
        if length
        else f"{request.where}: the prompt has no tokens"
        for request in requests
        if not 0 < (length := len(request.token_ids)) < limit
    ]
    _refuse(mistakes)


def _generate(engine: Engine, requests: Sequence[Request], sampling: SamplingParams, as_text: AsText, take: Take) -> None:
    """Hands the answers on in the order of the requests; says how much was done, and how many completions met a limit."""
    prompts = [Prompt(index, request.token_ids) for index, request in enumerate(requests)]
    at_once = max(1, _BATCH // sampling.num_samples)
    started = time.perf_counter()
    num_completions = num_tokens = cut = 0
    with progress("generating", total=len(prompts), unit="prompts") as bar:
        for first in range(0, len(prompts), at_once):
            groups = engine.generate(prompts[first : first + at_once], sampling, 0)
            take("".join(as_text(requests[group.prompt.index], group.completions) for group in groups))
            completions = [completion for group in groups for completion in group.completions]
            num_completions += len(completions)
            num_tokens += sum(len(c.token_ids) for c in completions)
            cut += sum(c.finish_reason == "length" for c in completions)
            bar.advance(len(groups))
    note = f"; {cut} of them reached the limit of their length" if cut else ""
    print(f"{num_completions} completions, {num_tokens} tokens in {time.perf_counter() - started:.1f} s{note}", file=sys.stderr)


def _as_text(section: GenerateConfig, output: Path | None) -> AsText:
    """Rows, or the bare texts where a prompt of the command line is answered on standard output."""
    if output is None and section.prompt is not None:
        return lambda request, completions: shown(completions, section.stop)
    is_ascii = takes_no_unicode(output)
    return lambda request, completions: line(request.row, completions, section.stop, is_ascii=is_ascii)
