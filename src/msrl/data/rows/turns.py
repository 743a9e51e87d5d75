"""Turns of a conversation in the usual formats: ShareGPT, OpenAI and Anthropic.

Sources of the formats:

- ShareGPT as LLaMA-Factory reads it: {from, value}; a `function_call` turn holds the JSON of one
  call or a list of calls
- OpenAI's chat completions: {role, content, tool_calls, reasoning_content}; content is text or a
  list of parts (text, image_url, and image as of transformers)
- Anthropic's messages: {role, content}; content is a list of blocks (text, image, thinking,
  tool_use, tool_result)
- ms-swift: the roles tool_call and tool_response
- OpenRouter: `reasoning_details`, a list of texts

`msrl.data.rows.keys` has the keys that mark an answer as context only, and those that are refused.

The text of an assistant turn contains its thought in `<think>` tags and each tool call in
`<tool_call>` tags, the format of Qwen and Hermes. `Message.fields` has them separately for the
tokenizer's own chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple, cast

from msrl.data.columns import DroppedRow, is_empty, kind_name
from msrl.data.images.marks import IMAGE, NEXT
from msrl.data.rows.keys import (
    DETAILS,
    IMAGE_KEYS,
    THOUGHTS,
    check_block,
    check_turn,
    is_image,
    is_trained,
)
from msrl.errors import MsrlError, nearest
from msrl.strict_json import loads
from msrl.thoughts import THOUGHT, split_thought
from msrl.types import Message, Role

ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "observation": "tool",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
_FOLLOWS: dict[Role, tuple[Role, ...]] = {
    "system": (),
    "user": ("assistant", "tool"),
    "assistant": ("user", "tool"),
    "tool": ("assistant", "tool"),
}
_CALL_ROLES = ("function_call", "tool_call")
_CALL_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_CALL_KEYS = frozenset({"id", "type", "index", "function", "name", "call_id", "tool_call_id"})
_CALLS = ("tool_calls", "function_call")
_THOUGHTS = (*THOUGHTS, DETAILS)
_ARGUMENTS = ("arguments", "parameters", "input", "args", "kwargs")
_PASSED_KEYS = ("name", "tool_call_id")
CALL = ("<tool_call>", "</tool_call>")
# Blocks are joined by type, in this order.
_BLOCK_ORDER = {
    "thinking": 0, "tool_result": 0, "text": 1, "image": 1, "image_url": 1, "tool_use": 2
}  # fmt: skip


class ToolCall(NamedTuple):
    """A call of a tool. `arguments` is a JSON object."""

    name: str
    arguments: dict[str, Any]
    id: str | None = None


class _Content(NamedTuple):
    """Content of one turn. `results` are (tool call id, text) of tool responses.

    The text has a mark for each image of `images`, which are sources.
    """

    text: str
    thought: str
    calls: tuple[ToolCall, ...]
    results: tuple[tuple[str | None, str], ...]
    images: tuple[Any, ...] = ()


def read_messages(value: Any) -> tuple[Message, ...]:
    """Return the turns of a list in any of the formats. Raises MsrlError for any other value."""
    if not isinstance(value, list):
        raise MsrlError("the turns must be a list of {from, value} or {role, content}")
    messages: list[Message] = []
    ids: list[str] | None = None
    for number, turn in enumerate(value, 1):
        location = f"turn {number}"
        read = read_turn(turn, location)
        is_call = isinstance(turn, dict) and "tool_call" in (turn.get("from"), turn.get("role"))
        if is_call and messages and messages[-1].role == "assistant":
            messages[-1] = _join_call(messages[-1], read[0], location)
        else:
            messages += read
        for message in read:
            ids = _unanswered_calls(message, ids, location)
    return tuple(messages)


def _unanswered_calls(message: Message, ids: list[str] | None, location: str) -> list[str] | None:
    """Return the ids of the calls that a message leaves without a result; None without ids.

    Args:
        message: the message.
        ids: ids of the calls before it that have no result yet.
        location: location of its turn for messages.

    Raises:
        MsrlError: the message is the result of none of them. Most templates show no ids, so that
            the model would read the result as that of another call.
    """
    fields = message.fields or {}
    if message.role != "tool":
        calls: Sequence[Any] = fields.get("tool_calls", ())
        return [call["id"] for call in calls if "id" in call] or None
    id_ = fields.get("tool_call_id")
    if ids is None or id_ is None:
        return ids
    if id_ not in ids:
        raise MsrlError(
            f"{location}: tool_call_id={id_}: is not the id of a call that precedes it and has no "
            "result yet. Write the results in the order of the calls, one for each call."
        )
    return ids[ids.index(id_) + 1 :]


def _join_call(answer: Message, call: Message, location: str) -> Message:
    """Return an answer with the call of the next turn. ms-swift writes each call as a turn."""
    if answer.is_trained != call.is_trained:
        raise MsrlError(
            f"{location}: the call and the answer before it have different marks. An answer is "
            "trained completely or not at all."
        )
    before = answer.fields or {"role": "assistant", "content": answer.content}
    calls = [*before.get("tool_calls", ()), *(call.fields or {})["tool_calls"]]
    text = "\n".join(part for part in (answer.content, call.content) if part)
    return replace(answer, content=text, fields={**before, "tool_calls": calls})


def read_turn(turn: Any, location: str) -> tuple[Message, ...]:
    """Return one turn. A user turn with tool results becomes several messages.

    Raises:
        MsrlError: the format is unknown. The message begins with `location`.
    """
    if not isinstance(turn, dict):
        raise MsrlError(f"{location}: must be an object with from and value, or role and content")
    name = _role_name(turn, location)
    role = ROLES[name]
    check_turn(turn, location)
    content = _read_content(turn, name, location)
    if content.images and role != "user":
        raise MsrlError(
            f"{location}: an image in a turn of {role}: only questions can have images. Move it to "
            "a question."
        )
    if role != "assistant" and (content.thought or content.calls):
        part = "a thought" if content.thought else "a tool call"
        raise MsrlError(f"{location}: a turn of {role} contains {part}. Move it to an answer.")
    results = tuple(_tool_message(turn, text, id_, location) for id_, text in content.results)
    if results and role not in ("user", "tool"):
        raise MsrlError(f"{location}: a turn of {role} contains a tool_result")
    if results and not content.text:
        return results
    if role == "tool":
        return (*results, _tool_message(turn, content.text, None, location))
    message = _message(role, content, location)
    if content.images:
        message = replace(message, images=content.images)
    blocks = turn["content"] if isinstance(turn.get("content"), list) else ()
    if not is_trained(turn, blocks, role, location):
        message = replace(message, is_trained=False)
    return (*results, message)


def _role_name(turn: dict[str, Any], location: str) -> str:
    """Return the name of a role. Raises MsrlError if it is unknown, or if there are two."""
    names = [turn[key] for key in ("from", "role") if turn.get(key) is not None]
    name = names[0] if names else None
    if not isinstance(name, str) or name not in ROLES:
        raise MsrlError(f"{location}: unknown role {name!r}; {nearest(str(name), ROLES)}")
    if len(names) > 1 and ROLES.get(names[1]) != ROLES[name]:
        raise MsrlError(
            f"{location}: from={name}: role={names[1]} is another role. Remove one of them."
        )
    return name


def with_system(messages: Sequence[Message], value: Any) -> list[Message]:
    """Return turns with the system text of their row: text, or a list of text blocks.

    Raises:
        MsrlError: the value is neither, or the turns have another system text.
    """
    if not value:
        return list(messages)
    turn = read_turn({"role": "system", "content": value}, "the system text")[0]
    own = [message.content for message in messages if message.role == "system"]
    if any(text != turn.content for text in own):
        raise MsrlError(
            "the row has a system text in a column and another one in its turns. Remove one of "
            "them, or ignore the column, as with --ignore system."
        )
    return [turn, *(message for message in messages if message.role != "system")]


def check_order(messages: list[Message]) -> None:
    """Check the order of the turns.

    A system text is only allowed at the start. A user turn follows, then answers after questions or
    tool responses.

    Raises:
        DroppedRow: the order differs; the reason is "turn_order".
    """
    turns: list[Role] = [m.role for m in messages]
    turns = turns[1:] if turns and turns[0] == "system" else turns
    if not turns or turns[0] != "user":
        raise DroppedRow("turn_order")
    for before, role in pairwise(turns):
        if before not in _FOLLOWS[role]:
            raise DroppedRow("turn_order")


def tools_text(value: Any) -> str:
    """Return the tools as a JSON list in OpenAI's form, or "" if there are none.

    LLaMA-Factory's tools (bare functions) and Anthropic's (`input_schema`) are converted to
    `{"type": "function", "function": ...}`, the form that chat templates receive at inference.

    Raises:
        MsrlError: the value is not a list of tools.
    """
    if value in (None, "", [], "[]"):
        return ""
    try:
        tools = loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"the tools are not JSON: {error}") from error
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) for tool in cast("list[Any]", tools)
    ):
        raise MsrlError("the tools must be a list of objects")
    return json.dumps([_openai_tool(tool) for tool in tools], ensure_ascii=False)


def _openai_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Return a tool as `{"type": "function", "function": ...}`."""
    is_wrapped = isinstance(tool.get("function"), dict)
    function = tool["function"] if is_wrapped else {k: v for k, v in tool.items() if k != "type"}
    name = function.get("name")
    if not isinstance(name, str):
        raise MsrlError(f"a tool has no name; it has: {', '.join(tool) or 'nothing'}")
    if "input_schema" in function and not is_wrapped:
        function = {
            "parameters" if key == "input_schema" else key: value for key, value in function.items()
        }
    if not isinstance(function.get("parameters"), dict | None):
        raise MsrlError(
            f"the parameters of tool {name} are {kind_name(function['parameters'])}, not an "
            "object. Write them as an object."
        )
    return (
        {"type": "function", **tool} if is_wrapped else {"type": "function", "function": function}
    )


