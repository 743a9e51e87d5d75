"""Lists of turns in other forms: JSON text, a table of lists, and pairs of human and assistant.

The `reward_model` of verl is read from JSON text, too.

| form | written by |
|---|---|
| `'[{"role": "user", "content": ...}, ...]'` | ROLL, CSV files |
| `{"role": ["user", ...], "content": [...]}` | the feature `Sequence` of `datasets` |
| `[{"human": ..., "assistant": ...}, ...]` | Firefly, ms-swift |
"""

from __future__ import annotations

from typing import Any, cast

from msrl.data.columns import is_null
from msrl.data.rows.formats import TURN_COLUMNS, is_turns
from msrl.strict_json import loads

_COLUMNS = (*TURN_COLUMNS, "prompt")
_PAIR = {"human", "assistant"}


def with_turn_lists(row: Any) -> Any:
    """Return a row whose columns of turns are lists of turns."""
    if not isinstance(row, dict):
        return row
    columns = cast("dict[str, Any]", row)
    read = {name: _turn_list(columns[name]) for name in _COLUMNS if name in columns}
    changed: dict[str, Any] = {name: turns for name, turns in read.items() if turns is not None}
    reward = columns.get("reward_model")
    if isinstance(reward, str) and reward.lstrip().startswith("{"):
        changed["reward_model"] = _json(reward) or reward
    return {**columns, **changed} if changed else columns


def _turn_list(value: Any) -> list[Any] | None:
    """Return the turns of a value in another form, or None."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _json(value)
        return _turn_list(value) or (value if is_turns(value) else None)
    if isinstance(value, dict):
        return _zip_turns(cast("dict[str, Any]", value))
    if isinstance(value, list) and value and all(_is_pair(turn) for turn in value):
        return [turn for pair in cast("list[dict[str, Any]]", value) for turn in _split(pair)]
    return None


def _json(text: str) -> Any:
    """Return the value of a JSON text, or None if it is none."""
    try:
        return loads(text)
    except (ValueError, RecursionError):
        return None


def _zip_turns(table: dict[str, Any]) -> list[Any] | None:
    """Return the turns of a table with a list for each key, or None. Nulls are padding."""
    lists = [*table.values()]
    if not all(isinstance(item, list) for item in lists) or len({*map(len, lists)}) != 1:
        return None
    rows = (zip(table, values, strict=True) for values in zip(*lists, strict=True))
    turns = [{name: value for name, value in row if not is_null(value)} for row in rows]
    return turns if is_turns(turns) else None


def _is_pair(turn: Any) -> bool:
    return (
        isinstance(turn, dict)
        and turn.keys() >= _PAIR
        and all(isinstance(turn[name], str) for name in _PAIR)
    )


def _split(pair: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the question and the answer of a pair. Other keys belong to the answer."""
    others = {name: value for name, value in pair.items() if name not in _PAIR}
    question = {"role": "user", "content": pair["human"]}
    return question, {"role": "assistant", "content": pair["assistant"], **others}
