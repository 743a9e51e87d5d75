"""Tools of an environment: methods with typed parameters, described to the model as JSON schemas.

The schema of a tool has OpenAI's form. Its description is the first paragraph of the docstring, and
the description of a parameter is its entry in the section `Args:`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from msrl import registry
from msrl.data.rows.turns import ToolCall
from msrl.environments.tool_call import MalformedCall, ParsedAnswer
from msrl.errors import MsrlError, validation_problem
from msrl.thoughts import THOUGHT, split_thought
from msrl.types import JsonObject, Message

_F = TypeVar("_F", bound=Callable[..., Any])
_MARK = "_is_msrl_tool"
_MAX_ERROR_CHARS = 1000
_ENTRY = re.compile(r"^(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):\s*$")


class LostError(Exception):
    """Loss of a program that an episode needs, killed from outside. The episode is repeated."""


class Toolbox(Protocol):
    """Object with tools: methods marked with `tool` or listed in `TOOLS`, and external tools."""

    TOOLS: Sequence[str]
    tool_format: str
    opens_thought: bool
    max_calls: int

    def external_tools(self) -> list[JsonObject]:
        """Return further tools in OpenAI's form, which `call_external` runs."""
        ...

    def call_external(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool of `external_tools` and return its output."""
        ...


def tool(method: _F) -> _F:
    """Mark a method of an environment as a tool that the model may call."""
    setattr(method, _MARK, True)
    return method


def tool_methods(toolbox: Toolbox) -> dict[str, Callable[..., Any]]:
    """Return the tools of an environment by name, in the order of their definition."""
    methods: dict[str, Callable[..., Any]] = {}
    for kind in reversed(type(toolbox).__mro__):
        for name, value in vars(kind).items():
            if getattr(value, _MARK, False) or name in toolbox.TOOLS:
                methods[name] = getattr(toolbox, name)
    return methods


def tool_schemas(toolbox: Toolbox) -> list[JsonObject]:
    """Return the tools of an environment in OpenAI's form."""
    extra = [dict(schema) for schema in toolbox.external_tools()]
    return [schema(name, method) for name, method in tool_methods(toolbox).items()] + extra


def schema(name: str, method: Callable[..., Any]) -> JsonObject:
    """Return the description of a function in OpenAI's form."""
    return _schema(name, getattr(method, "__func__", method))


def prepare_tools(kind: type[Any]) -> None:
    """Derive the schemas of a class, which the processes that are forked later share."""
    for name, value in vars(kind).items():
        if getattr(value, _MARK, False) or name in getattr(kind, "TOOLS", ()):
            schema(name, value)
            for parameter in _types(value).values():
                _adapter(parameter)


@functools.cache
def _schema(name: str, function: Callable[..., Any]) -> JsonObject:
    summary, descriptions = _read_docstring(inspect.getdoc(function) or "")
    properties: JsonObject = {}
    required: list[str] = []
    types = _types(function)
    for parameter in _parameters(function):
        kind = types.get(parameter.name, str)
        properties[parameter.name] = _parameter_schema(kind, descriptions.get(parameter.name))
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        else:
            properties[parameter.name]["default"] = parameter.default
    parameters = {"type": "object", "properties": properties, "required": required}
    entry = {"name": name, "description": summary, "parameters": parameters}
    return {"type": "function", "function": entry}


@functools.cache
def _types(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of the parameters of a function."""
    types = get_type_hints(function)
    types.pop("return", None)
    return types


def tool_format(name: str) -> Any:
    """Return the module of a tool format.

    Raises:
        MsrlError: The format does not exist.
    """
    return registry.load(registry.TOOL_FORMATS, name, key="environment.tool_format")


def run_calls(toolbox: Toolbox, answer: str) -> tuple[list[Message], list[JsonObject]] | None:
    """Run the tool calls of an answer; return None if it has none.

    Returns the replies to the calls, and one record {name, arguments, error} per call.

    Every call is answered by one message of the role `tool`. Errors of a call are text for the
    model: an unknown tool, wrong arguments, text that is no call, and exceptions of a tool.
    """
    schemas = tool_schemas(toolbox)
    if not schemas and not toolbox.tool_format:
        return None
    parsed = read_answer(toolbox, answer, schemas).parsed
    if not parsed.calls:
        return None
    messages: list[Message] = []
    records: list[JsonObject] = []
    for number, call in enumerate(parsed.calls):
        if toolbox.max_calls and number >= toolbox.max_calls:
            records.append(_record(call, "skipped"))
            continue
        output, error = _run_call(toolbox, call)
        messages.append(_tool_message(call, output, number))
        records.append(_record(call, error))
    return messages, records


class ReadAnswer(NamedTuple):
    """Text of the thought of an answer, its calls and other text, and the text that is not read."""

    thought: str
    parsed: ParsedAnswer
    rest: str


def read_answer(toolbox: Toolbox, answer: str, tools: Sequence[JsonObject]) -> ReadAnswer:
    """Return the calls of an answer after its thought.

    Calls after a later start tag do not run, unless the tag is text inside of a call.

    Raises:
        MsrlError: The format of tool calls is not known.
    """
    if not toolbox.tool_format:
        raise unknown_format("the chat template")
    parse = tool_format(toolbox.tool_format).parse
    thought, visible, rest = split_thoughts(answer, opens_thought=toolbox.opens_thought)
    if rest:
        parsed: ParsedAnswer = parse(visible + rest, tools)
        if THOUGHT[0] not in parsed.content:
            return ReadAnswer(thought, parsed, "")
    return ReadAnswer(thought, parse(visible, tools), rest)


def visible_text(answer: str, *, opens_thought: bool = False) -> str:
    """Return an answer without its thoughts, in which calls are not meant to run.

    With `opens_thought`, the answer continues a thought that the generation prompt began.
    """
    return split_thoughts(answer, opens_thought=opens_thought)[1]


def split_thoughts(answer: str, *, opens_thought: bool = False) -> tuple[str, str, str]:
    """Return the thought, the visible text, and the text from a later start tag on."""
    text = split_thought(answer, is_open=opens_thought).text
    visible, start, rest = text.partition(THOUGHT[0])
    return answer.removesuffix(text), visible, start + rest


def _run_call(toolbox: Toolbox, call: ToolCall | MalformedCall) -> tuple[str, str | None]:
    """Return the output of a call, and the kind of its error or None."""
    if isinstance(call, MalformedCall):
        return f"Error: malformed tool call: {call.problem}", "malformed"
    methods = tool_methods(toolbox)
    if call.name in methods:
        return _run_method(methods[call.name], call)
    names = [schema["function"]["name"] for schema in toolbox.external_tools()]
    if call.name in names:
        return _run_guarded(toolbox.call_external, call.name, call.arguments)
    choices = ", ".join([*methods, *names]) or "there are no tools"
    return f"Error: unknown tool {call.name[:100]!r}; available: {choices}", "unknown"


def _run_method(method: Callable[..., Any], call: ToolCall) -> tuple[str, str | None]:
    try:
        arguments = check_arguments(method, call.arguments)
    except ValueError as error:
        return _shorten(f"Error: wrong arguments of {call.name}: {error}"), "arguments"
    return _run_guarded(method, **arguments)


def _run_guarded(
    function: Callable[..., Any], *positional: Any, **arguments: Any
) -> tuple[str, str | None]:
    try:
        return as_text(function(*positional, **arguments)), None
    except LostError:
        raise
    except Exception as error:
        return _shorten(f"Error: {type(error).__name__}: {error}"), "raised"


def check_arguments(method: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of the annotated types.

    Raises:
        ValueError: An argument is unknown, missing or of another type.
    """
    parameters = {parameter.name: parameter for parameter in _parameters(method)}
    for name in arguments:
        if name not in parameters:
            raise ValueError(f"unknown argument {name[:100]!r}; known: {', '.join(parameters)}")
    types = _types(getattr(method, "__func__", method))
    values: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if name in arguments:
            values[name] = _convert(name, types.get(name, str), arguments[name])
        elif parameter.default is parameter.empty:
            raise ValueError(f"missing argument {name!r}")
    return values


def as_text(value: Any) -> str:
    """Return the output of a tool as text; values that are no text as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _convert(name: str, kind: Any, value: Any) -> Any:
    try:
        return _adapter(kind).validate_python(value)
    except ValidationError as error:
        problem = validation_problem(error.errors(include_url=False)[0])
        raise ValueError(f"{name}: {problem}") from None


@functools.cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the converter to a type. Models write numbers as text and text as numbers."""
    is_plain = isinstance(kind, type) and kind in (str, int, float, bool)
    return TypeAdapter(kind, config=ConfigDict(coerce_numbers_to_str=True) if is_plain else None)


def _parameter_schema(kind: Any, description: str | None) -> JsonObject:
    described = TypeAdapter(kind).json_schema()
    return {**described, "description": description} if description else described


def _parameters(method: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    for parameter in inspect.signature(method).parameters.values():
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not is_variable and parameter.name != "self":
            yield parameter


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the first paragraph, and the entries of the section `Args:` by name."""
    summary = " ".join(text.partition("\n\n")[0].split())
    entries: dict[str, str] = {}
    section, name = "", ""
    for line in text.splitlines():
        if match := _SECTION.match(line):
            section, name = match[1], ""
        elif section in ("Args", "Arguments", "Parameters") and line.strip():
            is_entry = len(line) - len(line.lstrip()) <= 4 and _ENTRY.match(line.strip())
            if is_entry:
                name = is_entry[1]
                entries[name] = is_entry[2]
            elif name:
                entries[name] += f" {line.strip()}"
    return summary, entries


def _tool_message(call: ToolCall | MalformedCall, output: str, number: int) -> Message:
    """Return the reply to a call. Chat templates may show its name and id."""
    name = call.name if isinstance(call, ToolCall) else ""
    id_ = (call.id if isinstance(call, ToolCall) else None) or f"call{number:05d}"
    fields = {"role": "tool", "content": output, "name": name, "tool_call_id": id_}
    return Message("tool", output, fields)


def _record(call: ToolCall | MalformedCall, error: str | None) -> JsonObject:
    if isinstance(call, MalformedCall):
        return {"name": None, "arguments": _shorten(call.text), "error": error}
    return {"name": call.name, "arguments": call.arguments, "error": error}


def _shorten(text: str) -> str:
    if len(text) <= _MAX_ERROR_CHARS:
        return text
    return f"{text[:_MAX_ERROR_CHARS]}... ({len(text)} characters)"


def detect_format(chat_template: str) -> str | None:
    """Return the tool format whose marks occur in the text of a chat template, or None.

    This is the only table of formats: episodes, `serve` and evaluation use it.
    """
    names = [name for name in registry.names(registry.TOOL_FORMATS) if _has(name, chat_template)]
    if len(names) > 1:  # formats with own tags inside of the tags of hermes
        names = [name for name in names if name != "hermes"]
    return names[0] if len(names) == 1 else None


def _has(name: str, chat_template: str) -> bool:
    marks = importlib.import_module(f"{registry.TOOL_FORMATS}.{name}").MARKS
    return any(all(mark in chat_template for mark in entry) for entry in marks)


def unknown_format(subject: str) -> MsrlError:
    """Return the error about a chat template whose tool format is not known."""
    return MsrlError(
        f"environment.tool_format: {subject} does not show a known format of tool calls. Set the "
        f"key to the format of the model: {', '.join(registry.names(registry.TOOL_FORMATS))}."
    )