def _read_content(turn: dict[str, Any], name: str, location: str) -> _Content:
    """Return the text, thought, tool calls and tool results of a turn."""
    content = _field(turn, ("value", "content"), location)
    calls = () if turn.keys().isdisjoint(_CALLS) else tuple(_read_calls(turn, location))
    thoughts = {} if turn.keys().isdisjoint(_THOUGHTS) else _thoughts(turn, location)
    if content is None and (calls or thoughts):
        content = ""
    if isinstance(content, list):
        read = _read_blocks(content, location)
    elif not isinstance(content, str):
        raise MsrlError(
            f"{location}: the content is {kind_name(content)}, not text. Write it as text, an "
            "object as JSON text."
        )
    elif name in _CALL_ROLES:
        read = _read_function_call(content, location)
    else:
        read = _Content(content, "", (), ())
    read = _with_thoughts(read, thoughts, location)
    if calls and CALL[0] in read.text:
        raise MsrlError(
            f"{location}: tool_calls: the content contains {CALL[0]} too. Write each call in one "
            "of them only."
        )
    return read._replace(calls=(*read.calls, *calls)) if calls else read


def _with_thoughts(content: _Content, thoughts: dict[str, str], location: str) -> _Content:
    """Return a content with its only thought, which several parts of a turn may hold.

    Args:
        content: content of the turn.
        thoughts: thoughts in keys of the turn.
        location: location of the turn for messages.

    Raises:
        MsrlError: the parts hold different thoughts, or a thought contains its end tag.
    """
    if content.thought:
        thoughts = {**thoughts, "content": content.thought}
    if not thoughts:
        return content
    split = split_thought(content.text)
    if split.thought is not None:
        thoughts = {**thoughts, "content": split.thought}
        content = content._replace(text=split.text.lstrip("\n"))
    if len({thought.strip() for thought in thoughts.values()}) > 1:
        raise MsrlError(
            f"{location}: {' and '.join(thoughts)}: the turn has different thoughts. Remove all "
            "but one."
        )
    name, thought = next(iter(thoughts.items()))
    if THOUGHT[1] in thought:
        raise MsrlError(
            f"{location}: {name}: the thought contains {THOUGHT[1]}, which would end it. Remove "
            "the tag."
        )
    return content._replace(thought=thought)


