"""Solutions with a label for each step, for process reward models.

A row has its text in one column, in which a placeholder follows every step (Math-Shepherd,
MindSpeed-LLM), or a prompt and a list of steps (TRL). The labels are a list with one entry per
step: a reward token, or true or false for the first and the second of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from msrl.data.columns import ColumnMapping, DroppedRow
from msrl.data.rows.steps import PLACEHOLDER, REWARD_TOKENS
from msrl.errors import MsrlError
from msrl.types import StepRow

KINDS = ("steps",)
COLUMNS = {
    "input": "input",
    "prompt": "prompt|question",
    "completions": "completions|steps",
    "labels": "value|labels|label",
}
REQUIRED = frozenset({"labels"})


def steps(
    row: Any,
    columns: ColumnMapping,
    *,
    placeholder_token: str = PLACEHOLDER,
    reward_tokens: Sequence[str] = REWARD_TOKENS,
) -> StepRow:
    """Return the text of a row and the reward token of each step.

    Raises:
        MsrlError: a column is missing, or a label is unknown.
        DroppedRow: the text is empty, or there is no label.
    """
    labels = columns.value(row, "labels")
    if labels is not None and not isinstance(labels, list):
        raise _label_error(columns, labels, "a list with one label per step is required")
    text = _text(row, columns, placeholder_token)
    if not text.strip():
        raise DroppedRow("empty_text")
    if not labels:
        raise DroppedRow("no_labels")
    values = cast("list[object]", labels)
    return StepRow(text, tuple(_reward_token(value, columns, reward_tokens) for value in values))


def _text(row: Any, columns: ColumnMapping, placeholder: str) -> str:
    """Return the text of a row with a placeholder after every step."""
    steps_value = columns.value(row, "completions")
    if steps_value is None:
        text = columns.value(row, "input")
        if text is None:
            raise MsrlError(
                "the row has neither 'input' nor 'completions'. Name the column of the text with "
                """--map-keys '{"input": "COLUMN"}'."""
            )
        return columns.text(row, "input")
    columns.refuse_beside(row, "completions", ("input",))
    entries: list[object] = steps_value if isinstance(steps_value, list) else [None]
    if not all(isinstance(entry, str) for entry in entries):
        path = columns.paths["completions"]
        raise MsrlError(f"column {path!r} (for 'completions') must contain a list of texts.")
    prompt = columns.text(row, "prompt")
    start = f"{prompt} " if prompt else ""
    return start + "".join(f"{step} {placeholder}\n" for step in entries)


def _reward_token(value: object, columns: ColumnMapping, reward_tokens: Sequence[str]) -> str:
    if isinstance(value, bool):
        return reward_tokens[0 if value else 1]
    if not isinstance(value, str) or value not in reward_tokens:
        known = ", ".join(reward_tokens)
        raise _label_error(columns, value, f"labels are {known} (option reward_tokens)")
    return value


def _label_error(columns: ColumnMapping, value: object, problem: str) -> MsrlError:
    path = columns.paths["labels"]
    return MsrlError(f"column {path!r} (for 'labels') contains {value!r}: {problem}.")
