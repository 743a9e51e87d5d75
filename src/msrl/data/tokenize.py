"""One batch of rows to token ids: what a worker process does. It imports neither torch nor transformers (but for template `native`)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from msrl.data.columns import DroppedRow
from msrl.data.handlers import Handler
from msrl.data.handlers.sharegpt import without_thought
from msrl.data.readers import RowBatch
from msrl.data.render import Renderer
from msrl.data.tokenizer import TextTokenizer
from msrl.errors import MsrlError
from msrl.types import Bools, Conversation, Ints, Message, RenderedExample

Tokens = NDArray[np.int32]
T = TypeVar("T")


@dataclass(frozen=True)
class TokenizeSettings:
    """What is to be done with every row. `seq_length` None: rows of any length. `renderer` None: text for pretraining."""

    handler: Handler
    tokenizer: TextTokenizer
    renderer: Renderer | None
    seq_length: int | None
    truncate: bool
    eod_token_id: int | None


@dataclass(frozen=True, slots=True)
class Ragged:
    """Sequences end to end: `values` [sum of lengths], `lengths` [S]."""

    values: Tokens
    lengths: Tokens


@dataclass(frozen=True, slots=True)
class TokenizedRows:
    """A batch's result. `learn` marks the tokens that are learnt (sft); `answers` are lines of the answers file and
    `answer_ids` their tokens."""

    num_read: int
    sequences: Ragged
    learn: Bools
    answers: tuple[str, ...]
    answer_ids: Ragged
    dropped: Mapping[str, int]
    truncated: int


def tokenize_rows(job: TokenizeSettings, batch: RowBatch) -> TokenizedRows:
    """All rows of a batch. Raises MsrlError that names file and row for one that cannot be read."""
    dropped: Counter[str] = Counter()
    offsets, made = _rows(job, batch, dropped)
    num_read = len(made) + dropped.total()
    if job.handler.kind == "pretrain":
        return _texts(job, made, dropped, num_read)
    assert job.renderer is not None
    if job.handler.kind == "prompts":
        prompts = _render(job.renderer.prompts, made, batch, offsets)
        return _prompts(job, made, prompts, dropped, num_read)
    return _examples(job, _render(job.renderer.examples, made, batch, offsets), dropped, num_read)


def _rows(job: TokenizeSettings, batch: RowBatch, dropped: Counter[str]) -> tuple[list[int], list[Any]]:
    """The offsets of the rows that serve and what the handler makes of them; the others are counted."""
    module, kind = job.handler.module, job.handler.kind
    make = module.text if kind == "pretrain" else module.conversation
    offsets: list[int] = []
    kept: list[Any] = []
    for offset, row in batch.values():
        try:
            made = make(row, job.handler.columns, **job.handler.options)
            _check_characters(made)
            kept.append(made if kind == "pretrain" else _shape(made, kind))
            offsets.append(offset)
        except DroppedRow as reason:
            dropped[reason.reason] += 1
        except MsrlError as error:
            raise MsrlError(f"{batch.where(offset)}: {error}") from None
    return offsets, kept


def _check_characters(made: str | Conversation) -> None:
    """That all of it is text: JSON can write half of a character (`\\ud83d` alone), which no tokenizer and no file takes."""
    texts = [made] if isinstance(made, str) else [*(m.content for m in made.messages), made.answer or "", *made.extra.values()]
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:
        code = ascii(error.object[error.start])[1:-1]
        raise MsrlError(f"holds {code}, which is half of a character and no text; take it out, or write both halves") from None


def _render(
    render: Callable[[Sequence[Conversation]], list[T]], conversations: list[Conversation], batch: RowBatch, offsets: list[int]
) -> list[T]:
    """All conversations rendered; when the template cannot show one, the error names its row."""
    try:
        return render(conversations)
    except MsrlError:
        for offset, conversation in zip(offsets, conversations, strict=True):
            try:
                render([conversation])
            except MsrlError as error:
                raise MsrlError(f"{batch.where(offset)}: {error}") from None
        raise


def _shape(conversation: Conversation, kind: str) -> Conversation:
    """A conversation as the kind needs it: a prompt ends before the answer, an example with one. Raises DroppedRow."""
    messages, answer = conversation.messages, conversation.answer
    if kind == "prompts" and messages and messages[-1].role == "assistant":
        answer = without_thought(messages[-1].content) if answer is None else answer
        messages = messages[:-1]
    if kind == "sft" and answer is not None and messages and messages[-1].role != "assistant":
        messages = (*messages, Message("assistant", answer))
    if not any(m.role == "user" and m.content.strip() for m in messages):
        raise DroppedRow("empty_prompt")
    if kind == "sft" and (messages[-1].role != "assistant" or not messages[-1].content.strip()):
        raise DroppedRow("empty_answer")
    if kind == "prompts" and answer is not None and not answer.strip():
        raise DroppedRow("empty_answer")
    return Conversation(messages, answer, conversation.extra)


def _texts(job: TokenizeSettings, texts: Sequence[str], dropped: Counter[str], num_read: int) -> TokenizedRows:
    """Documents, with the tokens that the tokenizer itself puts around a text, and the end of document if asked."""
    kept = [text for text in texts if text.strip()]
    _count(dropped, "empty_text", len(texts) - len(kept))
    end = [] if job.eod_token_id is None else [job.eod_token_id]
    sequences = _ragged([encoding.ids + end for encoding in job.tokenizer.backend.encode_batch_fast(kept)])
    return TokenizedRows(num_read, sequences, np.zeros(0, np.bool_), (), _ragged([]), dropped, 0)


def _examples(job: TokenizeSettings, rendered: Sequence[RenderedExample], dropped: Counter[str], num_read: int) -> TokenizedRows:
    """Examples with their loss masks, none longer than seq_length and each with something to learn."""
    long = [job.seq_length is not None and len(e.token_ids) > job.seq_length for e in rendered]
    if job.truncate:
        kept = [RenderedExample(e.token_ids[: job.seq_length], e.loss_mask[: job.seq_length]) for e in rendered]
    else:
        kept = [e for e, too_long in zip(rendered, long, strict=True) if not too_long]
        _count(dropped, "too_long", sum(long))
    # The first token of a sequence is predicted by nothing.
    learnable = [e for e in kept if e.loss_mask[1:].any()]
    _count(dropped, "nothing_to_learn", len(kept) - len(learnable))
    truncated = sum(long) if job.truncate else 0
    sequences = _ragged([e.token_ids for e in learnable])
    learn = np.concatenate([np.zeros(0, np.bool_), *(e.loss_mask for e in learnable)])
    return TokenizedRows(num_read, sequences, learn, (), _ragged([]), dropped, truncated)


def _prompts(
    job: TokenizeSettings, conversations: Sequence[Conversation], prompts: Sequence[Ints], dropped: Counter[str], num_read: int
) -> TokenizedRows:
    """Prompts with their answers."""
    kept = [(c, ids) for c, ids in zip(conversations, prompts, strict=True) if job.seq_length is None or len(ids) <= job.seq_length]
    _count(dropped, "too_long", len(prompts) - len(kept))
    lines = tuple(json.dumps({"answer": c.answer or "", "extra": dict(c.extra)}, ensure_ascii=False) for c, _ in kept)
    answers = job.tokenizer.backend.encode_batch_fast([c.answer or "" for c, _ in kept], add_special_tokens=False)
    answer_ids = _ragged([encoding.ids for encoding in answers])
    return TokenizedRows(num_read, _ragged([ids for _, ids in kept]), np.zeros(0, np.bool_), lines, answer_ids, dropped, 0)


def _ragged(sequences: Sequence[Sequence[int] | NDArray[Any]]) -> Ragged:
    """Sequences end to end as 32-bit integers."""
    arrays = [np.asarray(sequence, np.int32) for sequence in sequences]
    return Ragged(np.concatenate([np.zeros(0, np.int32), *arrays]), np.array([len(a) for a in arrays], np.int32))


def _count(dropped: Counter[str], reason: str, number: int) -> None:
    """Counts under a reason; reasons that never happened are not listed."""
    if number:
        dropped[reason] += number
