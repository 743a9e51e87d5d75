"""vLLM's parser of tool calls for a prompt template (names of vLLM 0.23 to 0.32).

A template shows the model how it must write a call. Its tool format is detected as for episodes.
"""

from __future__ import annotations

from msrl.chat_rendering.client import named_template
from msrl.data.render import Renderer
from msrl.data.tokenizer import load_tokenizer
from msrl.environments.tools import detect_format, tool_format

# Formats that only vLLM reads, by their marks.
_OTHER_PARSERS = {"<|action_start|>": "internlm"}
# Text of chat templates that msrl writes for templates without tools.
_WITHOUT_TOOLS = "cannot show tools"


def tool_parser(renderer: Renderer) -> str | None:
    """Return the name of the parser, or None for a template that shows no tools."""
    text = _text_on_tools(renderer)
    if _WITHOUT_TOOLS in text:
        return None
    name = detect_format(text)
    parsers = _OTHER_PARSERS if name is None else _parsers(name)
    return next((parser for mark, parser in parsers.items() if mark in text), None)


def _parsers(name: str) -> dict[str, str]:
    """Return the parsers of a format by the mark that selects each."""
    return {mark: parser for parser, mark in tool_format(name).VLLM_PARSERS.items()}


def _text_on_tools(renderer: Renderer) -> str:
    """Return the text in which the template tells the model about tools."""
    template = renderer.template
    if not template.native:
        return template.tools + template.default_system
    templates = getattr(load_tokenizer(renderer.tokenizer.folder), "chat_template", None)
    return named_template(templates, has_tools=True) or ""
