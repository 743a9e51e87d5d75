"""Rendering with the tokenizer's own chat template by transformers (template `native`).

The loss mask comes from the `{% generation %}` blocks of the template if it has any. Otherwise an
answer extends from the end of the prompt before it to its end-of-turn token. This requires that the
rendered beginning of a conversation is a prefix of the rendered conversation; other templates raise
an error.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Generator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from msrl.data.tokenizer import TextTokenizer, load_tokenizer
from msrl.errors import MsrlError
from msrl.limits import printable, time_limit
from msrl.types import Conversation, Ints, Message, RenderedExample

_TIME_LIMIT_S = 10.0  # for one conversation, which takes milliseconds
_MAX_CHARACTERS = 50_000_000


def native_prompts(
    tokenizer: TextTokenizer, conversations: Sequence[Conversation], enable_thinking: bool | None
) -> list[Ints]:
    """Return the token ids [P] of each conversation, including the generation prompt."""
    texts = [
        _render(tokenizer, c, len(c.messages), enable_thinking, generation=True)
        for c in conversations
    ]
    encodings = tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)
    return [np.array(encoding.ids, np.int64) for encoding in encodings]


def native_examples(
    tokenizer: TextTokenizer, conversations: Sequence[Conversation], enable_thinking: bool | None
) -> list[RenderedExample]:
    """Return the token ids and loss mask of each conversation.

    Raises:
        MsrlError: the template does not allow to locate the answers.
    """
    template = _template(tokenizer)
    if "{% generation" in template or "{%- generation" in template:
        return [_mask_by_blocks(tokenizer, c, enable_thinking) for c in conversations]
    return [_mask_by_prefixes(tokenizer, c, enable_thinking) for c in conversations]


def _mask_by_blocks(
    tokenizer: TextTokenizer, conversation: Conversation, enable_thinking: bool | None
) -> RenderedExample:
    """Return an example whose loss mask comes from the template's generation blocks."""
    hf = _hf(tokenizer.folder)
    with _guarded(tokenizer.folder):
        out: Any = hf.apply_chat_template(
            _turns(conversation, len(conversation.messages)),
            **_options(conversation, enable_thinking),
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
    return RenderedExample(
        np.array(out["input_ids"], np.int64), np.array(out["assistant_masks"], np.bool_)
    )


def _mask_by_prefixes(
    tokenizer: TextTokenizer, conversation: Conversation, enable_thinking: bool | None
) -> RenderedExample:
    """Return an example whose answers are located by rendering up to each answer."""
    spans = _split_at_answers(tokenizer, conversation, enable_thinking)
    ids: list[int] = []
    mask: list[bool] = []
    # Answers and the text between them are encoded separately: the spans have odd and even indices.
    encodings = tokenizer.backend.encode_batch_fast(spans, add_special_tokens=False)
    for index, encoding in enumerate(encodings):
        ids += encoding.ids
        mask += [index % 2 == 1] * len(encoding.ids)
    return RenderedExample(np.array(ids, np.int64), np.array(mask, np.bool_))


def _split_at_answers(
    tokenizer: TextTokenizer, conversation: Conversation, enable_thinking: bool | None
) -> list[str]:
    """Return the rendered text in spans: text, answer, text, answer, ..., text."""
    text = _render(
        tokenizer, conversation, len(conversation.messages), enable_thinking, generation=False
    )
    bounds = [0]
    for number, message in enumerate(conversation.messages):
        if message.role != "assistant":
            continue
        _refuse_eos_in_answer(tokenizer, number, message)
        prompt = _render(tokenizer, conversation, number, enable_thinking, generation=True)
        if not text.startswith(prompt) or len(prompt) < bounds[-1]:
            raise MsrlError(
                f"template native: the chat template of {tokenizer.folder} changes the text before "
                f"turn {number + 1} when later turns follow. "
                "Use the packaged template of the model's family (qwen, qwen3, llama3, ...)."
            )
        bounds += [len(prompt), _find_answer_end(text, len(prompt), tokenizer.eos_token)]
    return [text[start:end] for start, end in pairwise([*bounds, len(text)])]


def _refuse_eos_in_answer(tokenizer: TextTokenizer, number: int, message: Message) -> None:
    """Raise MsrlError if an answer contains the token that ends it."""
    if tokenizer.eos_token and tokenizer.eos_token in message.content:
        raise MsrlError(
            f"template native: turn {number + 1} contains {tokenizer.eos_token}, which ends an "
            "answer. Remove it, or use a packaged template, where it remains plain text."
        )


def _find_answer_end(text: str, start: int, eos: str | None) -> int:
    """Return the end of the answer that begins at `start`: the position after its end-of-turn
    token.

    The end-of-turn token is the tokenizer's end-of-text token.
    """
    position = text.find(eos, start) if eos else -1
    if eos is None or position < 0:
        raise MsrlError(
            "template native: the answers do not end with the tokenizer's end-of-text token. "
            "Use a packaged template."
        )
    return position + len(eos)


def _render(
    tokenizer: TextTokenizer,
    conversation: Conversation,
    num_turns: int,
    enable_thinking: bool | None,
    *,
    generation: bool,
) -> str:
    """Return the first `num_turns` turns as text.

    Raises:
        MsrlError: the chat template raises an error, takes too long or writes too much.
    """
    hf = _hf(tokenizer.folder)
    with _guarded(tokenizer.folder):
        text: str = hf.apply_chat_template(
            _turns(conversation, num_turns),
            **_options(conversation, enable_thinking),
            tokenize=False,
            add_generation_prompt=generation,
        )
    if len(text) > _MAX_CHARACTERS:
        raise MsrlError(
            f"template native: the chat template of {tokenizer.folder} writes {len(text):,} "
            f"characters for one conversation (limit: {_MAX_CHARACTERS:,}). Use a packaged "
            "template."
        )
    return text


@contextlib.contextmanager
def _guarded(folder: str) -> Generator[None, None, None]:
    """Limit the time of a chat template, and report its errors as MsrlError.

    A template is code of the model's author: it may fail in any way.
    """
    try:
        with time_limit(_TIME_LIMIT_S):
            yield
    except MsrlError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise MsrlError(
            f"template native: the chat template of {folder} fails for this conversation: "
            f"{printable(reason)}. Use a packaged template."
        ) from error


def _turns(conversation: Conversation, num_turns: int) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in conversation.messages[:num_turns]]


def _options(conversation: Conversation, enable_thinking: bool | None) -> dict[str, Any]:
    """Return the template's arguments: tools and `enable_thinking`, as far as they are set."""
    options: dict[str, Any] = {}
    if tools := conversation.extra.get("tools"):
        options["tools"] = json.loads(tools)
    if enable_thinking is not None:
        options["enable_thinking"] = enable_thinking
    return options


def _template(tokenizer: TextTokenizer) -> str:
    """Return the source of the chat template. Raises MsrlError if the tokenizer has none."""
    template = getattr(_hf(tokenizer.folder), "chat_template", None)
    if not isinstance(template, str):
        raise _no_chat_template(tokenizer.folder)
    return template


@lru_cache(maxsize=2)
def _hf(folder: str) -> Any:
    """Return the Hugging Face tokenizer, cached. Raises MsrlError without a chat template."""
    tokenizer = load_tokenizer(folder)
    if not getattr(tokenizer, "chat_template", None):
        raise _no_chat_template(folder)
    return tokenizer


def _no_chat_template(folder: str) -> MsrlError:
    return MsrlError(
        f"template native: the tokenizer of {folder} has no chat template. Use a packaged template."
    )
