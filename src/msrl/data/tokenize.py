"""Tokenization of one batch of rows in a worker process.

It imports neither torch nor transformers, except for the template `native`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from msrl.data.columns import ColumnMapping, DroppedRow, as_text, is_empty, pick
from msrl.data.dataset import IGNORE
from msrl.data.files.readers import RowBatch
from msrl.data.handlers import Handler
from msrl.data.images.load import (
    FileState,
    ImageRecord,
    ImageSettings,
    cuts_image,
    image_sources,
    load_images,
    place_images,
)
from msrl.data.images.marks import attach_images, refuse_marks
from msrl.data.manifest import PREFERENCES, TEXTS
from msrl.data.preferences import fit
from msrl.data.render import Renderer
from msrl.data.rows.formats import hint
from msrl.data.rows.keys import check_row, without_keys
from msrl.data.rows.preference import refuse_preference
from msrl.data.rows.scores import check_order
from msrl.data.rows.steps import StepTokens
from msrl.data.rows.turn_lists import with_turn_lists
from msrl.data.spans import encode_texts
from msrl.data.tokenizer import TextTokenizer
from msrl.data.tokenizer_limits import reported_failures
from msrl.errors import MsrlError
from msrl.registry.own import is_own
from msrl.thoughts import split_thought, without_thought
from msrl.types import (
    Bools,
    Conversation,
    Floats,
    Ints,
    Message,
    PlacedImage,
    PreferenceRow,
    RenderedExample,
    RenderedPreference,
    StepRow,
)

Tokens = NDArray[np.int32]
T = TypeVar("T")
ALL = "all"
_QUOTED = re.compile(r"(columns? |for )?'[^']*'")


MAX_TEXT_BYTES = 16 << 20  # of one row


@dataclass(frozen=True)
class TokenizeSettings:
    """Settings for the tokenization of every row."""

    handler: Handler
    tokenizer: TextTokenizer
    renderer: Renderer | None  # None for text without a template
    seq_length: int | None  # maximum length in tokens, None for no limit
    truncate: bool  # truncate longer examples instead of dropping them
    eod_token_id: int | None  # appended to every document
    step_tokens: StepTokens | None = None  # of texts with labeled steps
    kept: tuple[str, ...] = ()  # unread columns that become `extra` of prompts; `all` for all
    ignored: frozenset[str] = frozenset()  # keys of rows, turns and blocks that are not read
    drop_bad_rows: bool = False  # drop and count rows that are not valid
    image_settings: ImageSettings | None = None  # None if the model reads no images
    no_images: str = "the model reads text only"  # why it reads none


class BadRow(NamedTuple):
    """A row that cannot be read. `line` has its location, problem and value as JSON."""

    reason: str
    message: str
    line: str


@dataclass(frozen=True, slots=True)
class Ragged:
    """Concatenated sequences: `values` [sum of lengths], `lengths` [S].

    Values are token ids, or numbers in float32.
    """

    values: Tokens | Floats
    lengths: Tokens


@dataclass(frozen=True, slots=True)
class TokenizedRows:
    """Result of a batch. N is the number of tokens of all sequences."""

    num_read: int
    sequences: Ragged
    loss_mask: Bools  # [N] for sft and steps, else empty
    answers: tuple[str, ...]  # lines of the answers file (prompts)
    answer_ids: Ragged  # tokens of the answers (prompts)
    dropped: Mapping[str, int]  # number of dropped rows by reason
    truncated: int
    num_without_answer: int = 0  # prompts without a ground truth
    preferences: tuple[RenderedPreference, ...] = ()  # rows of preference data
    step_labels: Ints | None = None  # [N] for steps
    unread: Mapping[str, int] = field(default_factory=dict[str, int])  # rows by key not read
    kept: frozenset[str] = frozenset()  # columns to keep by name that a row has
    bad: tuple[BadRow, ...] = ()  # rows that are not valid, if these are dropped
    images: tuple[tuple[PlacedImage, ...], ...] = ()  # of each sequence; empty without any
    image_records: Mapping[str, ImageRecord] = field(
        default_factory=dict[str, ImageRecord]
    )  # by key
    image_files: Mapping[str, FileState] = field(default_factory=dict[str, FileState])


def tokenize_rows(job: TokenizeSettings, batch: RowBatch) -> TokenizedRows:
    """Tokenize the rows of a batch.

    Raises:
        MsrlError: a row is not valid, and invalid rows are not dropped. The message begins with
            file and row.
    """
    converted = _convert_rows(job, batch)
    num_read = len(converted.items) + converted.dropped.total() + len(converted.bad)
    dropped = Counter(converted.dropped)
    try:
        result = _tokenize_items(job, batch, converted.offsets, converted.items, dropped)
    except MsrlError:
        if not job.drop_bad_rows:
            raise
        offsets, items = _renderable(job, batch, converted)
        dropped = Counter(converted.dropped)
        result = _tokenize_items(job, batch, offsets, items, dropped)
    bad, kept = tuple(converted.bad), frozenset(converted.kept)
    result = replace(result, num_read=num_read, unread=converted.unread, kept=kept, bad=bad)
    if not converted.image_records:
        return result
    return replace(result, image_records=converted.image_records, image_files=converted.image_files)


def _tokenize_items(
    job: TokenizeSettings,
    batch: RowBatch,
    offsets: list[int],
    items: list[Any],
    dropped: Counter[str],
) -> TokenizedRows:
    """Tokenize the texts or conversations of a batch."""
    num_read = len(items)
    if job.handler.kind == "pretrain":
        return _tokenize_texts(job, items, dropped, num_read)
    if job.handler.kind == "steps":
        return _collect_examples(job, _tokenize_steps(job, items, dropped), dropped, num_read)
    assert job.renderer is not None
    if job.handler.kind in PREFERENCES:
        conversations = [conversation for row in items for conversation in row.conversations]
        origins = [at for row, at in zip(items, offsets, strict=True) for _ in row.conversations]
        rendered = _render(job.renderer.last_answers, conversations, batch, origins)
        rendered = _place(job, conversations, rendered, batch, origins)
        return _collect_preferences(job, items, rendered, dropped, num_read)
    if job.handler.kind == "prompts":
        prompts = [
            RenderedExample(ids, np.zeros(len(ids), np.bool_))
            for ids in _render(job.renderer.prompts, items, batch, offsets)
        ]
        prompts = _place(job, items, prompts, batch, offsets)
        return _collect_prompts(job, items, prompts, dropped, num_read)
    examples = _render(job.renderer.examples, items, batch, offsets)
    examples = _place(job, items, examples, batch, offsets)
    return _collect_examples(job, examples, dropped, num_read)


def _renderable(
    job: TokenizeSettings, batch: RowBatch, rows: _Converted
) -> tuple[list[int], list[Any]]:
    """Return the rows that can be rendered. The others are added to those that are not valid."""
    offsets: list[int] = []
    items: list[Any] = []
    for offset, item in zip(rows.offsets, rows.items, strict=True):
        try:
            _tokenize_items(job, batch, [offset], [item], Counter())
        except MsrlError as error:
            rows.bad.append(_bad_row(batch, offset, str(error)))
        else:
            offsets.append(offset)
            items.append(item)
    return offsets, items


@dataclass(frozen=True, slots=True)
class _Converted:
    """Usable rows of a batch with their offsets, and the dropped and bad ones."""

    offsets: list[int]
    items: list[Any]
    dropped: Counter[str]
    unread: Counter[str]
    kept: set[str]
    bad: list[BadRow]
    image_records: dict[str, ImageRecord] = field(default_factory=dict[str, ImageRecord])
    image_files: dict[str, FileState] = field(default_factory=dict[str, FileState])


def _convert_rows(job: TokenizeSettings, batch: RowBatch) -> _Converted:
    """Return the usable rows as texts or conversations."""
    rows = _Converted([], [], Counter(), Counter(), set(), [])
    is_user = is_own(job.handler.name)
    convert = _own_converter(job) if is_user else _checked_converter(job, rows.unread, rows.kept)
    kind = job.handler.kind
    for offset in batch.offsets():
        row, is_read = None, False
        try:
            row = batch.value(offset)
            is_read = True
            if not (is_user or kind in TEXTS):
                row = with_turn_lists(row)
            item = convert(without_keys(row, job.ignored) if job.ignored else row)
            _check_texts(item)
            is_fitted = kind in TEXTS or kind in PREFERENCES
            item = item if is_fitted else _fit_to_kind(item, kind)
            rows.items.append(item if kind in TEXTS else _with_images(job, item, batch, rows))
            rows.offsets.append(offset)
        except DroppedRow as error:
            rows.dropped[error.reason] += 1
        except MsrlError as error:
            where = f"{batch.where(offset)}: " if is_read else ""
            message = f"{where}{error}{hint(row, job.handler.name, kind)}"
            if not job.drop_bad_rows:
                raise MsrlError(message) from None
            rows.bad.append(_bad_row(batch, offset, message))
    return rows


def _with_images(
    job: TokenizeSettings, item: Any, batch: RowBatch, rows: _Converted
) -> Conversation | PreferenceRow:
    """Return a row with its images, whose files are added to those of the batch.

    Raises:
        MsrlError: an image cannot be used, a question marks one that the row does not have, or the
            model reads no images.
    """
    if not isinstance(item, PreferenceRow):
        return _loaded(job, item, batch, rows)
    sides: list[Conversation] = []
    for side in item.conversations:  # the sides of a pair have the images of their prompt
        sources = image_sources(side)
        same = next((other for other in sides if sources and image_sources(other) == sources), None)
        if same is None:
            sides.append(_loaded(job, side, batch, rows))
        else:
            sides.append(replace(side, images=same.images))
    return replace(item, conversations=tuple(sides))


def _loaded(
    job: TokenizeSettings, conversation: Conversation, batch: RowBatch, rows: _Converted
) -> Conversation:
    """Return a conversation with its images."""
    if any(message.images for message in conversation.messages):
        if job.image_settings is None:
            raise MsrlError(f"images: {job.no_images}")
        folder = Path(batch.path).parent
        files = rows.image_files
        return load_images(conversation, job.image_settings, folder, rows.image_records, files)
    if job.image_settings is not None:
        refuse_marks(conversation)
    return conversation


def _bad_row(batch: RowBatch, offset: int, message: str) -> BadRow:
    where = batch.where(offset)
    row = batch.rows[offset]
    if isinstance(row, bytes):
        row = row.decode("utf-8", "backslashreplace").rstrip("\r\n")
    elif isinstance(row, MsrlError):
        row = None
    problem = message.removeprefix(f"{where}: ")
    record = {"row": where, "problem": problem, "value": row}
    return BadRow(_reason(problem), message, json.dumps(record, default=_shown_value))


def _shown_value(value: Any) -> str:
    """Return a value that JSON does not have, such as the bytes of an image, as text."""
    return f"{len(value):,} bytes" if isinstance(value, bytes) else str(value)


def _reason(problem: str) -> str:
    """Return the part of a message that is the same for all rows with this problem."""
    problem = re.sub(r"^(turn|answer|image) \d+: ", "", problem)
    clause = re.split(r"[.;:] ", problem, maxsplit=1)[0]
    clause = re.sub(r"^(?:column )?(\w+)=\S+$", r"value of \1", clause)
    # A quoted text that is no name of a column is a value.
    clause = _QUOTED.sub(lambda quoted: quoted[0] if quoted[1] else "...", clause)
    return re.sub(r"\d+", "N", clause)[:80]


def _own_converter(job: TokenizeSettings) -> Callable[[Any], Any]:
    """Return the user's function. It decides which keys of a row have a meaning."""
    return job.handler.converter()


