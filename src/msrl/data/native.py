"""Rendering with the tokenizer's own chat template by transformers (template `native`).

The token ids equal the output of `apply_chat_template`. The loss mask comes from the
`{% generation %}` blocks of the template if it has any. Otherwise an answer extends from the end of
the prompt before it to its end-of-turn token, and the rendered answer must contain the text of the
row.

Control tokens in the text of a row are marked before the template renders them, so that they are
encoded as text.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np

from msrl.chat_rendering.client import (
    Chat,
    RenderedChat,
    RenderingError,
    named_template,
    render_chats,
    template_variables,
)
from msrl.data.images.marks import IMAGE, refuse_unread
from msrl.data.spans import encode_with_offsets
from msrl.data.template_date import with_fixed_day, writes_date
from msrl.data.templates.form import Template
from msrl.data.tokenizer import TextTokenizer, load_tokenizer
from msrl.errors import MsrlError
from msrl.limits import printable
from msrl.thoughts import THOUGHT, SplitAnswer, split_thought, split_trained_answer
from msrl.types import Conversation, Ints, Message, RenderedExample

# A noncharacter of Unicode. It divides each control token of a row after its first character.
MARK = "\ufdd0"
_THOUGHT_FIELDS = ("reasoning_content", "thinking")  # of Qwen, GLM and others; of gpt-oss
_Bounds = tuple[int, int]  # first character of an answer, and the one after its last


@dataclass(frozen=True, slots=True)
class _Turns:
    """A conversation for the chat template, with marked control tokens."""

    template: str
    messages: list[dict[str, Any]]
    options: dict[str, Any]
    opens_thought: bool = False  # the generation prompt begins a thought


def shows_date(tokenizer: TextTokenizer) -> bool:
    """Return True if the chat template may write the current date into a text."""
    undated = replace(tokenizer, date=None)
    templates = (_template(undated, has_tools=has_tools) for has_tools in (False, True))
    return any(writes_date(template) for template in templates)


def with_date(
    tokenizer: TextTokenizer, template: Template | None, day: str | None
) -> TextTokenizer:
    """Return the tokenizer with the day that its chat template writes.

    Raises:
        MsrlError: the template writes no current date.
    """
    if day is None:
        return tokenizer
    if template is None or not template.native or not shows_date(tokenizer):
        name = "none" if template is None else template.name
        raise MsrlError(
            f"date={day}: has no effect with template {name} of this tokenizer, which writes no "
            "current date. Remove it."
        )
    return replace(tokenizer, date=day)


def dated_template(tokenizer: TextTokenizer) -> str:
    """Return the chat template that writes the fixed date; empty if there is none.

    Raises:
        MsrlError: the tokenizer has different templates with and without tools.
    """
    if tokenizer.date is None or not shows_date(tokenizer):
        return ""
    template, *others = {_template(tokenizer, has_tools=value) for value in (False, True)}
    if others:
        raise MsrlError(
            f"date={tokenizer.date}: the tokenizer of {tokenizer.folder} has different chat "
            "templates with and without tools, of which data and checkpoints keep one. Use a "
            "packaged template."
        )
    return template


def native_prompts(
    tokenizer: TextTokenizer,
    conversations: Sequence[Conversation],
    enable_thinking: bool | None,
    image_text: str = "",
) -> list[Ints]:
    """Return the token ids [P] of each conversation, including the generation prompt.

    `image_text` are the control tokens of an image, as text.
    """
    prepared = [_prepare(tokenizer, item, enable_thinking, image_text) for item in conversations]
    chats = [
        Chat(turns.template, _variables(tokenizer, turns, len(turns.messages), generation=True))
        for turns in prepared
    ]
    rendered = _render(tokenizer, chats)
    for turns, chat in zip(prepared, rendered, strict=True):
        _check_system(tokenizer, turns, chat.text)
    rows = [chat.text.split(MARK) for chat in rendered]
    return [ids for ids, _ in encode_with_offsets(tokenizer, tokenizer.special_tokens(), rows)]


def native_examples(
    tokenizer: TextTokenizer,
    conversations: Sequence[Conversation],
    enable_thinking: bool | None,
    image_text: str = "",
    *,
    only_last: bool = False,
) -> list[RenderedExample]:
    """Return the token ids and loss mask of each conversation.

    With `only_last`, the loss mask covers the last answer only. It is empty if the template removes
    the thought of that answer, as of every such answer.

    Raises:
        MsrlError: the template does not allow to locate the answers.
    """
    prepared = [_prepare(tokenizer, item, enable_thinking, image_text) for item in conversations]
    for turns, conversation in zip(prepared, conversations, strict=True):
        is_open = turns.opens_thought
        _check_thoughts(turns.template, conversation, opens_thought=is_open)
    chats = [_chat(tokenizer, turns) for turns in prepared]
    rendered = _render(tokenizer, chats)
    answers: list[list[_Bounds]] = []
    for conversation, turns, chat in zip(conversations, prepared, rendered, strict=True):
        text = chat.text
        _check_system(tokenizer, turns, text)
        if _has_blocks(turns.template):
            located = _without_removed_thoughts(turns, text, _join_blocks(chat.blocks))
        else:
            located = _locate_answers(tokenizer, turns, chat)
        located = _without_context_answers(tokenizer, conversation, located)
        chosen = located[-1:] if only_last else located
        bounds = [answer for answer in chosen if answer is not None]
        # The marks are not part of the encoded text.
        answers.append(
            [(a - text.count(MARK, 0, a), b - text.count(MARK, 0, b)) for a, b in bounds]
        )
    rows = [chat.text.split(MARK) for chat in rendered]
    encoded = encode_with_offsets(tokenizer, tokenizer.special_tokens(), rows)
    return [
        RenderedExample(ids, _mask(offsets, bounds))
        for (ids, offsets), bounds in zip(encoded, answers, strict=True)
    ]


def _without_context_answers(
    tokenizer: TextTokenizer, conversation: Conversation, located: list[_Bounds | None]
) -> list[_Bounds | None]:
    """Return the bounds with None for answers that the row excludes from the loss.

    Raises:
        MsrlError: the template has not one generation block for each answer.
    """
    answers = [message for message in conversation.messages if message.role == "assistant"]
    if all(answer.is_trained for answer in answers):
        return located
    if len(answers) != len(located):
        raise MsrlError(
            f"template native: the chat template of {tokenizer.folder} marks {len(located)} "
            f"trained texts for {len(answers)} answers, so that the answers that the row excludes "
            "cannot be found. Use the packaged template of the model's family."
        )
    return [
        bounds if answer.is_trained else None
        for answer, bounds in zip(answers, located, strict=True)
    ]


def _mask(offsets: Ints, bounds: Sequence[_Bounds]) -> np.ndarray[Any, Any]:
    """Return a mask of the tokens that contain a character of an answer.

    Args:
        offsets: first and last character of each token, [T, 2].
        bounds: first and last character of each answer.
    """
    mask = np.zeros(len(offsets), np.bool_)
    for start, end in bounds:
        mask |= (offsets[:, 0] < end) & (offsets[:, 1] > start)
    return mask


def _has_blocks(template: str) -> bool:
    """Return True if a template marks answers with generation blocks."""
    return re.search(r"\{%-?\s*generation\b", template) is not None


def _chat(tokenizer: TextTokenizer, turns: _Turns) -> Chat:
    """Return a conversation to render, with the prompts that locate its answers."""
    variables = _variables(tokenizer, turns, len(turns.messages), generation=False)
    prompts: list[list[dict[str, Any]]] = []
    if not _has_blocks(turns.template):
        roles = [message["role"] for message in turns.messages]
        numbers = [number for number, role in enumerate(roles) if role == "assistant"]
        prompts = [_prompts(tokenizer, turns, number) for number in numbers]
    return Chat(turns.template, variables, prompts)


def _prompts(tokenizer: TextTokenizer, turns: _Turns, number: int) -> list[dict[str, Any]]:
    """Return the variables of the prompt of turn `number`.

    Templates may render earlier answers as for another thinking mode.
    """
    modes: list[dict[str, Any]] = [turns.options]
    if "enable_thinking" in turns.options:
        unset = {k: v for k, v in turns.options.items() if k != "enable_thinking"}
        modes += [unset, {**unset, "enable_thinking": True}]
    variants = (replace(turns, options=options) for options in modes)
    return [_variables(tokenizer, variant, number, generation=True) for variant in variants]


def _join_blocks(blocks: Sequence[_Bounds]) -> list[_Bounds]:
    """Return blocks of which those without text between them, a thought and its answer, are one."""
    joined: list[_Bounds] = []
    for start, end in blocks:
        first = joined.pop()[0] if joined and joined[-1][1] == start else start
        joined.append((first, end))
    return joined


def _without_removed_thoughts(
    turns: _Turns, text: str, blocks: Sequence[_Bounds]
) -> list[_Bounds | None]:
    """Return the blocks of a conversation; None for answers that lost their thoughts."""
    answers = [message for message in turns.messages if message["role"] == "assistant"]
    if len(answers) != len(blocks):
        return [*blocks]
    bounds: list[_Bounds | None] = []
    for message, (start, end) in zip(answers, blocks, strict=True):
        thought, _ = _thought_and_content(message, opens_thought=turns.opens_thought)
        bounds.append((start, end) if thought in text[start:end] else None)
    return bounds


def _locate_answers(
    tokenizer: TextTokenizer, turns: _Turns, chat: RenderedChat
) -> list[_Bounds | None]:
    """Return the bounds of every answer; None for answers that are not trained.

    An answer whose thought the template removes is not trained: the model would learn to answer
    without the thought.
    """
    text, bounds, position = chat.text, list[_Bounds | None](), 0
    answers = [item for item in enumerate(turns.messages) if item[1]["role"] == "assistant"]
    for (number, message), start in itertools.zip_longest(answers, chat.starts):
        if start is None or start < position:
            raise MsrlError(
                f"template native: the chat template of {tokenizer.folder} changes the text before "
                f"turn {number + 1} when later turns follow. "
                "Use the packaged template of the model's family (qwen, qwen3, llama3, ...)."
            )
        position = _find_answer_end(text, start, tokenizer.eos_token)
        thought, content = _thought_and_content(message, opens_thought=turns.opens_thought)
        _check_answer(tokenizer, text[start:position], content, number)
        bounds.append((start, position) if thought in text[start:position] else None)
    return bounds


def _find_answer_end(text: str, start: int, eos: str | None) -> int:
    """Return the end of the answer that begins at `start`.

    It is the position after the end-of-turn token. The end-of-turn token is the tokenizer's
    end-of-text token.
    """
    position = text.find(eos, start) if eos else -1
    if eos is None or position < 0:
        raise MsrlError(
            "template native: the answers do not end with the tokenizer's end-of-text token. "
            "Use a packaged template."
        )
    return position + len(eos)


def _thought_and_content(message: Mapping[str, Any], *, opens_thought: bool) -> tuple[str, str]:
    """Return the thought and the answer of a turn, without the white space around them."""
    content = str(message.get("content") or "")
    thoughts = [str(message[key]) for key in _THOUGHT_FIELDS if message.get(key) is not None]
    if thoughts:
        return thoughts[0].strip(), content.strip()
    split = _split_content(content, opens_thought=opens_thought)
    return (split.thought or "").strip(), split.text.strip()


def _split_content(content: str, *, opens_thought: bool) -> SplitAnswer:
    """Return the terminated thought of a content, and the text after it."""
    split = split_thought(content, is_open=opens_thought and THOUGHT[1] in content)
    return split if split.is_terminated else SplitAnswer(None, content)


def _check_thoughts(template: str, conversation: Conversation, *, opens_thought: bool) -> None:
    """Raise MsrlError if a trained answer has a thought without beginning, end or answer.

    A template without thoughts shows them as text.
    """
    if THOUGHT[1] not in template and _thought_field(template) is None:
        return
    for message in conversation.messages:
        if message.role == "assistant":
            is_open = opens_thought and THOUGHT[1] in message.content
            split_trained_answer(message.content, is_open=is_open)


def _check_system(tokenizer: TextTokenizer, turns: _Turns, text: str) -> None:
    """Raise MsrlError if a template does not show the system text. It may change its spaces."""
    first = turns.messages[0] if turns.messages else {}
    system = first.get("content") if first.get("role") == "system" else None
    if isinstance(system, str) and "".join(system.split()) not in "".join(text.split()):
        raise MsrlError(
            f"template native: the chat template of {tokenizer.folder} does not show the system "
            "text of this row. Use a packaged template, or --ignore the column of the system text."
        )


def _check_answer(tokenizer: TextTokenizer, answer: str, content: str, number: int) -> None:
    """Raise MsrlError if a located answer is not the row's answer."""
    if content not in answer:
        raise MsrlError(
            f"template native: the chat template of {tokenizer.folder} does not render the text of "
            f"turn {number + 1} as an answer. Use a packaged template."
        )


