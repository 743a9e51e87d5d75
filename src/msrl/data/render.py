"""Rendering of conversations as token ids with a template and a tokenizer.

`msrl.data.spans` tokenizes the rendered text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from msrl.data.images.marks import IMAGE, refuse_unread
from msrl.data.native import native_examples, native_prompts
from msrl.data.preferences import last_answer_only
from msrl.data.spans import Span, encode
from msrl.data.templates.form import Template
from msrl.data.tokenizer import TextTokenizer
from msrl.errors import MsrlError
from msrl.thoughts import THOUGHT, SplitAnswer, split_thought, split_trained_answer
from msrl.types import Conversation, Ints, Message, RenderedExample


@dataclass(frozen=True)
class Renderer:
    """A template with a tokenizer.

    `enable_thinking` has the meaning of Qwen3's and is only for templates with thoughts: with None
    and True the model writes its thought, with False it gets an empty one. `image_text` are the
    control tokens of one image as text, with one image token (`data/images/load.py` repeats it).
    """

    template: Template
    tokenizer: TextTokenizer
    enable_thinking: bool | None
    eos_token_id: int | None
    stop_token_ids: tuple[int, ...]
    image_text: str = ""

    def examples(self, conversations: Sequence[Conversation]) -> list[RenderedExample]:
        """Return the token ids and loss mask of each conversation.

        The loss mask covers every answer including its end-of-turn token, without those that the
        row excludes.
        """
        if self.template.native:
            return native_examples(
                self.tokenizer, conversations, self.enable_thinking, self.image_text
            )
        return self._encode([self.spans(c) for c in conversations])

    def last_answers(self, conversations: Sequence[Conversation]) -> list[RenderedExample]:
        """Return `examples` with loss masks that cover the last answer only.

        A mask is empty if the template does not train that answer.
        """
        if self.template.native:
            return native_examples(
                self.tokenizer,
                conversations,
                self.enable_thinking,
                self.image_text,
                only_last=True,
            )
        return [last_answer_only(example) for example in self.examples(conversations)]

    def has_thought(self, answer: str) -> bool:
        """Return True if an answer contains a thought that the template renders."""
        if self.template.thought_start:
            tags = _thought_tags(self.template, answer)
            return bool((split_thought(answer, tags).thought or "").strip("\n"))
        return self.template.native and split_thought(answer).thought is not None

    def prompts(self, conversations: Sequence[Conversation]) -> list[Ints]:
        """Return the token ids [P] of each conversation, including the generation prompt.

        The last turn of a conversation is a question or a tool response.
        """
        if self.template.native:
            return native_prompts(
                self.tokenizer, conversations, self.enable_thinking, self.image_text
            )
        rows = [[*self.spans(c, is_prompt=True), *self.generation_prompt()] for c in conversations]
        return [example.token_ids for example in self._encode(rows)]

    def prompt(self, conversation: Conversation) -> Ints:
        """Return the token ids [P] of one conversation, including the generation prompt."""
        return self.prompts([conversation])[0]

    def spans(self, conversation: Conversation, *, is_prompt: bool = False) -> list[Span]:
        """Return the text of a conversation in spans, without the generation prompt.

        With `is_prompt`, the model answers next: answers before the last question lose their
        thoughts, as at inference. Otherwise all answers are trained and keep them.
        """
        template = self.template
        refuse_unread(conversation)
        system, turns = _split_system(template, conversation)
        spans = [Span(template.prefix), *([] if template.system_in_user else system)]
        questions = [number for number, turn in enumerate(turns) if turn.role == "user"]
        last_question = questions[-1] if questions else -1
        for number, turn in enumerate(turns):
            if template.separator and number and _starts_round(turns, number):
                spans.append(Span(template.separator))
            if turn.role == "assistant":
                keeps_thought = not is_prompt or number > last_question
                answer = self._answer(turn.content, is_prompt, keeps_thought=keeps_thought)
                spans += answer if turn.is_trained else _context_spans(answer)
            elif turn.role == "tool":
                spans += _tool(template, turns, number)
            else:
                is_first = bool(questions) and number == questions[0]
                before = system if template.system_in_user and is_first else []
                form = template.user.replace("{{idx}}", str(number // 2))
                spans += _fill(form, turn.content, before)
        if template.end and turns and turns[-1].role == "assistant":
            spans.append(Span(template.end, is_trained=True, is_masked=not turns[-1].is_trained))
        if conversation.images:
            spans = [part for span in spans for part in self._with_images(span)]
        return [self._with_names(span) for span in spans if span.text]

    def _with_images(self, span: Span) -> list[Span]:
        """Return a text of the row with control tokens in place of the marks of its images."""
        if not span.is_quoted or IMAGE not in span.text:
            return [span]
        first, *others = span.text.split(IMAGE)
        image = span._replace(text=self.image_text, is_quoted=False)
        pieces = [piece for text in others for piece in (image, span._replace(text=text))]
        return [span._replace(text=first), *pieces]

    def _with_names(self, span: Span) -> Span:
        if span.is_quoted or "{{" not in span.text:
            return span
        return span._replace(text=self.with_token_names(span.text))

    def _answer(self, content: str, is_prompt: bool, *, keeps_thought: bool) -> list[Span]:
        """Return the spans of an answer.

        In training, an answer without a thought gets an empty one, as with ReasoningTemplate of
        MindSpeed-LLM and LLaMA-Factory: it is trained only if thinking is enabled explicitly.
        """
        template = self.template
        prompt = [Span(template.assistant_start)]
        before: list[Span] = []
        if opens_thought(template):
            content = _continued_thought(content, is_trained=not is_prompt)
        elif template.thought_start:
            start, end = Span(template.thought_start), Span(template.thought_end)
            thought, content = _split_answer(template, content, is_trained=not is_prompt)
            if self.enable_thinking is not False and keeps_thought and thought:
                before = [start, Span(thought.strip("\n"), is_quoted=True), end]
            elif not is_prompt:
                is_trained = bool(self.enable_thinking)
                prompt += [Span(span.text, is_trained) for span in (start, end)]
            if before or not is_prompt:
                content = content.lstrip("\n")
        filled = _fill(template.assistant, content, before)
        answer = [span._replace(is_trained=True) for span in filled]
        return [*prompt, *answer, Span(template.after_assistant)]

    def generation_prompt(self) -> list[Span]:
        """Return the spans that end a prompt and start the model's answer."""
        text = self.template.assistant_start
        if self.enable_thinking is False:
            text += self.template.thought_start + self.template.thought_end
        return [Span(self.with_token_names(text))]

    def _encode(self, rows: Sequence[Sequence[Span]]) -> list[RenderedExample]:
        """Return the token ids and loss mask of each row of spans.

        Raises:
            MsrlError: the template refuses control tokens in the text of a row, and there are some.
        """
        if self.template.control_tokens == "keep":
            return encode(self.tokenizer, (), rows)
        if self.template.control_tokens == "refuse":
            for row in rows:
                _refuse_controls(self, row)
        return encode(self.tokenizer, self.controls, rows)

    @cached_property
    def controls(self) -> tuple[str, ...]:
        """The control tokens of the template and of the tokenizer.

        In the text of a row they are plain text.
        """
        texts, eos = _texts(self.template), _eos(self.template, self.tokenizer)
        names = (("{{bos}}", self.tokenizer.bos_token), ("{{eos}}", eos))
        used = [token for name, token in names if name in texts and token]
        return tuple(
            dict.fromkeys((*self.template.special, *used, *self.tokenizer.special_tokens()))
        )

    def with_token_names(self, text: str) -> str:
        """Replace `{{bos}}` and `{{eos}}` in a text of the template with the tokenizer's tokens."""
        eos = _eos(self.template, self.tokenizer)
        text = text.replace("{{bos}}", self.tokenizer.bos_token or "")
        return text.replace("{{eos}}", eos or "")


