"""Dataset handlers of users, configured as `path/file.py:NAME`.

NAME is a function of a row, or a class with the method `conversation(row)` or, for pretraining,
`text(row)`. The options are keyword arguments of the function or of the class. A handler returns
one of:

- a list of turns in a format of `msrl.data.rows.turns`
- an object with `messages` and optionally `answer` (ground truth), `tools`, `images` and `extra`
- a text (pretraining)
- None to drop the row

The file is executed with the rights of the user, once per worker process.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from msrl import user_files
from msrl.data.columns import DroppedRow
from msrl.data.images.marks import attach_images
from msrl.data.rows.turns import check_order, read_messages, tools_text
from msrl.errors import MsrlError
from msrl.types import Conversation

_KEYS = ("messages", "answer", "tools", "images", "extra")


def imported_names(file: Path) -> set[str]:
    """Return the dotted names of the modules that a file may import."""
    names: set[str] = set()
    for node in ast.walk(user_files.parse(file)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names | {name.rpartition(".")[0] for name in names if "." in name}


def kinds(name: str) -> tuple[str, ...]:
    """Return the kinds of data that the handler can produce, the default first."""
    target = _load(name)
    if not inspect.isclass(target):
        return ("sft", "prompts", "pretrain")
    conversations = ("sft", "prompts") if hasattr(target, "conversation") else ()
    texts = ("pretrain",) if hasattr(target, "text") else ()
    if not (*conversations, *texts):
        raise MsrlError(
            f"preprocess.handler={name}: the class has neither the method conversation(row) nor "
            "text(row). Define one of them."
        )
    return (*conversations, *texts)


def converter(name: str, kind: str, options: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Return the function that converts a row to a text (pretrain) or a conversation.

    Raises:
        MsrlError: the file cannot be executed, or does not accept the options.
    """
    target = _load(name)
    try:
        if inspect.isclass(target):
            method = "text" if kind == "pretrain" else "conversation"
            function = getattr(target(**options), method)
        else:
            inspect.signature(target).bind(None, **options)
            function = partial(target, **options)
    except Exception as error:  # the user's code may raise anything
        raise MsrlError(f"preprocess.handler={name}: {_reason(error)}") from error
    return partial(_convert, function, name, kind)


def _convert(function: Callable[[Any], Any], name: str, kind: str, row: Any) -> Any:
    """Return the result of the user's function as a text or a conversation."""
    try:
        result = function(row)
    except Exception as error:  # the user's code may raise anything
        raise MsrlError(f"handler {name}: {_reason(error)}") from error
    if result is None:
        raise DroppedRow("handler")
    if kind == "pretrain":
        if not isinstance(result, str):
            raise MsrlError(f"handler {name}: returned {type(result).__name__}, not a text")
        return result
    return _conversation(result, name)


def _conversation(result: Any, name: str) -> Conversation:
    """Return the conversation of a list of turns, or of an object with messages."""
    if isinstance(result, Conversation):
        return result
    row: dict[str, Any] = result if isinstance(result, dict) else {"messages": result}
    unknown = [key for key in row if key not in _KEYS]
    if unknown or "messages" not in row:
        raise MsrlError(
            f"handler {name}: returned an object with {', '.join(map(str, row)) or 'no keys'}. "
            f"Return a list of turns, or an object with {', '.join(_KEYS)}."
        )
    messages = list(read_messages(row["messages"]))
    check_order(messages)
    answer, extra = row.get("answer"), row.get("extra") or {}
    is_text = all(isinstance(v, str) for v in extra.values()) and isinstance(answer, str | None)
    if not is_text:
        raise MsrlError(f"handler {name}: answer and the values of extra must be text")
    tools = tools_text(row.get("tools"))
    extra = {**extra, **({"tools": tools} if tools else {})}
    return attach_images(Conversation(tuple(messages), answer, extra), row.get("images"))


@lru_cache(maxsize=8)
def _load(name: str) -> Any:
    """Execute the file and return the function or class."""
    file, _, attribute = name.rpartition(":")
    module_name = f"msrl_handler_{Path(file).stem}"
    folder = str(Path(file).resolve().parent)
    try:
        sys.path.insert(0, folder)
        return getattr(user_files.execute(file, module_name), attribute)
    except Exception as error:  # the user's code may raise anything
        raise MsrlError(f"preprocess.handler={name}: {_reason(error)}") from error
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _reason(error: Exception) -> str:
    return f"raised {type(error).__name__}: {' '.join(str(error).split())[:300]}"
