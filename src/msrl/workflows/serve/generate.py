"""`msrl generate`: completions of a prompt or of a file of prompts.

A row of the input has `prompt` (a text, or a list of messages) or `messages`, and optionally
`tools`; its other columns are copied. A row of the output is the row of the input with
`completions`: a list of `text`, `finish_reason` and `num_tokens`, and the turns of episodes.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from msrl.config.schema import Config, GenerateConfig
from msrl.data.columns import is_empty
from msrl.data.files.readers import read_batches
from msrl.data.render import Renderer, with_system
from msrl.data.rows.turns import read_turn, tools_text
from msrl.errors import ManyErrors, MsrlError
from msrl.limits import print_note
from msrl.rollout.engine import Engine, EngineSettings, check_stops
from msrl.rollout.episodes.settings import EpisodeSettings
from msrl.rollout.runtime.episode_sampler import EpisodeSampler
from msrl.tracking.progress import progress
from msrl.types import (
    Completion,
    Conversation,
    Ints,
    Message,
    PlacedImage,
    Prompt,
    RolloutGroup,
    SamplingParams,
)
from msrl.workflows.engine import (
    check_engine,
    choose_renderer,
    engine_settings,
    needs_weight_transfer,
    open_model,
    other_template,
    raw_ids,
    running_engine,
    sampling_params,
)
from msrl.workflows.episodes.setup import running_pool
from msrl.workflows.serve.answers import (
    WriteLines,
    check_output,
    completions_text,
    json_line,
    open_output,
    requires_ascii,
)
from msrl.workflows.serve.episodes import episode_settings, episode_summary, row_prompt
from msrl.workflows.serve.images import ImagePrompts

if TYPE_CHECKING:
    from msrl.checkpoint.source import WeightSource

_MESSAGE = ("role", "content", "tool_calls", "reasoning_content")
_ROLES = ("system", "user", "assistant", "tool")
_IMAGES = ("images", "image")  # columns
_BATCH = 512  # completions per engine call; between calls, progress is shown and rows are written
_MAX_MISTAKES = 20


@dataclass(frozen=True, slots=True)
class Request:
    """One row of the input. `where` locates it in messages."""

    where: str
    row: Mapping[str, Any]
    token_ids: Ints  # [P]
    images: tuple[PlacedImage, ...] = ()


# Returns the output of a request.
Formatter: TypeAlias = Callable[[Request, Sequence[Completion]], str]


@dataclass(frozen=True, slots=True)
class GenerateSetup:
    """Checked inputs of `msrl generate`."""

    source: WeightSource
    renderer: Renderer
    requests: list[Request]
    engine: EngineSettings
    output: Path | None
    prompts: tuple[Prompt, ...]
    episodes: EpisodeSettings | None  # None if a response is one turn


def run(config: Config) -> None:
    """Generate with the settings of `config.generate`.

    Raises:
        MsrlError: The input is invalid; it is checked before the engine starts.
    """
    section, setup = config.generate, prepare(config)
    stop_token_ids = () if section.raw else setup.renderer.stop_token_ids
    sampling = replace(
        sampling_params(config, section, stop_token_ids, section.num_samples),
        with_logprobs=setup.episodes is not None,  # episodes record them
    )
    with (
        running_pool(setup.episodes) as pool,
        running_engine(config, setup.source, setup.engine) as engine,
        open_output(setup.output) as write,
    ):
        sampler: Engine | EpisodeSampler = engine
        if pool is not None and setup.episodes is not None:
            sampler = EpisodeSampler(engine, pool, setup.episodes)
        _generate(sampler, setup, sampling, _formatter(section, setup.output), write)


def prepare(config: Config) -> GenerateSetup:
    """Open the model, and read and check the prompts, without starting an engine.

    Raises:
        MsrlError: The model, the input or the output is not valid.
    """
    section = config.generate
    output = check_output(section.output)
    source = open_model(section.model, "generate.model", section.lora)
    renderer = choose_renderer(
        source.hf_dir, section.template, enable_thinking=section.enable_thinking, day=section.date
    )
    if not section.raw and (warning := other_template(source.hf_dir, renderer)):
        print_note(warning)
    check_stops("generate.stop", section.stop, renderer.tokenizer)
    images = ImagePrompts.of(renderer)
    has_environment = config.environment.is_on
    requests = read_requests(section, renderer, images, has_environment=has_environment)
    limit = config.rollout.engine.max_model_len or source.shape.max_position_embeddings
    check_lengths(requests, limit, may_be_empty=config.environment.is_on)
    prompts = tuple(
        replace(row_prompt(number, request.row, request.token_ids), images=request.images)
        for number, request in enumerate(requests)
    )
    _refuse_images(config, requests)
    episodes = episode_settings(config, source.hf_dir, renderer, prompts)
    engine = engine_settings(
        config,
        source.hf_dir,
        dtype=section.dtype,
        max_model_len=min(limit, _longest_prompt(prompts, episodes) + section.max_tokens),
        max_num_seqs=len(requests) * section.num_samples,
        random_weights=needs_weight_transfer(source, section.model, section.lora),
    )
    engine = replace(engine, images=images.engine_images(prompts))
    check_engine(config, engine)
    return GenerateSetup(source, renderer, requests, engine, output, prompts, episodes)


def _longest_prompt(prompts: Sequence[Prompt], episodes: EpisodeSettings | None) -> int:
    """Return the largest number of tokens before the first answer."""
    if episodes is not None:
        return episodes.max_prompt_tokens
    return max(len(prompt.token_ids) for prompt in prompts)


def _refuse_images(config: Config, requests: Sequence[Request]) -> None:
    """Raise MsrlError if a row has images and an environment asks its question."""
    where = next((request.where for request in requests if request.images), None)
    if where is not None and config.environment.is_on:
        raise MsrlError(
            f"{where}: images: environments read no images in this version. Remove the images, or "
            "the section environment."
        )


def read_requests(
    section: GenerateConfig,
    renderer: Renderer,
    images: ImagePrompts | None = None,
    *,
    has_environment: bool = False,
) -> list[Request]:
    """Return the prompt, or every row of the input, as token ids.

    With an environment, a row without a prompt has no tokens. `images` renders rows with images for
    models that read them.

    Raises:
        MsrlError: There are no rows, or some are not prompts.
    """
    if (section.prompt is None) == (section.input is None):
        raise MsrlError("generate.prompt: exactly one of prompt and input file is required.")
    rows, reader = list(_input_rows(section)), images or ImagePrompts(renderer)

    def make(where: str, row: Any) -> Request:
        if has_environment and isinstance(row, dict) and not {"prompt", "messages"} & {*row}:
            _check_columns(where, row)
            return Request(where, row, np.zeros(0, np.int64))
        return _request(where, row, section, reader)

    return _all_or_mistakes(rows, make)


def _input_rows(section: GenerateConfig) -> Iterator[tuple[str, Any]]:
    """Yield the prompts of the command line, or the rows of the input, with their locations."""
    if isinstance(section.prompt, str):
        yield "--prompt", {"prompt": section.prompt}
        return
    if section.prompt is not None:
        for number, prompt in enumerate(section.prompt, 1):
            yield f"--prompt (the {number}. one)", {"prompt": prompt}
        return
    path, is_empty = Path(str(section.input)), True
    for batch in read_batches((path,)):
        for offset, row in batch.values():
            is_empty = False
            yield batch.where(offset), row
    if is_empty:
        raise MsrlError(
            f"{path}: contains no rows. Every row must be a JSON object with prompt or messages."
        )


def _all_or_mistakes(
    rows: Iterable[tuple[str, Any]], make: Callable[[str, Any], Request]
) -> list[Request]:
    """Return `make` of every row, or raise all mistakes in one error."""
    requests: list[Request] = []
    mistakes: list[str] = []
    for where, row in rows:
        try:
            requests.append(make(where, row))
        except MsrlError as error:
            mistakes.append(str(error))
    _refuse(mistakes)
    return requests


def _refuse(mistakes: Sequence[str]) -> None:
    """Raise the mistakes, if there are any; at most 20 of them are listed."""
    if mistakes:
        more = len(mistakes) - _MAX_MISTAKES
        raise ManyErrors(
            [*mistakes[:_MAX_MISTAKES], *([f"and {more} more rows"] if more > 0 else [])]
        )


def _request(where: str, row: Any, section: GenerateConfig, images: ImagePrompts) -> Request:
    if not isinstance(row, dict):
        raise MsrlError(
            f"{where}: must be a JSON object with prompt or messages, not {type(row).__name__}."
        )
    _check_columns(where, row)
    column = next((row[key] for key in _IMAGES if not is_empty(row.get(key))), None)
    if section.raw:
        text = row.get("prompt")
        if not isinstance(text, str):
            raise MsrlError(f"{where}: prompt: must be a text if generate.raw is set.")
        if column is not None:
            raise MsrlError(f"{where}: images: not read if generate.raw is set. Remove them.")
        return Request(where, row, raw_ids(images.renderer, text))
    conversation = with_system(
        Conversation(_messages(where, row), extra=_tools(where, row)), section.system
    )
    folder = Path() if section.input is None else Path(section.input).parent
    with _add_location(where):
        return Request(where, row, *images.render(conversation, column, folder))


@contextlib.contextmanager
def _add_location(where: str) -> Generator[None, None, None]:
    """Add the location to errors of the body."""
    try:
        yield
    except MsrlError as error:
        raise MsrlError(f"{where}: {error}") from error


def _tools(where: str, row: Mapping[str, Any]) -> dict[str, str]:
    """Return the tools for the template.

    If the prompt is a text, an invalid `tools` column is treated as unrelated data.
    """
    try:
        tools = tools_text(row.get("tools"))
    except MsrlError as error:
        if isinstance(row.get("prompt"), str):
            return {}
        raise MsrlError(f"{where}: {error}") from error
    return {"tools": tools} if tools else {}


def _check_columns(where: str, row: Mapping[str, Any]) -> None:
    """Check that the row can be written with its completions, before generation starts."""
    if "completions" in row:
        raise MsrlError(f"{where}: completions: the row already has this column. Rename it.")
    for column, value in row.items():
        try:
            json.dumps({column: value}, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise MsrlError(
                f"{where}: column {column!r} cannot be written as JSON ({error}). Convert it "
                "to text or numbers, or remove it."
            ) from error


def _messages(where: str, row: Mapping[str, Any]) -> tuple[Message, ...]:
    """Return the turns of a row; the model responds to the last one."""
    if ("prompt" in row) == ("messages" in row):
        raise MsrlError(
            f"{where}: must have either prompt or messages. It has "
            f"{', '.join(sorted(row)) or 'no columns'}."
        )
    turns = row.get("messages", row.get("prompt"))
    if isinstance(turns, str) and "prompt" in row:
        return (Message("user", turns),)
    if not isinstance(turns, list) or not turns:
        if "messages" in row:
            raise MsrlError(f"{where}: messages must be a list of objects with role and content.")
        raise MsrlError(
            f"{where}: prompt must be a text or a list of objects with role and content."
        )
    messages = tuple(_message(where, number, turn) for number, turn in enumerate(turns, 1))
    if messages[-1].role not in ("user", "tool"):
        raise MsrlError(
            f"{where}: the last message has role {messages[-1].role}. It must have role user "
            "or tool."
        )
    return messages


def _message(where: str, number: int, turn: Any) -> Message:
    """Return a message; tool calls and reasoning are merged into the text as in `preprocess`."""
    is_text = isinstance(turn, dict) and (
        isinstance(turn.get("content"), str | list)
        or (turn.get("content") is None and turn.get("tool_calls"))
    )
    if not is_text or turn.get("role") not in _ROLES:
        raise MsrlError(
            f"{where}: message {number} must have role ({', '.join(_ROLES)}) and content (a text, "
            "or a list of parts)."
        )
    location = f"{where}: message {number}"
    messages = read_turn({key: turn.get(key) for key in _MESSAGE}, location)
    if len(messages) != 1:
        raise MsrlError(f"{location}: tool results belong into messages of role tool. Move them.")
    return messages[0]


def check_lengths(requests: Iterable[Request], limit: int, *, may_be_empty: bool = False) -> None:
    """Check that every prompt has tokens and leaves room for a response in `limit` tokens.

    With `may_be_empty`, an environment may begin the conversation of a prompt without tokens.

    Raises:
        ManyErrors: One message for each row that does not.
    """
    mistakes: list[str] = []
    for request in requests:
        length = len(request.token_ids)
        if length == 0 and not may_be_empty:
            mistakes.append(f"{request.where}: the prompt has no tokens.")
        elif length >= limit:
            mistakes.append(
                f"{request.where}: the prompt has {length} tokens, but prompt and response "
                f"together may have at most {limit}. Shorten it."
            )
    _refuse(mistakes)


def _generate(
    sampler: Engine | EpisodeSampler,
    setup: GenerateSetup,
    sampling: SamplingParams,
    format_completions: Formatter,
    write: WriteLines,
) -> None:
    """Write the completions in the order of the requests, then print a summary."""
    prompts, requests = setup.prompts, setup.requests
    num_prompts = max(1, _BATCH // sampling.num_samples)
    started, done = time.perf_counter(), list[RolloutGroup]()
    total = len(prompts) * sampling.num_samples
    with progress("generating", total=total, unit="completions") as bar:
        for first in range(0, len(prompts), num_prompts):
            batch = prompts[first : first + num_prompts]
            groups = sampler.generate(batch, sampling, 0, on_finished=bar.advance)
            texts = [
                format_completions(requests[group.prompt.index], group.completions)
                for group in groups
            ]
            write("".join(texts))
            done += groups
    _print_summary(done, time.perf_counter() - started)


def _print_summary(groups: Sequence[RolloutGroup], seconds: float) -> None:
    completions = [completion for group in groups for completion in group.completions]
    num_tokens = sum(len(completion.token_ids) for completion in completions)
    num_truncated = sum(completion.finish_reason == "length" for completion in completions)
    episodes = episode_summary(groups)
    noun = "episodes" if episodes else "completions"
    notes = [f"{num_truncated} reached their length limit"] if num_truncated else []
    notes += [episodes] if episodes else []
    text = "; ".join([f"{len(completions)} {noun}, {num_tokens} tokens in {seconds:.1f} s", *notes])
    print_note(f"Generated {text}")


def _formatter(section: GenerateConfig, output: Path | None) -> Formatter:
    """Return the output format.

    It is plain text for one prompt of the command line that goes to standard output, else rows of
    JSON.
    """
    if output is None and isinstance(section.prompt, str):
        return lambda request, completions: completions_text(completions, section.stop)
    is_ascii = requires_ascii(output)
    return lambda request, completions: json_line(
        request.row, completions, section.stop, is_ascii=is_ascii
    )
