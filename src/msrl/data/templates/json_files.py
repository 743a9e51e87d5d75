"""Reader of templates.json, the template files of MindSpeed-LLM and MindSpeed-RL.

Source of the format: mindspeed_llm/tasks/preprocess/templates.py (commit c77308a1) and
mindspeed_rl/datasets/templates.py (commit 05a90d77). A slot is a text, {"token": ...}, or a list
with `bos_token` or `eos_token`.

Two things differ from the originals. Text between two answers is encoded together, while the
originals encode every slot separately. With `efficient_eos`, the end-of-text token is trained after
the last answer only, while MindSpeed also uses it as the label of the first token of later
questions.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from msrl.config.templates import read_entries
from msrl.data.templates.form import Template
from msrl.errors import MsrlError

_FIELDS = {
    "name", "format_user", "format_assistant", "format_system", "format_function",
    "format_observation", "format_tools", "format_separator", "format_prefix", "default_system",
    "stop_words", "thought_words", "efficient_eos", "replace_eos", "force_system", "template_class",
    "enable_thinking",
}  # fmt: skip
_UNKNOWN_CLASS = {"DeepSeek4Template"}
_WITHOUT_SEPARATOR = {"LFDefaultTemplate"}
_QWEN_TOOLS = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n"
    "<tools>{{tools}}\n</tools>\n\nFor each function call, return a json object with function name "
    "and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
_CONTENT = "{{content}}"
_OPENING = re.compile(
    r"<\|im_start\|>|<start_of_turn>|<\|start_header_id\|>|<\|start\|>|<role>|<\|assistant\|>"
)


def read_template(path: Path, name: str) -> Template:
    """Return the template `name` of a file.

    Raises:
        MsrlError: the file has no such template, or the template has an unknown field.
    """
    entry = read_entries(path)[name]
    where = f"template {path}:{name}"
    unknown = sorted(set(entry) - _FIELDS)
    if unknown:
        raise MsrlError(f"{where}: {unknown[0]}: unknown field. Remove it.")
    if entry.get("template_class") in _UNKNOWN_CLASS:
        raise MsrlError(
            f"{where}: template_class={entry['template_class']}: its text is in MindSpeed's code, "
            "not in this file. Use --template native with a tokenizer that has a chat template."
        )
    return _convert(entry, where)


def _convert(entry: dict[str, Any], where: str) -> Template:
    """Return an entry as a template."""
    name = entry["name"]
    efficient = bool(entry.get("efficient_eos"))
    form = _Forms(entry, where)
    user = form.text("format_user", _CONTENT)
    observation = form.text("format_observation", user)
    answer_start = _common_end(user, observation)
    is_thinking = entry.get("template_class") == "ReasoningTemplate"
    thought = _thought(entry, where) if is_thinking else ("", "")
    has_separator = entry.get("template_class") not in _WITHOUT_SEPARATOR
    return Template(
        name=name,
        prefix=form.text("format_prefix", ""),
        default_system=_join_text(entry.get("default_system") or ""),
        system=form.text("format_system", _CONTENT),
        system_in_user=name.startswith("llama2") or entry.get("template_class") == "Llama2Template",
        tools=_QWEN_TOOLS if _tool_format(entry) == "qwen" else "",
        user=user.removesuffix(answer_start),
        tool=observation.removesuffix(answer_start),
        assistant_start=answer_start,
        assistant=form.text("format_assistant", _CONTENT + ("" if efficient else "{{eos}}")),
        separator=form.text("format_separator", "") if has_separator else "",
        end="{{eos}}" if efficient else "",
        thought_start=thought[0],
        thought_end=thought[1],
        special=form.tokens(),
        stop=_stop_words(entry, where),
        replace_eos=bool(entry.get("replace_eos")),
    )


class _Forms:
    """Texts of the slots of an entry."""

    def __init__(self, entry: dict[str, Any], where: str) -> None:
        self._entry, self._where = entry, where
        self._tokens: dict[str, None] = {}

    def text(self, key: str, default: str) -> str:
        """Return the slots of a field as one text."""
        form = self._entry.get(key)
        slots = form.get("slots") if isinstance(form, dict) else None
        if form and not isinstance(slots, list):
            raise MsrlError(f"{self._where}: {key}: must be an object with slots, a list")
        return "".join(self._slot(key, slot) for slot in slots) if slots else default

    def tokens(self) -> tuple[str, ...]:
        """Return the control tokens of the slots read so far."""
        return tuple(self._tokens)

    def _slot(self, key: str, slot: Any) -> str:
        if isinstance(slot, str):
            return slot
        if isinstance(slot, dict) and isinstance(slot.get("token"), str):
            self._tokens[slot["token"]] = None
            return slot["token"]
        if isinstance(slot, list) and slot in (["bos_token"], ["eos_token"]):
            return "{{bos}}" if slot == ["bos_token"] else "{{eos}}"
        raise MsrlError(f"{self._where}: {key}: unknown slot {slot!r}")


def _common_end(user: str, observation: str) -> str:
    """Return the header of the answer: the text at the end of both forms.

    It begins with the token that opens a turn. Without one, it is all of the common text.
    """
    tails = [form.rpartition(_CONTENT)[2] for form in (user, observation)]
    length = 0
    while length < min(map(len, tails)) and tails[0][-length - 1] == tails[1][-length - 1]:
        length += 1
    common = tails[0][len(tails[0]) - length :]
    openings = [match.start() for match in _OPENING.finditer(common)]
    if openings:
        return common[openings[-1] :]
    return common if common == tails[0] else ""


def _thought(entry: dict[str, Any], where: str) -> tuple[str, str]:
    """Return the delimiters of a thought."""
    words = entry.get("thought_words") or ["<think>\n", "\n</think>\n\n"]
    if len(words) != 2 or not all(isinstance(word, str) for word in words):
        raise MsrlError(f"{where}: thought_words: must be two texts")
    return words[0], words[1]


def _stop_words(entry: dict[str, Any], where: str) -> tuple[str, ...]:
    words: Any = entry.get("stop_words") or []
    if not isinstance(words, list) or not all(isinstance(word, str) and word for word in words):
        raise MsrlError(f"{where}: stop_words: must be a list of texts")
    return tuple(words)


def _tool_format(entry: dict[str, Any]) -> str:
    form = entry.get("format_tools")
    return str(form.get("tool_format")) if isinstance(form, dict) else ""


def _join_text(text: Any) -> str:
    """Return a text, also if it is written as a list of texts."""
    return "".join(text) if isinstance(text, list) else str(text)