def make_renderer(
    template: Template,
    tokenizer: TextTokenizer,
    *,
    enable_thinking: bool | None = None,
    image_text: str = "",
) -> Renderer:
    """Return a renderer for a template and a tokenizer.

    Raises:
        MsrlError: the tokenizer does not have a token that the template needs as a single token, or
            `enable_thinking` is set for a template without thoughts.
    """
    if enable_thinking is not None and not (template.thought_start or template.native):
        raise MsrlError(
            f"enable_thinking={enable_thinking}: template {template.name} has no thoughts. "
            "Do not set it, or use qwen3."
        )
    for token in dict.fromkeys((*template.special, *template.stop)):
        _require(template, tokenizer, token)
    eos = _eos(template, tokenizer)
    _require_named(template, tokenizer, eos)
    tokens = [token for token in (*template.stop, eos, tokenizer.eos_token) if token is not None]
    ids = [tokenizer.token_id(token) for token in tokens]
    stop = tuple(dict.fromkeys(number for number in ids if number is not None))
    eos_id = None if eos is None else tokenizer.token_id(eos)
    return Renderer(template, tokenizer, enable_thinking, eos_id, stop, image_text)


def with_system(conversation: Conversation, system: str | None) -> Conversation:
    """Return the conversation with a system text, unless it already has one."""
    messages = conversation.messages
    if system is None or (messages and messages[0].role == "system"):
        return conversation
    messages = (Message("system", system), *messages)
    return replace(conversation, messages=messages)


def _texts(template: Template) -> str:
    """Return all texts of a template that can contain `{{bos}}` and `{{eos}}`."""
    return " ".join(
        (
            template.prefix,
            template.system,
            template.user,
            template.assistant,
            template.after_assistant,
            template.end,
        )
    )


def _require(template: Template, tokenizer: TextTokenizer, token: str) -> None:
    """Raise MsrlError if the tokenizer does not encode a control token as a single token."""
    number = tokenizer.token_id(token)
    ids = list(tokenizer.backend.encode(token, add_special_tokens=False).ids)
    if number is None or ids != [number]:
        raise MsrlError(
            f"template {template.name}: needs the token {token!r}, which the tokenizer of "
            f"{tokenizer.folder} does not have. Use the template of the model's family, or default."
        )