def _checked_converter(
    job: TokenizeSettings, unread: Counter[str], seen: set[str]
) -> Callable[[Any], Any]:
    """Return the function that reads a row, and refuses or counts the keys that it leaves out.

    The columns to keep by name that a row has are added to `seen`.
    """
    kind, resolve = job.handler.kind, job.handler.resolver()
    kept, is_kept = frozenset(job.kept) - {ALL}, ALL in job.kept

    def convert(row: Any) -> Any:
        if kind in ("sft", "prompts"):
            refuse_preference(row)
        resolved, columns, read = resolve(row)
        names = columns.read | kept if kept else columns.read
        if kind == "prompts" and "label" in row and as_text(row["label"]) == _answer(row, columns):
            names |= {"label"}  # the ground truth, repeated
        check_row(row, names, kind, unread, is_kept=is_kept)
        seen.update(name for name in kept - columns.read if name in row)
        if kind == "pairs":
            sides = (columns.paths.get(name, "") for name in ("chosen", "rejected"))
            check_order(row, names, *sides)
        item = _attached(read(resolved, columns), resolved, columns, job)
        return _with_extra(item, row, columns, job.kept) if job.kept else item

    return convert


def _attached(item: Any, row: Any, columns: ColumnMapping, job: TokenizeSettings) -> Any:
    """Return a row whose messages have the images of the column `images`.

    Raises:
        MsrlError: the row has images, but the model reads none, or the marks in its questions are
            more or fewer.
    """
    if "images" not in columns.paths:
        return item
    column = columns.value(row, "images")
    if job.image_settings is None and not is_empty(column):
        raise MsrlError(f"images: {job.no_images}")
    if isinstance(item, PreferenceRow):
        sides = tuple(attach_images(side, column) for side in item.conversations)
        return replace(item, conversations=sides)
    return attach_images(item, column)


