"""A template of ours as a Hugging Face `chat_template` (Jinja), so that a model that was trained with it is asked with it everywhere.

The text is that of `Renderer.parts`, word for word, for conversations as transformers and vLLM hand them over: `messages` with role and
content, `tools`, `add_generation_prompt`, `enable_thinking`. Source of the form: huggingface.co/docs/transformers/chat_templating.
"""

from __future__ import annotations

from collections.abc import Iterator

from msrl.data.render import Renderer

_REFUSE = "{{- raise_exception(%s) -}}"


def chat_template(renderer: Renderer) -> str:
    """The Jinja source of a renderer's template, the tokenizer's tokens written out; empty for `native`, which is the tokenizer's own."""
    if renderer.template.native:
        return ""
    return "\n".join([*_system(renderer), *_numbers(), *_turns(renderer), *_opening(renderer)]) + "\n"


def _system(renderer: Renderer) -> Iterator[str]:
    """The first turns of a conversation: prefix and system text, tools with it."""
    template = renderer.template
    yield "{%- set ns = namespace(question=-1, first=-1, tools='') -%}"
    yield f"{{%- set system = {template.default_system!r} -%}}"
    yield "{%- if messages and messages[0]['role'] == 'system' -%}"
    yield "{%- set system = messages[0]['content'] -%}{%- set messages = messages[1:] -%}"
    yield "{%- endif -%}"
    if template.tools:
        head, _, tail = template.tools.partition("{{tools}}")
        yield "{%- if tools -%}"
        yield "{%- for tool in tools -%}{%- set ns.tools = ns.tools + '\\n' + (tool | tojson) -%}{%- endfor -%}"
        yield f"{{%- set shown = {head!r} + ns.tools + {tail!r} -%}}"
        yield "{%- set system = system + shown if system else shown.lstrip('\\n') -%}"
        yield "{%- endif -%}"
    else:
        yield "{%- if tools -%}" + _REFUSE % repr(f"template {template.name} cannot show tools") + "{%- endif -%}"
    yield f"{{%- set system = {_filled(renderer, template.system, 'system')} if system else '' -%}}"
    yield f"{{{{- {_text(renderer, template.prefix)} -}}}}"
    if not template.system_in_user:
        yield "{{- system -}}"


def _numbers() -> Iterator[str]:
    """Which turn is the first question, and which the last."""
    yield "{%- for turn in messages -%}{%- if turn['role'] == 'user' -%}"
    yield "{%- set ns.question = loop.index0 -%}"
    yield "{%- if ns.first < 0 -%}{%- set ns.first = loop.index0 -%}{%- endif -%}"
    yield "{%- endif -%}{%- endfor -%}"


def _turns(renderer: Renderer) -> Iterator[str]:
    template = renderer.template
    yield "{%- for turn in messages -%}"
    yield "{%- set content = turn['content'] -%}"
    yield "{%- if turn['role'] == 'assistant' -%}"
    yield from _answer(renderer)
    yield "{%- elif turn['role'] == 'tool' -%}"
    yield from _tool(renderer)
    yield "{%- else -%}"
    if template.system_in_user:
        yield "{%- set content = system + content if loop.index0 == ns.first else content -%}"
    yield f"{{{{- {_filled(renderer, template.user, 'content')} -}}}}"
    yield "{%- endif -%}"
    yield "{%- endfor -%}"


def _answer(renderer: Renderer) -> Iterator[str]:
    """An answer; of a template with thoughts the last has one, earlier ones lose theirs, one before a tool's answer keeps a real one."""
    template = renderer.template
    yield f"{{{{- {_text(renderer, template.assistant_start)} -}}}}"
    if template.thought_start:
        start, end = template.thought_start, template.thought_end
        yield "{%- set thought = '' -%}"
        yield f"{{%- if {end.strip()!r} in content -%}}"
        yield f"{{%- set thought = content.split({end.strip()!r})[0].rstrip('\\n').split({start.strip()!r})[-1].strip('\\n') -%}}"
        yield f"{{%- set content = content.split({end.strip()!r})[-1].lstrip('\\n') -%}}"
        yield "{%- endif -%}"
        yield f"{{%- if {_is_off(renderer)} -%}}"
        yield f"{{{{- {start + end!r} if loop.last and loop.index0 >= ns.question else '' -}}}}"
        yield "{%- elif loop.index0 >= ns.question and (loop.last or thought) -%}"
        yield f"{{%- set content = {start!r} + thought + {end!r} + content.lstrip('\\n') -%}}"
        yield "{%- endif -%}"
    yield f"{{{{- {_filled(renderer, template.assistant, 'content')} + {_text(renderer, template.after_assistant)} -}}}}"


def _tool(renderer: Renderer) -> Iterator[str]:
    """A run of tool answers shares one start and one end."""
    template = renderer.template
    if not template.tool:
        yield _REFUSE % repr(f"template {template.name} has no form for tool answers")
        return
    start, end = _text(renderer, template.tool_start), _text(renderer, template.tool_end)
    yield f"{{{{- {start} if loop.first or loop.previtem['role'] != 'tool' else '' -}}}}"
    yield f"{{{{- {_filled(renderer, template.tool, 'content')} -}}}}"
    yield f"{{{{- {end} if loop.last or loop.nextitem['role'] != 'tool' else '' -}}}}"


def _opening(renderer: Renderer) -> Iterator[str]:
    """What a prompt ends with."""
    template = renderer.template
    yield "{%- if add_generation_prompt -%}"
    yield f"{{{{- {_text(renderer, template.assistant_start)} -}}}}"
    if template.thought_start:
        empty = template.thought_start + template.thought_end
        yield f"{{%- if {_is_off(renderer)} -%}}{{{{- {empty!r} -}}}}{{%- endif -%}}"
    yield "{%- endif -%}"


def _is_off(renderer: Renderer) -> str:
    """Whether thinking is switched off; without a word it is as it was in training."""
    default = "false" if renderer.enable_thinking is False else "true"
    return f"(enable_thinking | default({default})) is false"


def _filled(renderer: Renderer, form: str, name: str) -> str:
    """An expression for a form with the variable `name` as its content."""
    head, _, tail = form.partition("{{content}}")
    return f"{_text(renderer, head)} + {name} + {_text(renderer, tail)}"


def _text(renderer: Renderer, text: str) -> str:
    """A text of the template as an expression, with the tokenizer's tokens in it."""
    return repr(renderer.named(text))