def _prepare(
    tokenizer: TextTokenizer,
    conversation: Conversation,
    enable_thinking: bool | None,
    image_text: str,
) -> _Turns:
    """Return a conversation in the form of the chat template, with marked control tokens.

    A content with images is a text with their control tokens. The templates of vision-language
    models write the same for a list of parts.
    """
    refuse_unread(conversation)
    template = _template(tokenizer, has_tools=bool(conversation.extra.get("tools")))
    is_open = _opens_thought(tokenizer.folder, tokenizer.date, enable_thinking)
    messages = [
        turn_fields(message, template, opens_thought=is_open) for message in conversation.messages
    ]
    options: dict[str, Any] = {}
    if tools := conversation.extra.get("tools"):
        if not re.search(r"\btools\b", template):
            raise MsrlError(
                f"template native: the chat template of {tokenizer.folder} cannot show the tools "
                "of this row. Use a packaged template with tools (qwen, qwen3), or --ignore tools."
            )
        options["tools"] = json.loads(tools)
    has_calls = any("tool_calls" in (message.fields or {}) for message in conversation.messages)
    if has_calls and "tool_calls" not in template:
        raise MsrlError(
            f"template native: the chat template of {tokenizer.folder} does not show the tool "
            "calls of this row. Use a packaged template with tools (qwen, qwen3), or write the "
            "calls into the content as the model writes them."
        )
    if enable_thinking is not None:
        options["enable_thinking"] = enable_thinking
    pattern = control_pattern(tokenizer.special_tokens())
    marked = [mark_controls(message, pattern) for message in messages]
    if conversation.images:
        for turn in marked:
            if turn["role"] == "user":
                turn["content"] = turn["content"].replace(IMAGE, image_text)
    return _Turns(template, marked, mark_controls(options, pattern), is_open)