def _answer(row: Any, columns: ColumnMapping) -> str:
    """Return the ground truth of a prompt in a column of its own."""
    return as_text(pick(row, columns.paths.get("response", "")))


def _with_extra(
    conversation: Conversation, row: Any, columns: ColumnMapping, kept: tuple[str, ...]
) -> Conversation:
    """Return a conversation with columns of its row that the handler does not read as `extra`."""
    names = [name for name in row if name not in columns.read and not is_empty(row[name])]
    extra = {name: as_text(row[name]) for name in names if ALL in kept or name in kept}
    return replace(conversation, extra={**extra, **conversation.extra})


def _check_texts(item: str | StepRow | Conversation | PreferenceRow) -> None:
    r"""Raise MsrlError if a text is too long to tokenize, or contains an unpaired surrogate.

    JSON can contain one (`\ud83d` alone), but it can be neither tokenized nor written to a file.
    """
    extra: list[str] = []
    if isinstance(item, str | StepRow):
        texts = [item if isinstance(item, str) else item.text]
    else:
        sides = item.conversations if isinstance(item, PreferenceRow) else (item,)
        texts = [text for side in sides for text in _tokenized_texts(side)]
        extra = [text for side in sides for text in side.extra.values()]
    try:
        size = len("".join(texts).encode())
        "".join(extra).encode()
    except UnicodeEncodeError as error:
        code = ascii(error.object[error.start])[1:-1]
        raise MsrlError(
            f"contains {code}, which is only half of a character (an unpaired surrogate). "
            "Remove it, or write both halves."
        ) from None
    if size > MAX_TEXT_BYTES:  # a tokenizer needs a hundred bytes for each
        raise MsrlError(
            f"has {size:,} bytes of text to tokenize (limit: {MAX_TEXT_BYTES:,}). Split the row."
        )


