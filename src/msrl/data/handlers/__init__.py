"""Dataset handlers: one module each, selected by `handler: NAME`, the name of its file.

A handler module defines:

- `KINDS`: the kinds of data that it can produce, the default first
- `COLUMNS`: its fields and their default columns
- `REQUIRED`: the required fields
- `ANSWER`: optional, the required field that prompts without a ground truth may lack
- `conversation(row, columns, *, options) -> Conversation`, or `text(row, columns)` for pretraining,
  or `preference(row, columns) -> PreferenceRow` for pairs and labeled answers, or
  `steps(row, columns, *, options) -> StepRow` for step rewards

- `resolve(row, columns, kind)`: optional; the row, its columns and the function that reads it

The class names of MindSpeed's handlers are accepted as aliases, or refused with a reason.
`path/file.py:NAME` is a handler of the user; see `msrl.data.rows.own_handler`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Literal

from msrl import registry
from msrl.data.columns import ColumnMapping, make_columns
from msrl.data.rows import own_handler
from msrl.data.rows.preference import refuse_preference_columns
from msrl.errors import MsrlError, nearest
from msrl.registry import own

Kind = Literal["pretrain", "sft", "prompts", "pairs", "labeled", "steps"]
Resolved = tuple[Any, ColumnMapping, Callable[..., Any]]
_FUNCTIONS = {
    "pretrain": "text",
    "pairs": "preference",
    "labeled": "preference",
    "steps": "steps",
}


ALIASES = {
    "GeneralPretrainHandler": "pretrain",
    "SharegptPretrainHandler": "sharegpt_pretrain",
    "AlpacaStyleInstructionHandler": "alpaca",
    "SharegptStyleInstructionHandler": "sharegpt",
    "OpenAIInstructionHandler": "sharegpt",
    "R1AlpacaStyleInstructionHandler": "r1",
    "R1SharegptStyleInstructionHandler": "sharegpt",
    "PPOAlpacaStyleInstructionHandler": "r1",
    "Math17kAlpacaStyleInstructionHandler": "r1",
    "AlpacaStylePairwiseHandler": "alpaca_pairs",
    "SharegptStylePairwiseHandler": "sharegpt_pairs",
    "AlpacaStyleProcessRewardHandler": "steps",
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
_FIXED_PROMPT = "writes a fixed prompt around each row and ignores the template"
_FIXED_TEXT = "writes each row as a fixed text for pretraining"
# MindSpeed's handlers without a counterpart, with the reason and the remedy.
REFUSED = {
    "HunyuanInstructionHandler": "finds the answers by tokens of Hunyuan, a family that msrl does "
    "not train. Use sharegpt with --template native.",
    "LlamaFactoryInstructionHandler": "reads dataset_info.json. Name the files with --input and "
    "use auto, alpaca or sharegpt.",
    "GeneralInstructionHandler": f"{_FIXED_PROMPT}. Use alpaca with --template alpaca.",
    "BelleMultiTurnInstructionHandler": f"{_FIXED_PROMPT}. Convert the turns to a list of role "
    "and content and use sharegpt.",
    "MOSSInstructionHandler": f"{_FIXED_PROMPT}. Convert the turns to a list of role and content "
    "and use sharegpt.",
    "MOSSMultiTurnHandler": "writes token ids of Baichuan. Convert the turns to a list of role and "
    "content and use sharegpt with --template baichuan2.",
    "LeetcodePythonInstructionHandler": f"{_FIXED_PROMPT}. Use a handler of your own "
    "(path/file.py:NAME).",
    "AlpacaPretrainHandler": f"{_FIXED_TEXT}. Write a text column and use pretrain, or use a "
    "handler of your own (path/file.py:NAME).",
    "StackOverflowPythonPretrainHandler": f"{_FIXED_TEXT}. Write a text column and use pretrain, "
    "or use a handler of your own (path/file.py:NAME).",
}


@dataclass(frozen=True, slots=True)
class Handler:
    """A handler with the user's settings. `kind` is the kind of data that it produces."""

    name: str
    kind: Kind
    columns: ColumnMapping
    options: Mapping[str, Any]

    def converter(self) -> Callable[[Any], Any]:
        """Return the function that converts a row.

        It returns a text (pretrain), a conversation, a row of preference data, or a text with
        labeled steps.
        """
        if own.is_own(self.name):
            return own_handler.converter(self.name, self.kind, self.options)
        resolve = self.resolver()

        def convert(row: Any) -> Any:
            resolved, columns, function = resolve(row)
            return function(resolved, columns)

        return convert

    def resolver(self) -> Callable[[Any], Resolved]:
        """Return the function that returns a row, its columns and the function that reads it.

        Only handler `auto` changes the row, and has other columns for other rows.
        """
        module = registry.load(__name__, self.name, key="preprocess.handler")
        resolve = getattr(module, "resolve", None)
        if resolve is not None:
            return partial(resolve, columns=self.columns, kind=self.kind)
        read = partial(_function(module, self.kind), **self.options)
        return lambda row: (row, self.columns, read)


