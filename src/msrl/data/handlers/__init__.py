"""Dataset handlers: one module each, `handler: NAME` is its file's name.

A handler module has `KINDS` (what its rows can become, the usual one first), `COLUMNS` (its parts and their usual columns), `REQUIRED`
(the parts that must be there) and `conversation(row, columns, *, options) -> Conversation`; that of pretraining has `text(row, columns)`.
MindSpeed's class names are known too.
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
# What MindSpeed's handlers imply beyond ours: columns and kind.
_IMPLIED_COLUMNS = {
    "Math17kAlpacaStyleInstructionHandler": {"prompt": "prompt", "query": "", "response": "reward_model.ground_truth"},
}
_IMPLIED_KINDS = {"R1SharegptStyleInstructionHandler": "prompts"}


@dataclass(frozen=True, slots=True)
class Handler:
    """A handler with everything that the user chose: `module` does the work, `kind` says what comes out."""

    name: str
    kind: Kind
    columns: ColumnMapping
    options: Mapping[str, Any]

    @property
    def module(self) -> ModuleType:
        """The plugin's module."""
        return registry.load(__name__, self.name, key="preprocess.handler")


def handler_names() -> tuple[str, ...]:
    """All names that `make_handler` takes."""
    return (*registry.names(__name__), *sorted(ALIASES))


def make_handler(name: str, *, kind: str | None, map_keys: Mapping[str, str], options: Mapping[str, Any]) -> Handler:
    """The handler `name`. Raises MsrlError for an unknown name, part or option, or a kind that it cannot make."""
    if name not in handler_names():
        raise MsrlError(f"preprocess.handler={name}: there is no such handler; {nearest(name, handler_names())}")
    plugin = ALIASES.get(name, name)
    module = registry.load(__name__, plugin, key="preprocess.handler")
    wanted: Any = kind or _IMPLIED_KINDS.get(name) or module.KINDS[0]
    if wanted not in module.KINDS:
        raise MsrlError(f"preprocess.kind={wanted}: handler {name} makes {' or '.join(module.KINDS)}")
    columns = make_columns(module.COLUMNS, module.REQUIRED, {**_IMPLIED_COLUMNS.get(name, {}), **map_keys})
    function = module.text if wanted == "pretrain" else module.conversation
    return Handler(plugin, wanted, columns, registry.check_options(function, options, key="preprocess.options"))
