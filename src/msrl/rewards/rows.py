"""Assignment of reward sources to the rows of the data, and checks of their ground truths."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from msrl.errors import MsrlError
from msrl.rewards.remote import Item
from msrl.rewards.sources import TAG, Source
from msrl.types import Completion, Prompt


class RowSources:
    """Assignment of sources to rows; each ground truth is checked once per source.

    With `is_optional`, rows without a source are allowed.
    """

    def __init__(self, sources: Sequence[Source], *, is_optional: bool = False) -> None:
        self._sources, self._is_optional = tuple(sources), is_optional
        self._checked: set[tuple[int, int, int]] = set()  # source, row, hash of the ground truth

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Check that every row can be scored.

        Raises:
            MsrlError: No source applies to the tag of a row, a source cannot use its ground truth,
                or a column is missing.
        """
        for prompt in prompts:
            for number in self.select(prompt):
                column = str(self._sources[number].options.get("prompt_column", ""))
                Item("", "", "", prompt.extra).use_prompt_column(column)

    def select(self, prompt: Prompt) -> list[int]:
        """Return the numbers of the sources that score a row.

        Raises:
            MsrlError: No source applies to the row, or one cannot use its ground truth.
        """
        sources = enumerate(self._sources)
        numbers = [number for number, source in sources if source.applies_to(prompt.extra)]
        if not numbers and not self._is_optional:
            raise MsrlError(self._no_source_message(prompt))
        for number in numbers:
            key = (number, prompt.index, hash(prompt.answer))
            if key not in self._checked:
                _check_answer(number, self._sources[number], prompt)
                self._checked.add(key)
        return numbers

    def _no_source_message(self, prompt: Prompt) -> str:
        tags = sorted({tag for source in self._sources for tag in source.tags})
        return (
            f"reward.sources: no source applies to row {prompt.index} of the data with tag "
            f"{prompt.extra.get(TAG)}; the sources have the tags {', '.join(tags)}. Map the tags "
            f"with preprocess.map_keys: {{extra.{TAG}: COLUMN}}, or add a source without tags."
        )


def row_columns(prompt: Prompt, completion: Completion) -> Mapping[str, str]:
    """Return the columns for verifiers: the row's columns, and the messages of an episode."""
    if completion.episode is None:
        return prompt.extra
    messages = [dict(message) for message in completion.episode.messages]
    return {**prompt.extra, "messages": json.dumps(messages, ensure_ascii=False)}


def _check_answer(number: int, source: Source, prompt: Prompt) -> None:
    if not source.needs_answer:
        return
    if not prompt.answer.strip():
        raise MsrlError(
            f"reward.sources: {source.label} needs the ground truth, but row {prompt.index} of the "
            "data has none. Map the column of answers in preprocess.map_keys and preprocess again."
        )
    if reason := source.answer_refusal(prompt.answer):
        raise MsrlError(
            f"reward.sources[{number}].verifier={source.verifier}: "
            f"the ground truth of row {prompt.index} of the data {reason}. "
            "Remove the row or correct its ground truth, and preprocess again."
        )
