r"""Rendered examples as text: what the model sees, its tokens, and which of them are trained.

Every part of an example has a title line, and each line of its text begins with a bar, so that
texts of the data cannot look like titles. On a terminal, trained text has a colored background.
Backslashes of the text are doubled and characters that cannot be printed are escaped, such as
`\x1b`: the data can neither control the terminal nor pretend to be an escape.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np

from msrl.data.dataset import PromptDataset, SftDataset, StepDataset, TextDataset
from msrl.data.files.readers import DataFile, RowBatch, read_batches
from msrl.data.manifest import PREFERENCES, reason_text
from msrl.data.preferences import PreferenceDataset
from msrl.data.tokenize import TokenizedRows, TokenizeSettings, tokenize_rows
from msrl.data.tokenizer import TextTokenizer
from msrl.types import (
    Bools,
    Ints,
    PlacedImage,
    Prompt,
    RenderedExample,
    RenderedPreference,
)

_COLOR, _PLAIN = "\x1b[30;42m", "\x1b[0m"
_MAX_TOKENS, _HEAD_TOKENS = 240, 160  # of a part; of longer ones, the first and the last are shown
_MAX_PARTS, _HEAD_PARTS = 24, 16
_MAX_IDS, _HEAD_IDS = 12, 8
_MAX_CHARACTERS = 2_000


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of one kind, or a text that is not tokenized.

    The tokens of an image have a note in place of their text.
    """

    title: str
    content: Ints | str
    is_trained: bool = False
    before: tuple[int, ...] = ()  # the token before the first one, if there is one
    note: str = ""


@dataclass(frozen=True, slots=True)
class ShownExample:
    """An example: its title and parts."""

    title: str
    parts: tuple[Part, ...]


def print_examples(examples: Iterable[ShownExample], tokenizer: TextTokenizer | None) -> None:
    """Print examples on standard output, in color if it is a terminal that is to have colors."""
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for example in examples:
        for line in lines(example, tokenizer, color=color):
            print(line)


def lines(example: ShownExample, tokenizer: TextTokenizer | None, *, color: bool) -> Iterator[str]:
    """Yield the lines of an example. Without a tokenizer, they have no texts of tokens."""
    yield _escape(example.title)
    hidden = example.parts[_HEAD_PARTS : _HEAD_PARTS - _MAX_PARTS]
    is_long = len(example.parts) > _MAX_PARTS
    for part in example.parts[:_HEAD_PARTS] if is_long else example.parts:
        yield from _part_lines(part, tokenizer, color=color)
    if is_long:
        count = sum(len(part.content) for part in hidden if not isinstance(part.content, str))
        yield f"  ... {len(hidden):,} parts with {count:,} tokens not shown"
        for part in example.parts[_HEAD_PARTS - _MAX_PARTS :]:
            yield from _part_lines(part, tokenizer, color=color)


def show_rows(
    job: TokenizeSettings, files: Sequence[DataFile], count: int
) -> Iterator[ShownExample]:
    """Yield the first rows of files as `msrl preprocess` renders them, or why it drops them.

    Raises:
        MsrlError: A row is not valid.
    """
    rows = (result for batch in read_batches(files) for result in _single_rows(job, batch))
    for where, result in islice(rows, count):
        if result.bad:
            problem = result.bad[0].message.removeprefix(f"{where}: ")
            yield ShownExample(f"{where}: dropped: {problem}", ())
        elif result.dropped:
            reason = reason_text(next(iter(result.dropped)))
            yield ShownExample(f"{where}: dropped: {reason}", ())
        else:
            kind = job.handler.kind
            unread = Part("not read", ", ".join(sorted(result.unread)))
            for example in _show_row(where, kind, (_only_item(kind, result),), job.tokenizer):
                parts = (*example.parts, *([unread] if result.unread else []))
                yield replace(example, parts=parts)


def show_data(
    prefix: str, name: str, kind: str, tokenizer: TextTokenizer | None, count: int
) -> list[ShownExample]:
    """Return the first rows of preprocessed data.

    Args:
        prefix: prefix of the data.
        name: name of the data for titles.
        kind: kind of the data.
        tokenizer: tokenizer that decodes labels of steps and answers that exist as tokens only.
        count: number of rows.
    """
    dataset = _open(prefix, kind, tokenizer)
    shown: list[ShownExample] = []
    for number in range(min(count, len(dataset))):
        item = dataset[number]
        items = item if isinstance(item, tuple) else (item,)
        shown += _show_row(f"{name}, row {number + 1}", kind, items, tokenizer)
    return shown


