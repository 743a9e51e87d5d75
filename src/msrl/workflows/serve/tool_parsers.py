"""vLLM's parser of tool calls for a prompt template (names of vLLM 0.23 to 0.32).

A template shows the model how it must write a call, so the markup in it selects the parser.
"""

from __future__ import annotations

from typing import Any

from msrl.data.render import Renderer
from msrl.data.tokenizer import load_tokenizer

# The first entry whose markup is in the text of the template decides.
_PARSERS = (
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>ipython", '"parameters"'), "llama3_json"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|channel|>", "commentary"), "openai"),
    (("<|action_start|>",), "internlm"),
    (("<|tool_call|>",), "granite"),
)
# Text of chat templates that msrl writes for templates without tools.
_WITHOUT_TOOLS = "cannot show tools"


def tool_parser(renderer: Renderer) -> str | None:
    """Return the name of the parser, or None for a template that shows no tools."""
    text = _text_on_tools(renderer)
    if _WITHOUT_TOOLS in text:
        return None
    return next((name for marks, name in _PARSERS if all(mark in text for mark in marks)), None)


def _text_on_tools(renderer: Renderer) -> str:
    """Return the text in which the template tells the model about tools."""
    template = renderer.template
    if not template.native:
        return template.tools + template.default_system
    source: Any = getattr(load_tokenizer(renderer.tokenizer.folder), "chat_template", None) or ""
    return "\n".join(source.values()) if isinstance(source, dict) else str(source)
