"""Tool calls of GLM-4.5 and later: a name and pairs of `<arg_key>` and `<arg_value>` tags.

Values of text parameters stand as they are, all others as JSON. GLM-4.5 writes line feeds between
the tags, GLM-4.7 and later write none.
Format: the chat template of zai-org/GLM-4.5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from msrl.data.rows.turns import ToolCall
from msrl.environments.tool_call import ParsedAnswer
from msrl.environments.tool_formats._tags import Tags, parse_tags
from msrl.types import JsonObject

MARKS = (("<arg_key>",),)
VLLM_PARSERS = {"glm45": ""}


def parse(text: str, tools: Sequence[JsonObject] = ()) -> ParsedAnswer:
    """Return the calls of an answer."""
    return parse_tags(text, _TAGS, tools)


def render(calls: Iterable[ToolCall]) -> str:
    """Return calls as GLM-4.5 and GLM-4.6 write them."""
    return "\n".join(map(_render_call, calls))


def _render_call(call: ToolCall) -> str:
    lines = [f"<tool_call>{call.name}"]
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<arg_key>{key}</arg_key>", f"<arg_value>{text}</arg_value>"]
    return "\n".join([*lines, "</tool_call>"])


_TAGS = Tags(
    block=None,
    call=re.compile(r"<tool_call>([^<]*)"),
    call_end="</tool_call>",
    argument=re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>", re.DOTALL),
    argument_end="</arg_value>",
)