def _open(prefix: str, kind: str, tokenizer: TextTokenizer | None) -> Any:
    if kind == "prompts":
        decode = None if tokenizer is None else tokenizer.backend.decode
        return PromptDataset(prefix, decode=decode)
    if kind in PREFERENCES:
        return PreferenceDataset(prefix, kind)
    return {"sft": SftDataset, "steps": StepDataset, "pretrain": TextDataset}[kind](prefix)


def _single_rows(job: TokenizeSettings, batch: RowBatch) -> Iterator[tuple[str, TokenizedRows]]:
    """Yield the location and the result of each row of a batch, without blank lines."""
    for offset, row in enumerate(batch.rows):
        single = RowBatch(batch.path, batch.first + offset, [row], batch.lines)
        result = tokenize_rows(job, single)
        if result.num_read:
            yield single.where(0), result


def _only_item(kind: str, result: TokenizedRows) -> Any:
    """Return the only row of a result, as a dataset on disk would return it."""
    ids = result.sequences.values.astype(np.int64)
    if kind in PREFERENCES:
        return result.preferences[0]
    images = result.images[0] if result.images else ()
    if kind == "prompts":
        line = json.loads(result.answers[0])
        return Prompt(0, ids, line["answer"], line["extra"], images)
    if kind == "pretrain":
        return ids
    return RenderedExample(ids, result.loss_mask, result.step_labels, images)


def _show_row(
    where: str, kind: str, items: Sequence[Any], tokenizer: TextTokenizer | None
) -> Iterator[ShownExample]:
    """Yield the examples of a row, which has several if it is packed."""
    for number, item in enumerate(items):
        location = where if len(items) == 1 else f"{where}, example {number + 1}"
        shown = parts(kind, item, tokenizer)
        yield ShownExample(f"{location}: {_counts(shown)}", shown)


def parts(kind: str, item: Any, tokenizer: TextTokenizer | None) -> tuple[Part, ...]:
    """Return the parts of an example, prompt, preference or document: every token once."""
    if isinstance(item, RenderedPreference):
        return _preference_parts(item, kind)
    if isinstance(item, Prompt):
        return _prompt_parts(item)
    if isinstance(item, RenderedExample):
        return _example_parts(item, tokenizer)
    return (Part("trained", item, is_trained=True),)


def _counts(shown: Sequence[Part]) -> str:
    """Return the number of tokens and of trained ones."""
    tokens = [part for part in shown if not isinstance(part.content, str)]
    total, trained = (
        sum(len(part.content) for part in tokens if part.is_trained or not only_trained)
        for only_trained in (False, True)
    )
    return _count(total) + (f", {trained:,} of them trained" if trained else "")


def _count(number: int) -> str:
    return f"{number:,} token{'' if number == 1 else 's'}"


def _example_parts(example: RenderedExample, tokenizer: TextTokenizer | None) -> tuple[Part, ...]:
    """Return the spans of trained and other tokens: an answer of each turn is one span."""
    spans: list[Part] = []
    for start, end in _spans(example.loss_mask):
        is_trained = bool(example.loss_mask[start])
        title = "trained" if is_trained else "context"
        if is_trained and example.labels is not None:
            title = f"label {_label(example.labels[start:end], tokenizer)} of"
        before = tuple(example.token_ids[:start][-1:].tolist())
        part = Part(title, example.token_ids[start:end], is_trained, before)
        spans += _split_images(part, example.images, start)
    return tuple(spans)


def _split_images(part: Part, images: Sequence[PlacedImage], start: int) -> Iterator[Part]:
    """Yield a part in pieces, so that each image is a piece.

    Args:
        part: part of a sequence.
        images: images of the sequence.
        start: position of the part in the sequence.
    """
    ids = part.content
    assert not isinstance(ids, str)
    position = 0
    for placed in images:
        first = placed.offset - start
        if not 0 <= first < len(ids):
            continue
        others = np.flatnonzero(ids[first:] != ids[first])
        end = first + int(others[0]) if len(others) else len(ids)
        if first > position:
            yield replace(part, content=ids[position:first])
        tiles, rows, columns = placed.image.grid
        size = f"{columns} x {rows} patches" + (f" in each of {tiles} tiles" if tiles > 1 else "")
        note = f"{size}, SHA-256 {placed.image.key[:12]}"
        yield Part("image", ids[first:end], note=note)
        position = end
    if position < len(ids):
        before = tuple(ids[:position][-1:].tolist()) if position else part.before
        yield replace(part, content=ids[position:], before=before)