@lru_cache(maxsize=8)
def _opens_thought(folder: str, day: str | None, enable_thinking: bool | None) -> bool:
    """Return True if the generation prompt of a chat template begins a thought."""
    hf, options = _hf(folder, day), {}
    if enable_thinking is not None:
        options["enable_thinking"] = enable_thinking
    template = named_template(hf.chat_template, has_tools=False)
    question = [{"role": "user", "content": "q"}]
    variables = template_variables(hf, question, options, generation=True)
    try:
        text = render_chats([Chat(template or "", variables)])[0].text
    except RenderingError:  # rendering the rows reports what is wrong with the template
        return False
    return text.rstrip().endswith(THOUGHT[0])


def turn_fields(message: Message, template: str, *, opens_thought: bool = False) -> dict[str, Any]:
    """Return a turn with the fields that the template shows. Other fields are in the content.

    A thought is passed in the field that the template reads, because templates differ in how they
    split a content.
    """
    plain = {"role": message.role, "content": message.content}
    fields = dict(message.fields or plain)
    if message.role != "assistant":
        return fields
    if "tool_calls" in fields and "tool_calls" not in template:
        fields = plain
    key, thought = _thought_field(template), fields.pop("reasoning_content", None)
    content = str(fields.get("content") or "")
    if key is None:
        if thought is not None:
            fields["content"] = f"{THOUGHT[0]}\n{thought}\n{THOUGHT[1]}\n\n{content}"
        return fields
    if thought is None:
        thought, content = _split_content(content, opens_thought=opens_thought)[:2]
    if thought is not None:
        return {**fields, "content": content.lstrip("\n"), key: thought.strip("\n")}
    # An empty field keeps Qwen's and GLM's templates from splitting the content at a stray tag.
    is_split = key == "reasoning_content" and THOUGHT[1] in content
    return {**fields, key: ""} if is_split else fields