def _read_blocks(blocks: list[Any], location: str) -> _Content:
    """Return the content of a list of OpenAI's parts or Anthropic's blocks."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    results: list[tuple[str | None, str]] = []
    images: list[Any] = []
    is_joined = True  # the next text continues an image, or is the first
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind:
            check_block(block, location)
        text = block.get("text", block.get("value")) if kind == "text" else None
        if isinstance(text, str):
            texts.append(text if is_joined else f"\n{text}")
            is_joined = False
        elif kind and is_image(block):
            texts.append(IMAGE)
            images.append(_image_source(block, location))
            is_joined = True
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_call(block.get("name"), block.get("input"), block.get("id"), location))
        elif kind == "tool_result":
            id_ = _id(block.get("tool_use_id"), "tool_use_id", location)
            results.append((id_, _result_text(block, location)))
        else:
            shown = f"a block of type {kind!r}" if kind else type(block).__name__
            raise MsrlError(
                f"{location}: the content is a list with {shown}, not text. Only text, image, "
                "image_url, thinking, tool_use and tool_result blocks are supported."
            )
    _check_block_order(blocks, location)
    thought = "\n".join(thoughts)
    return _Content("".join(texts), thought, tuple(calls), tuple(results), tuple(images))


def _image_source(block: dict[str, Any], location: str) -> Any:
    """Return the source of an image part; `NEXT` if the column of images has it."""
    sources = {key: block[key] for key in IMAGE_KEYS if block.get(key) is not None}
    if not sources and block["type"] == "image_url":
        raise MsrlError(
            f"{location}: the content is a list with an image_url without a url. Write "
            '{"type": "image_url", "image_url": {"url": ...}}, or a part of type image or text.'
        )
    key = next(iter(sources), "")
    return {key: sources[key]} if key == "base64" else sources.get(key, NEXT)


def _check_block_order(blocks: list[Any], location: str) -> None:
    """Raise MsrlError if joining the blocks of a type would lose the order of blocks."""
    kinds = [block["type"] for block in blocks if block.get("text") != ""]
    for before, kind in pairwise(kinds):
        if _BLOCK_ORDER[kind] < _BLOCK_ORDER[before]:
            raise MsrlError(
                f"{location}: the content has a block of type {kind} after one of type {before}. "
                "Write thoughts before texts, texts before calls, and results before texts, or "
                "split the turn."
            )


def _result_text(block: dict[str, Any], location: str) -> str:
    """Return the text of a tool_result block."""
    content = block.get("content")
    if isinstance(content, list):
        read = _read_blocks(content, location)
        if read.images:
            raise MsrlError(
                f"{location}: an image in a tool_result: only questions can have images. Remove it."
            )
        return read.text
    if not isinstance(content, str | None):
        raise MsrlError(f"{location}: a tool_result is {type(content).__name__}, not text")
    return content or ""


def _read_function_call(content: str, location: str) -> _Content:
    """Return the content of a `function_call` turn: JSON of one call or a list of calls."""
    split = split_thought(content)
    loaded = _loads(split.text, location, "the function_call")
    items = loaded if isinstance(loaded, list) else [loaded]
    calls = tuple(_read_call(item, location) for item in items)
    if not calls:
        raise MsrlError(f"{location}: the function_call is an empty list")
    return _Content("", split.thought or "", calls, ())


def _read_calls(turn: dict[str, Any], location: str) -> Iterator[ToolCall]:
    """Yield the calls of OpenAI's `tool_calls`, or of its older `function_call`."""
    calls = turn.get("tool_calls") or []
    if not isinstance(calls, list):
        raise MsrlError(f"{location}: tool_calls is {type(calls).__name__}, not a list")
    read = [_read_call(call, location) for call in calls]
    if older := turn.get("function_call"):
        call = _read_call(older, location)
        if read and [item[:2] for item in read] != [call[:2]]:
            raise MsrlError(
                f"{location}: tool_calls and function_call: the turn has different calls. Remove "
                "one of them."
            )
        read = read or [call]
    yield from read


