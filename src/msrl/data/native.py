"""The tokenizer's own chat template, rendered by transformers (template `native`).

What is learnt comes from the template's `{% generation %}` blocks where it has them. Otherwise an answer begins where the prompt before it
ends and goes on to its end-of-turn token; a template whose rendering of the beginning is not the beginning of its rendering is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from msrl.data.tokenizer import TextTokenizer, load_tokenizer
from msrl.errors import MsrlError
from msrl.types import Conversation, Ints, Message, RenderedExample


def native_prompts(tokenizer: TextTokenizer, conversations: Sequence[Conversation], enable_thinking: bool | None) -> list[Ints]:
    """Each conversation's token ids [P], generation prompt included."""
    texts = [_render(tokenizer, c, len(c.messages), enable_thinking, generation=True) for c in conversations]
    return [np.array(e.ids, np.int64) for e in tokenizer.backend.encode_batch_fast(texts, add_special_tokens=False)]


def native_examples(tokenizer: TextTokenizer, conversations: Sequence[Conversation], enable_thinking: bool | None) -> list[RenderedExample]:
    """Each conversation's token ids and loss mask. Raises MsrlError for a template whose answers cannot be told apart."""
    if "{% generation" in _template(tokenizer) or "{%- generation" in _template(tokenizer):
        return [_marked(tokenizer, c, enable_thinking) for c in conversations]
    return [_by_prefixes(tokenizer, c, enable_thinking) for c in conversations]


def _marked(tokenizer: TextTokenizer, conversation: Conversation, enable_thinking: bool | None) -> RenderedExample:
    """By the template's own generation blocks."""
    hf = _hf(tokenizer.folder)
    out: Any = hf.apply_chat_template(
        _turns(conversation, len(conversation.messages)),
        **_options(conversation, enable_thinking),
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return RenderedExample(np.array(out["input_ids"], np.int64), np.array(out["assistant_masks"], np.bool_))


def _by_prefixes(tokenizer: TextTokenizer, conversation: Conversation, enable_thinking: bool | None) -> RenderedExample:
    """By rendering the conversation up to each answer."""
    text = _render(tokenizer, conversation, len(conversation.messages), enable_thinking, generation=False)
    cuts = [0]
    for number, message in enumerate(conversation.messages):
        if message.role == "assistant":
            _refuse_end_inside(tokenizer, number, message)
            prompt = _render(tokenizer, conversation, number, enable_thinking, generation=True)
            if not text.startswith(prompt) or len(prompt) < cuts[-1]:
                hint = "use the packaged template of its family (qwen, qwen3, llama3, ...)"
                raise MsrlError(
                    f"template native: the chat template of {tokenizer.folder} does not keep turn {number + 1} in place; {hint}"
                )
            cuts += [len(prompt), _end_of_answer(text, len(prompt), tokenizer.eos_token)]
    stretches = [text[a:b] for a, b in zip(cuts, [*cuts[1:], len(text)], strict=True)]
    ids = [e.ids for e in tokenizer.backend.encode_batch_fast(stretches, add_special_tokens=False)]
    mask = np.repeat(np.arange(len(ids)) % 2 == 1, [len(i) for i in ids])
    return RenderedExample(np.array([number for i in ids for number in i], np.int64), mask)


def _refuse_end_inside(tokenizer: TextTokenizer, number: int, message: Message) -> None:
    """An answer that itself holds its end cannot be told from a shorter one."""
    if tokenizer.eos_token and tokenizer.eos_token in message.content:
        hint = "take it out, or use a packaged template, where it stays text"
        raise MsrlError(f"template native: turn {number + 1} holds {tokenizer.eos_token}, which ends an answer; {hint}")


def _end_of_answer(text: str, start: int, eos: str | None) -> int:
    """Where the answer that begins at `start` ends: after its end-of-turn token, which is the tokenizer's end-of-text token."""
    found = text.find(eos, start) if eos else -1
    if eos is None or found < 0:
        raise MsrlError("template native: the answers do not end with the tokenizer's end-of-text token; use a packaged template")
    return found + len(eos)


def _render(tokenizer: TextTokenizer, conversation: Conversation, num_turns: int, enable_thinking: bool | None, *, generation: bool) -> str:
    """The first turns as text. Raises MsrlError when the template refuses them."""
    from jinja2 import TemplateError

    try:
        return _hf(tokenizer.folder).apply_chat_template(
            _turns(conversation, num_turns), **_options(conversation, enable_thinking), tokenize=False, add_generation_prompt=generation
        )
    except TemplateError as error:
        raise MsrlError(f"template native: the chat template of {tokenizer.folder} refuses this conversation: {error}") from error


def _turns(conversation: Conversation, num_turns: int) -> list[dict[str, str]]:
    return [{"role": m.role, "content": m.content} for m in conversation.messages[:num_turns]]


def _options(conversation: Conversation, enable_thinking: bool | None) -> dict[str, Any]:
    """Tools and the thinking switch, where they are given."""
    tools = conversation.extra.get("tools")
    thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
    return {**({"tools": json.loads(tools)} if tools else {}), **thinking}


def _template(tokenizer: TextTokenizer) -> str:
    """The chat template's source. Raises MsrlError when the tokenizer has none."""
    template = getattr(_hf(tokenizer.folder), "chat_template", None)
    if not isinstance(template, str):
        raise MsrlError(f"template native: the tokenizer of {tokenizer.folder} has no chat template of its own; choose a packaged one")
    return template


@lru_cache(maxsize=2)
def _hf(folder: str) -> Any:
    """The Hugging Face tokenizer, with a chat template. It is loaded once per process."""
    tokenizer = load_tokenizer(folder)
    if not getattr(tokenizer, "chat_template", None):
        raise MsrlError(f"template native: the tokenizer of {folder} has no chat template of its own; choose a packaged one")
    return tokenizer