def _tokenized_texts(conversation: Conversation) -> list[str]:
    contents = [message.content for message in conversation.messages]
    return [*contents, conversation.answer or "", conversation.extra.get("tools", "")]


def _render(
    render: Callable[[Sequence[Conversation]], list[T]],
    conversations: list[Conversation],
    batch: RowBatch,
    offsets: list[int],
) -> list[T]:
    """Render all conversations. If one fails, raise an MsrlError with its row."""
    try:
        return render(conversations)
    except MsrlError:
        for offset, conversation in zip(offsets, conversations, strict=True):
            try:
                render([conversation])
            except MsrlError as error:
                raise MsrlError(f"{batch.where(offset)}: {error}") from None
        raise


def _place(
    job: TokenizeSettings,
    conversations: Sequence[Conversation],
    examples: list[RenderedExample],
    batch: RowBatch,
    offsets: Sequence[int],
) -> list[RenderedExample]:
    """Return the examples of a model that reads images with their image tokens."""
    if job.image_settings is None:
        return examples
    placed: list[RenderedExample] = []
    for conversation, example, offset in zip(conversations, examples, offsets, strict=True):
        try:
            placed.append(place_images(example, conversation.images, job.image_settings))
        except MsrlError as error:
            raise MsrlError(f"{batch.where(offset)}: {error}") from None
    return placed