def _read_call(call: Any, location: str) -> ToolCall:
    """Return a call: {name, arguments}, or the same under `function`."""
    call = call if isinstance(call, dict) else {}
    function = call.get("function", call)
    if not isinstance(function, dict):
        function = {}
    for key, value in (*call.items(), *function.items()):
        if key not in _CALL_KEYS and key not in _ARGUMENTS and value not in (None, "", [], {}):
            raise MsrlError(
                f"{location}: a tool call with {key}: not a part of a call. Write the arguments "
                "into 'arguments', or remove the key."
            )
    arguments = _field(function, _ARGUMENTS, location)
    return _call(function.get("name"), arguments, call.get("id"), location)


def _call(name: Any, arguments: Any, id_: Any, location: str) -> ToolCall:
    """Return a call with its arguments as an object."""
    if isinstance(arguments, str):
        arguments = _loads(arguments, location, "the arguments of a tool call") if arguments else {}
    if not isinstance(name, str) or not name or not isinstance(arguments, dict | None):
        raise MsrlError(f"{location}: a tool call needs a name, and arguments that are an object")
    return ToolCall(name, arguments or {}, _id(id_, "id", location))


def _id(value: Any, key: str, location: str) -> str | None:
    """Return the id of a call as text, or None. Raises MsrlError if it is neither text nor int."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise MsrlError(f"{location}: {key}: is {kind_name(value)}, not text. Write it as text.")


def _loads(text: str, location: str, subject: str) -> Any:
    try:
        return loads(text)
    except (ValueError, RecursionError) as error:
        raise MsrlError(f"{location}: {subject} must be JSON: {error}") from error


def _thoughts(turn: dict[str, Any], location: str) -> dict[str, str]:
    """Return the thoughts in keys of a turn."""
    thoughts: dict[str, str] = {}
    for key in THOUGHTS:
        thought = turn.get(key)
        if thought and not isinstance(thought, str):
            raise MsrlError(f"{location}: {key} is {kind_name(thought)}, not text")
        if thought:
            thoughts[key] = thought
    if turn.get(DETAILS):
        thoughts[DETAILS] = _detailed_thought(turn[DETAILS], location)
    return thoughts


def _detailed_thought(details: Any, location: str) -> str:
    """Return the thought in OpenRouter's `reasoning_details`, a list of texts."""
    items = details if isinstance(details, list) else [details]
    values = [item.get("text") if isinstance(item, dict) else None for item in items]
    texts = [text for text in values if isinstance(text, str)]
    if len(texts) < len(values):
        raise MsrlError(
            f"{location}: {DETAILS}: contains a part without text, such as a summary or an "
            f"encrypted thought. Write the thought into reasoning_content, or use --ignore "
            f"{DETAILS}."
        )
    return "".join(texts)