def _require_named(template: Template, tokenizer: TextTokenizer, eos: str | None) -> None:
    """Raise MsrlError if the template uses `{{bos}}` or `{{eos}}` and the tokenizer has none."""
    texts = _texts(template)
    if "{{bos}}" in texts and tokenizer.bos_token is None:
        raise MsrlError(
            f"template {template.name}: uses the beginning-of-text token, but the tokenizer of "
            f"{tokenizer.folder} has none"
        )
    if "{{eos}}" in texts and eos is None:
        raise MsrlError(
            f"template {template.name}: ends answers with the end-of-text token, but the tokenizer "
            f"of {tokenizer.folder} has none"
        )


def _eos(template: Template, tokenizer: TextTokenizer) -> str | None:
    """Return the token that replaces `{{eos}}`."""
    return template.stop[0] if template.replace_eos else tokenizer.eos_token


def _split_system(
    template: Template, conversation: Conversation
) -> tuple[list[Span], tuple[Message, ...]]:
    """Return the spans of the system text, including tools, and the other turns."""
    turns = conversation.messages
    text = template.default_system
    if turns and turns[0].role == "system":
        text, turns = turns[0].content, turns[1:]
    if tools := conversation.extra.get("tools"):
        text = _with_tools(template, text, tools)
    return (_fill(template.system, text) if text else []), turns


def _with_tools(template: Template, system: str, tools: str) -> str:
    """Append the tools to the system text, each as JSON on a separate line."""
    if not template.tools:
        raise MsrlError(
            f"template {template.name}: cannot show the tools of this row. Use a template with "
            "tools (qwen, qwen3, native), or use --ignore tools."
        )
    lines = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in json.loads(tools))
    shown = template.tools.replace("{{tools}}", lines)
    return system + shown if system else shown.lstrip("\n")


def _tool(template: Template, turns: Sequence[Message], number: int) -> list[Span]:
    """Return the spans of a tool turn. Consecutive tool turns share one start and one end."""
    if not template.tool:
        raise MsrlError(
            f"template {template.name}: cannot show tool responses. "
            "Use qwen, qwen3, llama3 or native."
        )
    spans = _fill(template.tool, turns[number].content)
    if number == 0 or turns[number - 1].role != "tool":
        spans = [Span(template.tool_start), *spans]
    if number == len(turns) - 1 or turns[number + 1].role != "tool":
        spans = [*spans, Span(template.tool_end)]
    return spans


def _fill(form: str, content: str, before: Sequence[Span] = ()) -> list[Span]:
    """Return the spans of a form with `before` and the quoted content in place of `{{content}}`."""
    head, _, tail = form.partition("{{content}}")
    return [Span(head), *before, Span(content, is_quoted=True), Span(tail)]


def opens_thought(template: Template) -> bool:
    """Return True if the generation prompt of a template begins the thought of every answer."""
    return not template.thought_start and template.assistant_start.rstrip().endswith(THOUGHT[0])


def _continued_thought(content: str, *, is_trained: bool) -> str:
    """Return an answer without the start tag of its thought, which the prompt contains."""
    if is_trained:
        split_trained_answer(content, is_open=True)
    stripped = content.lstrip()
    if not stripped.startswith(THOUGHT[0]):
        return content
    return stripped.removeprefix(THOUGHT[0]).lstrip("\n")


def _split_answer(template: Template, content: str, *, is_trained: bool) -> tuple[str, str]:
    """Return (thought, answer). Without a thought, the answer is the unchanged content.

    An unterminated thought of an earlier answer stays text.
    """
    tags = _thought_tags(template, content)
    split: SplitAnswer = (split_trained_answer if is_trained else split_thought)(content, tags)
    if split.thought is None or not split.is_terminated:
        return "", content
    return split.thought.strip("\n"), split.text.lstrip("\n")


def _thought_tags(template: Template, content: str) -> tuple[str, str]:
    """Return the tags of the thought of an answer: the template's tags, or `<think>`."""
    own = (template.thought_start.strip(), template.thought_end.strip())
    begun = [tags for tags in (own, THOUGHT) if content.lstrip().startswith(tags[0])]
    return next(iter(begun), own if own[1] in content else THOUGHT)


def _context_spans(answer: Sequence[Span]) -> list[Span]:
    """Return the spans of an answer that is context only."""
    return [span._replace(is_masked=True) if span.is_trained else span for span in answer]


def _starts_round(turns: Sequence[Message], number: int) -> bool:
    """Return True if a turn is a question, or the first of consecutive tool responses."""
    if turns[number].role == "tool":
        return turns[number - 1].role != "tool"
    return turns[number].role == "user"


def _refuse_controls(renderer: Renderer, row: Sequence[Span]) -> None:
    """Raise MsrlError if the text of a row contains a control token."""
    for span in row:
        token = next((t for t in renderer.controls if span.is_quoted and t in span.text), None)
        if token is not None:
            raise MsrlError(
                f"template {renderer.template.name}: the text contains {token}, a control token. "
                "Remove it, or use template rendered for rows that contain a rendered prompt."
            )
