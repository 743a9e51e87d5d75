"""Dataset handlers: one module each, selected by `handler: NAME`, the name of its file.

A handler module defines:

- `KINDS`: the kinds of data that it can produce, the default first
- `COLUMNS`: its fields and their default columns
- `REQUIRED`: the required fields
- `conversation(row, columns, *, options) -> Conversation`, or `text(row, columns)` for pretraining

The class names of MindSpeed's handlers are accepted as aliases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from msrl import registry
from msrl.data.columns import ColumnMapping, make_columns
from msrl.errors import MsrlError, nearest

Kind = Literal["pretrain", "sft", "prompts"]


ALIASES = {
    "GeneralPretrainHandler": "pretrain",
    "AlpacaStyleInstructionHandler": "alpaca",
    "SharegptStyleInstructionHandler": "sharegpt",
    "OpenAIInstructionHandler": "sharegpt",
    "R1AlpacaStyleInstructionHandler": "r1",
    "R1SharegptStyleInstructionHandler": "sharegpt",
    "PPOAlpacaStyleInstructionHandler": "r1",
    "Math17kAlpacaStyleInstructionHandler": "r1",
}
# Columns and kinds that MindSpeed's handlers imply.
_IMPLIED_COLUMNS = {
    "Math17kAlpacaStyleInstructionHandler": {
        "prompt": "prompt",
        "query": "",
        "response": "reward_model.ground_truth",
    },
}
_IMPLIED_KINDS = {"R1SharegptStyleInstructionHandler": "prompts"}


@dataclass(frozen=True, slots=True)
class Handler:
    """A handler with the user's settings. `kind` is the kind of data that it produces."""

    name: str
    kind: Kind
    columns: ColumnMapping
    options: Mapping[str, Any]

    @property
    def module(self) -> ModuleType:
        """The module of the plugin."""
        return registry.load(__name__, self.name, key="preprocess.handler")


def handler_names() -> tuple[str, ...]:
    """Return all names that `make_handler` accepts."""
    return (*registry.names(__name__), *sorted(ALIASES))


def make_handler(
    name: str, *, kind: str | None, map_keys: Mapping[str, str], options: Mapping[str, Any]
) -> Handler:
    """Return the handler `name` with the user's settings.

    Raises:
        MsrlError: the name, a field or an option is unknown, or the handler cannot produce `kind`.
    """
    if name not in handler_names():
        hint = nearest(name, handler_names())
        raise MsrlError(f"preprocess.handler={name}: unknown handler; {hint}")
    plugin = ALIASES.get(name, name)
    module = registry.load(__name__, plugin, key="preprocess.handler")
    resolved_kind: Any = kind or _IMPLIED_KINDS.get(name) or module.KINDS[0]
    if resolved_kind not in module.KINDS:
        kinds = " or ".join(module.KINDS)
        raise MsrlError(
            f"preprocess.kind={resolved_kind}: handler {name} produces {kinds} data only"
        )
    mapped = {**_IMPLIED_COLUMNS.get(name, {}), **map_keys}
    columns = make_columns(module.COLUMNS, module.REQUIRED, mapped)
    function = module.text if resolved_kind == "pretrain" else module.conversation
    checked = registry.check_options(function, options, key="preprocess.options")
    return Handler(plugin, resolved_kind, columns, checked)