def _message(role: Role, content: _Content, location: str) -> Message:
    """Return a message whose text contains the thought and the calls."""
    calls = [_call_text(call, location) for call in content.calls]
    text = "\n".join([*([content.text] if content.text else []), *calls])
    if role != "assistant" or not (content.thought or content.calls):
        return Message(role, text)
    fields: dict[str, Any] = {"role": role, "content": content.text}
    thought = content.thought.strip("\n")
    if thought:
        text = f"{THOUGHT[0]}\n{thought}\n{THOUGHT[1]}\n\n{text}"
        fields["reasoning_content"] = thought
    if content.calls:
        fields["tool_calls"] = [_call_fields(call) for call in content.calls]
    return Message(role, text, fields)


def _tool_message(turn: dict[str, Any], text: str, id_: str | None, location: str) -> Message:
    """Return a tool response. Chat templates may show its `name` and `tool_call_id`."""
    read = {key: _id(turn.get(key), key, location) for key in _PASSED_KEYS}
    fields = {key: value for key, value in read.items() if value is not None}
    if id_ is not None:
        fields["tool_call_id"] = id_
    return Message("tool", text, {"role": "tool", "content": text, **fields} if fields else None)


def _call_text(call: ToolCall, location: str) -> str:
    """Return a tool call in tags. Raises MsrlError for numbers that JSON does not have."""
    value = {"name": call.name, "arguments": call.arguments}
    try:
        text = _CALL_JSON.encode(value)
    except ValueError:
        raise MsrlError(
            f"{location}: the arguments of {call.name} contain NaN or Infinity, which JSON does "
            "not have. Write another value."
        ) from None
    return f"{CALL[0]}\n{text}\n{CALL[1]}"


def _call_fields(call: ToolCall) -> dict[str, Any]:
    """Return a tool call in OpenAI's form, with the arguments as an object."""
    function = {"name": call.name, "arguments": call.arguments}
    head = {} if call.id is None else {"id": call.id}
    return {**head, "type": "function", "function": function}


def _field(part: dict[str, Any], names: Sequence[str], location: str) -> Any:
    """Return the value of a field that has several names, or None.

    Raises:
        MsrlError: two of the names have different values.
    """
    values = {name: part[name] for name in names if part.get(name) is not None}
    if len(values) > 1:
        values = {name: value for name, value in values.items() if not is_empty(value)} or values
    first = next(iter(values.values()), None)
    if any(value != first for value in values.values()):
        raise MsrlError(f"{location}: {' and '.join(values)} differ. Remove all but one.")
    return first