def _label(ids: Ints, tokenizer: TextTokenizer | None) -> str:
    names = [str(i) if tokenizer is None else _decode(tokenizer, (), [i]) for i in ids.tolist()]
    return ", ".join(names)


def _spans(mask: Bools) -> list[tuple[int, int]]:
    bounds = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    return [(start, end) for start, end in pairwise(bounds) if end > start]


def _prompt_parts(prompt: Prompt) -> tuple[Part, ...]:
    extra = [Part(f"extra.{name}", str(text)) for name, text in prompt.extra.items()]
    answer = Part("ground truth", prompt.answer) if prompt.answer else Part("no ground truth", "")
    shown = _split_images(Part("prompt", prompt.token_ids), prompt.images, 0)
    return (*shown, answer, *extra)


def _preference_parts(row: RenderedPreference, kind: str) -> tuple[Part, ...]:
    """Return the prompt that the sides share, and what follows it in each."""
    names = ("chosen", "rejected") if kind == "pairs" else ("answer",)
    starts = [int(np.argmax(side.loss_mask)) for side in row.sides]
    prompt = Part("prompt", row.sides[0].token_ids[: starts[0]])
    shown = [*_split_images(prompt, row.sides[0].images, 0)]
    for name, side, start in zip(names, row.sides, starts, strict=True):
        spans = _example_parts(replace(side, images=()), None)[1 if start else 0 :]
        shown += [replace(part, title=f"{name}, {part.title}") for part in spans]
    value = f"margin {row.value:g}" if kind == "pairs" else "undesirable"
    if kind == "labeled" and row.value:
        value = "desirable"
    title = "label" if kind == "labeled" else "values"
    return (*shown, Part(title, f"{value}, weight {row.weight:g}"))


def _part_lines(part: Part, tokenizer: TextTokenizer | None, *, color: bool) -> Iterator[str]:
    if isinstance(part.content, str):
        yield f"  {_escape(part.title)}"
        yield from _text_lines(part.content[:_MAX_CHARACTERS]) if part.content else ()
        if len(part.content) > _MAX_CHARACTERS:
            yield f"    ... {len(part.content) - _MAX_CHARACTERS:,} characters not shown"
        return
    ids = part.content.tolist()
    yield f"  {_escape(part.title)}, {_count(len(ids))}: {part.note or _ids_text(ids)}"
    if tokenizer is None or part.note:
        return
    is_color = color and part.is_trained
    if len(ids) <= _MAX_TOKENS:
        yield from _text_lines(_decode(tokenizer, part.before, ids), color=is_color)
        return
    tail = _MAX_TOKENS - _HEAD_TOKENS
    yield from _text_lines(_decode(tokenizer, part.before, ids[:_HEAD_TOKENS]), color=is_color)
    yield f"    ... {len(ids) - _MAX_TOKENS:,} tokens not shown"
    yield from _text_lines(_decode(tokenizer, ids[:-tail][-1:], ids[-tail:]), color=is_color)


def _text_lines(text: str, *, color: bool = False) -> Iterator[str]:
    for line in text.split("\n"):
        shown = _escape(line)
        yield f"    | {_COLOR}{shown}{_PLAIN}" if color and shown else f"    | {shown}"


def _ids_text(ids: Sequence[int]) -> str:
    if len(ids) <= _MAX_IDS:
        return " ".join(map(str, ids))
    tail = ids[_HEAD_IDS - _MAX_IDS :]
    return f"{' '.join(map(str, ids[:_HEAD_IDS]))} ... {' '.join(map(str, tail))}"


def _decode(tokenizer: TextTokenizer, before: Sequence[int], ids: Sequence[int]) -> str:
    """Return the text of tokens that follow the tokens `before`.

    Some decoders drop a space at the beginning, which a token before it prevents.
    """
    decode = tokenizer.backend.decode
    head = decode(list(before), skip_special_tokens=False)
    whole = decode([*before, *ids], skip_special_tokens=False)
    if head and whole.startswith(head):
        return whole[len(head) :]
    return decode(list(ids), skip_special_tokens=False)


def _escape(text: str) -> str:
    """Return a line with backslashes doubled and other than printable characters escaped."""
    doubled = text.replace("\\", "\\\\")
    if doubled.isprintable():
        return doubled
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in doubled)