def _thought_field(template: str) -> str | None:
    """Return the field of a message in which a chat template reads the thought, or None."""
    forms = ((key, rf"\.{key}\b|\[['\"]{key}['\"]\]") for key in _THOUGHT_FIELDS)
    return next((key for key, form in forms if re.search(form, template)), None)


def mark_controls(value: Any, marker: re.Pattern[str] | None) -> Any:
    """Return a value with a mark in every control token of its texts."""
    if marker is None:
        return value
    if isinstance(value, str):
        return marker.sub(rf"\g<1>{MARK}", value)
    if isinstance(value, list):
        return [mark_controls(item, marker) for item in value]
    if isinstance(value, dict):
        return {mark_controls(k, marker): mark_controls(v, marker) for k, v in value.items()}
    return value


@lru_cache(maxsize=4)
def control_pattern(tokens: tuple[str, ...]) -> re.Pattern[str] | None:
    """Return the pattern of the control tokens, or None if there are none.

    It matches the first character of a token.
    """
    longest_first = sorted((t for t in tokens if len(t) > 1), key=len, reverse=True)
    forms = "|".join(re.escape(token) for token in longest_first)
    return re.compile(f"(?={forms})(.)", re.DOTALL) if forms else None


def _variables(
    tokenizer: TextTokenizer, turns: _Turns, num_turns: int, *, generation: bool
) -> dict[str, Any]:
    """Return the variables of the chat template for the first `num_turns` turns."""
    hf, messages = _hf(tokenizer.folder, tokenizer.date), turns.messages[:num_turns]
    return template_variables(hf, messages, turns.options, generation=generation)