def handler_names() -> tuple[str, ...]:
    """Return all names that `make_handler` accepts."""
    return (*registry.names(__name__), *sorted(ALIASES))


def default_handler(inputs: Sequence[str]) -> str | None:
    """Return the handler of inputs that are all tasks of one package, or None."""
    packages = {registry.task_package(item) for item in inputs}
    return packages.pop() if len(packages) == 1 else None


def handler_mistake(name: str) -> str | None:
    """Return the reason why there is no handler of this name, or None."""
    if own.is_own(name):
        return own.mistake(name)
    if name in REFUSED:
        return REFUSED[name]
    if name not in handler_names():
        return f"unknown handler; {nearest(name, handler_names())}"
    return None


def make_handler(
    name: str, *, kind: str | None, map_keys: Mapping[str, str], options: Mapping[str, Any]
) -> Handler:
    """Return the handler `name` with the user's settings.

    Raises:
        MsrlError: the name, a field or an option is unknown, or the handler cannot produce `kind`.
    """
    if problem := handler_mistake(name):
        raise MsrlError(f"preprocess.handler={name}: {problem}")
    if own.is_own(name):
        return _own_handler(name, kind, map_keys, options)
    plugin = ALIASES.get(name, name)
    module = registry.load(__name__, plugin, key="preprocess.handler")
    resolved_kind: Any = _choose_kind(name, kind or _IMPLIED_KINDS.get(name), module.KINDS)
    if resolved_kind in ("sft", "prompts"):
        refuse_preference_columns(map_keys)
    answer = getattr(module, "ANSWER", None) if resolved_kind == "prompts" else None
    mapped = {**_IMPLIED_COLUMNS.get(name, {}), **map_keys}
    columns = make_columns(module.COLUMNS, module.REQUIRED, mapped, answer)
    function = _function(module, resolved_kind)
    checked = registry.check_options(function, options, key="preprocess.options")
    return Handler(plugin, resolved_kind, columns, checked)


def _function(module: ModuleType, kind: str) -> Callable[..., Any]:
    """Return the function of a handler's module that reads rows for a kind of data."""
    return getattr(module, _FUNCTIONS.get(kind, "conversation"))


def _own_handler(
    name: str, kind: str | None, map_keys: Mapping[str, str], options: Mapping[str, Any]
) -> Handler:
    """Return a handler from the user's file, which is executed here."""
    if map_keys:
        raise MsrlError(
            f"preprocess.map_keys: has no effect with handler {name}, which reads the rows itself. "
            "Remove it."
        )
    resolved_kind: Any = _choose_kind(name, kind, own_handler.kinds(name))
    own_handler.converter(name, resolved_kind, options)
    return Handler(name, resolved_kind, ColumnMapping({}, frozenset()), dict(options))


def _choose_kind(name: str, kind: str | None, kinds: tuple[str, ...]) -> str:
    """Return the kind of data, checked against those that the handler can produce."""
    resolved = kind or kinds[0]
    if resolved not in kinds:
        raise MsrlError(
            f"preprocess.kind={resolved}: handler {name} produces {' or '.join(kinds)} data only"
        )
    return resolved
