"""Conversion of a prompt template into a Hugging Face `chat_template` (Jinja).

A model that was trained with a template is exported with the equivalent `chat_template`, so that
transformers and vLLM render prompts as in training. The rendered text equals the concatenated spans
of `Renderer.spans` for conversations in the form that transformers and vLLM use: `messages` with
role and content, `tools`, `add_generation_prompt` and `enable_thinking`.

Source of the format: huggingface.co/docs/transformers/chat_templating.
"""

from __future__ import annotations

from collections.abc import Iterator

from msrl.data.native import dated_template
from msrl.data.render import Renderer, opens_thought
from msrl.thoughts import THOUGHT

_RAISE = "{{- raise_exception(%s) -}}"


def chat_template(renderer: Renderer) -> str:
    """Return the Jinja source of the renderer's template, with the tokenizer's tokens filled in.

    The source is empty for `native`, because the tokenizer already has that template, unless the
    date in it is fixed.
    """
    if renderer.template.native:
        return dated_template(renderer.tokenizer)
    lines = [
        *_system(renderer),
        *_question_indices(),
        *_turns(renderer),
        *_generation_prompt(renderer),
    ]
    return "\n".join(lines) + "\n"


def _system(renderer: Renderer) -> Iterator[str]:
    """Yield the lines that render the prefix and the system text, including tools."""
    template = renderer.template
    yield "{%- set ns = namespace(question=-1, first=-1, tools='') -%}"
    yield f"{{%- set system = {template.default_system!r} -%}}"
    yield "{%- if messages and messages[0]['role'] == 'system' -%}"
    yield "{%- set system = messages[0]['content'] -%}{%- set messages = messages[1:] -%}"
    yield "{%- endif -%}"
    yield from _tools(renderer)
    system = _form_expression(renderer, template.system, "system")
    yield f"{{%- set system = {system} if system else '' -%}}"
    yield f"{{{{- {_text(renderer, template.prefix)} -}}}}"
    if not template.system_in_user:
        yield "{{- system -}}"


def _tools(renderer: Renderer) -> Iterator[str]:
    """Yield the lines that append the tools to the system text."""
    template = renderer.template
    yield "{%- if tools -%}"
    if not template.tools:
        yield _RAISE % repr(f"template {template.name} cannot show tools") + "{%- endif -%}"
        return
    head, _, tail = template.tools.partition("{{tools}}")
    yield "{%- for tool in tools -%}"
    yield "{%- set ns.tools = ns.tools + '\\n' + (tool | tojson) -%}"
    yield "{%- endfor -%}"
    yield f"{{%- set shown = {head!r} + ns.tools + {tail!r} -%}}"
    yield "{%- set system = system + shown if system else shown.lstrip('\\n') -%}"
    yield "{%- endif -%}"


def _question_indices() -> Iterator[str]:
    """Yield the lines that set `ns.first` and `ns.question` to the first and last user turn."""
    yield "{%- for turn in messages -%}{%- if turn['role'] == 'user' -%}"
    yield "{%- set ns.question = loop.index0 -%}"
    yield "{%- if ns.first < 0 -%}{%- set ns.first = loop.index0 -%}{%- endif -%}"
    yield "{%- endif -%}{%- endfor -%}"


def _turns(renderer: Renderer) -> Iterator[str]:
    """Yield the lines that render the turns after the system text."""
    template = renderer.template
    yield "{%- for turn in messages -%}"
    yield "{%- set content = turn['content'] if turn['content'] is not none else '' -%}"
    if template.separator:
        first_tool = "turn['role'] == 'tool' and loop.previtem['role'] != 'tool'"
        condition = f"loop.index0 and (turn['role'] == 'user' or {first_tool})"
        yield f"{{{{- {_text(renderer, template.separator)} if {condition} else '' -}}}}"
    yield "{%- if turn['role'] == 'assistant' -%}"
    yield from _answer(renderer)
    yield "{%- elif turn['role'] == 'tool' -%}"
    yield from _tool(renderer)
    yield "{%- else -%}"
    if template.system_in_user:
        yield "{%- set content = system + content if loop.index0 == ns.first else content -%}"
    yield f"{{{{- {_form_expression(renderer, template.user, 'content')} -}}}}"
    yield "{%- endif -%}"
    if template.end:
        is_last_answer = "loop.last and turn['role'] == 'assistant'"
        yield f"{{{{- {_text(renderer, template.end)} if {is_last_answer} else '' -}}}}"
    yield "{%- endfor -%}"


def _answer(renderer: Renderer) -> Iterator[str]:
    """Yield the lines that render an assistant turn.

    With a template that has thoughts, answers before the last question lose theirs if a generation
    prompt follows. Without a generation prompt, the text is for training: every answer has a
    thought, empty if necessary.
    """
    template = renderer.template
    yield f"{{{{- {_text(renderer, template.assistant_start)} -}}}}"
    yield from _calls()
    if template.thought_start:
        yield from _thought(renderer)
    elif not template.native:
        yield "{%- if turn.reasoning_content is defined and turn.reasoning_content -%}"
        start = "'<think>\\n' + turn.reasoning_content.strip('\\n')"
        yield f"{{%- set content = {start} + '\\n</think>\\n\\n' + content -%}}{{%- endif -%}}"
        if opens_thought(template):
            yield "{%- if content.lstrip().startswith('<think>') -%}"
            yield "{%- set content = content.lstrip()[7:].lstrip('\\n') -%}{%- endif -%}"
    answer = _form_expression(renderer, template.assistant, "content")
    yield f"{{{{- {answer} + {_text(renderer, template.after_assistant)} -}}}}"