def _cuts_image(job: TokenizeSettings, example: RenderedExample) -> bool:
    """Return True if truncation to the limit would remove a part of an image."""
    if job.image_settings is None or job.seq_length is None:
        return False
    return cuts_image(example.images, job.seq_length, job.image_settings.vision.merge_size)


def _fit_to_kind(conversation: Conversation, kind: str) -> Conversation:
    """Return a conversation that ends before the answer (prompts) or with an answer (sft).

    Raises:
        DroppedRow: the prompt or the answer is empty.
    """
    messages, answer = conversation.messages, conversation.answer
    if kind == "prompts" and messages and messages[-1].role == "assistant":
        answer = without_thought(messages[-1].content) if answer is None else answer
        messages = messages[:-1]
    if kind == "sft" and answer is not None and messages and messages[-1].role != "assistant":
        messages = (*messages, Message("assistant", answer))
    if not any(m.role == "user" and m.content.strip() for m in messages):
        raise DroppedRow("empty_prompt")
    last = messages[-1]
    if kind == "sft" and (last.role != "assistant" or not split_thought(last.content).text.strip()):
        raise DroppedRow("empty_answer")
    if kind == "prompts" and answer is not None and not answer.strip():
        raise DroppedRow("empty_answer")
    return Conversation(messages, answer, conversation.extra)


def _tokenize_texts(
    job: TokenizeSettings, texts: Sequence[str], dropped: Counter[str], num_read: int
) -> TokenizedRows:
    """Tokenize documents.

    The tokenizer adds its own special tokens; the end-of-document token follows if it is set.
    """
    documents = [text for text in texts if text.strip()]
    _count(dropped, "empty_text", len(texts) - len(documents))
    with reported_failures(job.tokenizer.folder):
        encodings = job.tokenizer.backend.encode_batch_fast(documents)
    ids = [encoding.ids for encoding in encodings]
    if job.eod_token_id is not None:
        for sequence in ids:
            sequence.append(job.eod_token_id)
    lengths = np.array([len(sequence) for sequence in ids], np.int32)
    # One array for all sequences takes less time than an array for each of them.
    values = np.fromiter(chain.from_iterable(ids), np.int32, int(lengths.sum()))
    sequences = Ragged(values, lengths)
    return TokenizedRows(num_read, sequences, np.zeros(0, np.bool_), (), _concat([]), dropped, 0)


def _tokenize_steps(
    job: TokenizeSettings, rows: Sequence[StepRow], dropped: Counter[str]
) -> list[RenderedExample]:
    """Tokenize texts with labeled steps, without special tokens."""
    assert job.step_tokens is not None
    encoded = job.step_tokens.encode(job.tokenizer, [row.text for row in rows])
    examples: list[RenderedExample] = []
    for row, ids in zip(rows, encoded, strict=True):
        labels = job.step_tokens.labels(ids, row.labels)
        if labels is None:
            dropped["wrong_number_of_labels"] += 1
        else:
            examples.append(RenderedExample(ids, labels != IGNORE, labels))
    return examples


def _collect_examples(
    job: TokenizeSettings, rendered: Sequence[RenderedExample], dropped: Counter[str], num_read: int
) -> TokenizedRows:
    """Return the examples that fit into seq_length and have tokens to train on."""
    limit = job.seq_length
    num_long = sum(limit is not None and len(e.token_ids) > limit for e in rendered)
    if job.truncate:
        intact = [e for e in rendered if not _cuts_image(job, e)]
        _count(dropped, "image_too_long", len(rendered) - len(intact))
        num_long -= len(rendered) - len(intact)
        fitting = [e if limit is None else e.truncate(limit) for e in intact]
    else:
        fitting = [e for e in rendered if limit is None or len(e.token_ids) <= limit]
        _count(dropped, "too_long", num_long)
    # No token predicts the first token of a sequence.
    examples = [e for e in fitting if e.loss_mask[1:].any()]
    _count(dropped, "nothing_to_learn", len(fitting) - len(examples))
    truncated = num_long if job.truncate else 0
    sequences = _concat([e.token_ids for e in examples])
    loss_mask = np.concatenate([np.zeros(0, np.bool_), *(e.loss_mask for e in examples)])
    labels = [example.labels for example in examples if example.labels is not None]
    step_labels = np.concatenate(labels) if labels else None
    none = _concat([])
    images = _images(examples)
    return TokenizedRows(
        num_read, sequences, loss_mask, (), none, dropped, truncated,
        step_labels=step_labels, images=images,
    )  # fmt: skip