def _render(tokenizer: TextTokenizer, chats: Sequence[Chat]) -> list[RenderedChat]:
    """Return the texts of conversations.

    Raises:
        MsrlError: the chat template raises an error, takes too long or writes too much.
    """
    try:
        return render_chats(chats)
    except RenderingError as error:
        raise MsrlError(
            f"template native: the chat template of {tokenizer.folder} fails for this "
            f"conversation: {printable(str(error))}. Use a packaged template."
        ) from error


def _template(tokenizer: TextTokenizer, *, has_tools: bool) -> str:
    """Return the source of the chat template.

    Raises:
        MsrlError: The tokenizer has none, or named ones without a default.
    """
    templates: Any = getattr(_hf(tokenizer.folder, tokenizer.date), "chat_template", None)
    template = named_template(templates, has_tools=has_tools)
    if template is None:
        raise MsrlError(
            f"template native: the tokenizer of {tokenizer.folder} has the chat templates "
            f"{', '.join(sorted(templates))}, but none with the name default. Use a packaged "
            "template."
        )
    return template


@lru_cache(maxsize=2)
def _hf(folder: str, day: str | None) -> Any:
    """Return the Hugging Face tokenizer, cached, whose chat template writes a day.

    Raises:
        MsrlError: it has no chat template, or one whose date cannot be fixed.
    """
    tokenizer: Any = load_tokenizer(folder)
    template = getattr(tokenizer, "chat_template", None)
    if not template:
        raise _no_chat_template(folder)
    if day is not None and isinstance(template, dict):
        named = cast("dict[str, str]", template)
        tokenizer.chat_template = {
            name: with_fixed_day(source, day) for name, source in named.items()
        }
    elif day is not None:
        tokenizer.chat_template = with_fixed_day(template, day)
    return tokenizer


def _no_chat_template(folder: str) -> MsrlError:
    return MsrlError(
        f"template native: the tokenizer of {folder} has no chat template. Use a packaged template "
        "(preprocess.template)."
    )