def _calls() -> Iterator[str]:
    """Yield the lines that append the `tool_calls` of a turn to its content, each in tags."""
    yield "{%- if turn.tool_calls is defined and turn.tool_calls -%}"
    yield "{%- set calls = namespace(text=content) -%}"
    yield "{%- for call in turn.tool_calls -%}"
    yield "{%- set function = call.function if call.function is defined else call -%}"
    yield "{%- set shown = {'name': function.name, 'arguments': function.arguments} | tojson -%}"
    yield "{%- set calls.text = calls.text + ('\\n' if calls.text else '') -%}"
    yield "{%- set calls.text = calls.text + '<tool_call>\\n' + shown + '\\n</tool_call>' -%}"
    yield "{%- endfor -%}{%- set content = calls.text -%}"
    yield "{%- endif -%}"


def _thought(renderer: Renderer) -> Iterator[str]:
    """Yield the lines that split the thought off `content` and render it where it belongs."""
    start, end = renderer.template.thought_start, renderer.template.thought_end
    delimiters = dict.fromkeys(((start.strip(), end.strip()), THOUGHT))
    yield "{%- set thought = '' -%}"
    yield "{%- if turn.reasoning_content is defined and turn.reasoning_content -%}"
    yield "{%- set thought = turn.reasoning_content.strip('\\n') -%}"
    for opening, closing in delimiters:
        begins = f"content.lstrip().startswith({opening!r})"
        yield f"{{%- elif {begins} and {closing!r} in content -%}}"
        inside = f"content.lstrip()[{len(opening)}:].split({closing!r}, 1)"
        yield f"{{%- set thought = {inside}[0].strip('\\n') -%}}"
        yield f"{{%- set content = {inside}[1].lstrip('\\n') -%}}"
    yield "{%- endif -%}"
    yield "{%- set keeps = not add_generation_prompt or loop.index0 > ns.question -%}"
    yield f"{{%- if thought and keeps and not ({_is_thinking_disabled(renderer)}) -%}}"
    yield f"{{%- set content = {start!r} + thought + {end!r} + content.lstrip('\\n') -%}}"
    yield "{%- elif not add_generation_prompt -%}"
    yield f"{{{{- {start + end!r} -}}}}{{%- set content = content.lstrip('\\n') -%}}"
    yield "{%- endif -%}"


def _tool(renderer: Renderer) -> Iterator[str]:
    """Yield the lines that render a tool turn. Consecutive tool turns share one start and end."""
    template = renderer.template
    if not template.tool:
        yield _RAISE % repr(f"template {template.name} cannot show tool responses")
        return
    start, end = _text(renderer, template.tool_start), _text(renderer, template.tool_end)
    yield f"{{{{- {start} if loop.first or loop.previtem['role'] != 'tool' else '' -}}}}"
    yield f"{{{{- {_form_expression(renderer, template.tool, 'content')} -}}}}"
    yield f"{{{{- {end} if loop.last or loop.nextitem['role'] != 'tool' else '' -}}}}"


def _generation_prompt(renderer: Renderer) -> Iterator[str]:
    """Yield the lines that render the generation prompt."""
    template = renderer.template
    yield "{%- if add_generation_prompt -%}"
    yield f"{{{{- {_text(renderer, template.assistant_start)} -}}}}"
    if template.thought_start:
        empty = template.thought_start + template.thought_end
        yield f"{{%- if {_is_thinking_disabled(renderer)} -%}}{{{{- {empty!r} -}}}}{{%- endif -%}}"
    yield "{%- endif -%}"


def _is_thinking_disabled(renderer: Renderer) -> str:
    """Return the Jinja condition for disabled thinking. The default is the setting in training."""
    default = "false" if renderer.enable_thinking is False else "true"
    return f"(enable_thinking | default({default})) is false"


def _form_expression(renderer: Renderer, form: str, name: str) -> str:
    """Return a Jinja expression for a form whose content is the variable `name`."""
    head, _, tail = form.partition("{{content}}")
    return f"{_round_expression(renderer, head)} + {name} + {_round_expression(renderer, tail)}"


def _round_expression(renderer: Renderer, text: str) -> str:
    """Return a Jinja expression for a text in which `{{idx}}` is the number of the round."""
    pieces = [_text(renderer, piece) for piece in text.split("{{idx}}")]
    return " + (loop.index0 // 2) | string + ".join(pieces)


def _text(renderer: Renderer, text: str) -> str:
    """Return a Jinja expression for a text of the template, with the tokenizer's tokens in it."""
    return repr(renderer.with_token_names(text))