def _images(examples: Sequence[RenderedExample]) -> tuple[tuple[PlacedImage, ...], ...]:
    """Return the images of each example, or nothing if there are none."""
    return tuple(e.images for e in examples) if any(e.images for e in examples) else ()


def _collect_preferences(
    job: TokenizeSettings,
    rows: Sequence[PreferenceRow],
    rendered: Sequence[RenderedExample],
    dropped: Counter[str],
    num_read: int,
) -> TokenizedRows:
    """Return the rows of preference data whose sides fit into seq_length."""
    sides = iter(rendered)
    preferences: list[RenderedPreference] = []
    num_truncated = 0
    for row in rows:
        examples = tuple(next(sides) for _ in row.conversations)
        fitted = fit(examples, job.seq_length, must_truncate=job.truncate)
        if isinstance(fitted, str):
            dropped[_drop_reason(job, row, fitted)] += 1
            continue
        num_truncated += fitted is not examples
        preferences.append(RenderedPreference(fitted, row.value, row.weight))
    none = _concat([])
    return TokenizedRows(
        num_read,
        none,
        np.zeros(0, np.bool_),
        (),
        none,
        dropped,
        num_truncated,
        preferences=tuple(preferences),
    )


def _drop_reason(job: TokenizeSettings, row: PreferenceRow, reason: str) -> str:
    """Return the reason to drop a row whose sides do not fit together.

    An answer without a thought gets an empty one in its prompt, unless empty thoughts are trained.
    The prompts of a pair differ then if only one side has a thought.
    """
    assert job.renderer is not None
    answers = [conversation.messages[-1].content for conversation in row.conversations]
    has_thoughts = {job.renderer.has_thought(answer) for answer in answers}
    is_thought = reason == "different_prompts" and len(has_thoughts) > 1
    return "different_thoughts" if is_thought else reason


def _collect_prompts(
    job: TokenizeSettings,
    conversations: Sequence[Conversation],
    prompts: Sequence[RenderedExample],
    dropped: Counter[str],
    num_read: int,
) -> TokenizedRows:
    """Return the prompts that fit into seq_length, with their answers."""
    limit = job.seq_length
    fitting = [
        (conversation, prompt)
        for conversation, prompt in zip(conversations, prompts, strict=True)
        if limit is None or len(prompt.token_ids) <= limit
    ]
    _count(dropped, "too_long", len(prompts) - len(fitting))
    answers = [conversation.answer or "" for conversation, _ in fitting]
    lines = tuple(
        json.dumps({"answer": answer, "extra": dict(conversation.extra)}, ensure_ascii=False)
        for answer, (conversation, _) in zip(answers, fitting, strict=True)
    )
    answer_ids = _concat(encode_texts(job.tokenizer, answers))
    sequences = _concat([prompt.token_ids for _, prompt in fitting])
    no_mask = np.zeros(0, np.bool_)
    no_answer = sum(conversation.answer is None for conversation, _ in fitting)
    images = _images([prompt for _, prompt in fitting])
    return TokenizedRows(
        num_read, sequences, no_mask, lines, answer_ids, dropped, 0, no_answer, images=images
    )


def _concat(sequences: Sequence[Sequence[int] | NDArray[Any]]) -> Ragged:
    """Concatenate sequences as 32-bit integers."""
    arrays = [np.asarray(sequence, np.int32) for sequence in sequences]
    lengths = np.array([len(array) for array in arrays], np.int32)
    return Ragged(np.concatenate([np.zeros(0, np.int32), *arrays]), lengths)


def _count(dropped: Counter[str], reason: str, number: int) -> None:
    """Add to the count of a reason. Reasons that never occur are not listed."""
    if number:
        dropped[reason] += number
