"""Which sources score a row of the data, and whether each of them can."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msrl.errors import MsrlError
from msrl.rewards.remote import Item
from msrl.rewards.sources import TAG, Source
from msrl.types import Prompt


class RowSources:
    """Finds the sources of a row; a ground truth is looked at once for each source."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = tuple(sources)
        self._checked: set[tuple[int, int, int]] = set()  # source, row, hash of the ground truth

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise MsrlError for the first row that cannot be scored: no source is for its tag, its ground truth or a column is missing."""
        for prompt in prompts:
            for number in self.of_prompt(prompt):
                Item("", "", "", prompt.extra).with_prompt_of(str(self._sources[number].options.get("prompt_column", "")))

    def of_prompt(self, prompt: Prompt) -> list[int]:
        """Return the numbers of the sources for a row. Raises MsrlError where there is none, or one cannot use the ground truth."""
        mine = [number for number, source in enumerate(self._sources) if source.applies_to(prompt.extra)]
        if not mine:
            tags = sorted({tag for source in self._sources for tag in source.tags})
            tag = prompt.extra.get(TAG)
            raise MsrlError(
                f"reward.sources: none is for row {prompt.index} of the data, whose tag is {tag}; they are for {', '.join(tags)}; "
                f"map the column of tags with preprocess.map_keys: {{extra.{TAG}: COLUMN}}, or add a source without tags"
            )
        for number in mine:
            key = (number, prompt.index, hash(prompt.answer))
            if key not in self._checked:
                _check_answer(number, self._sources[number], prompt)
                self._checked.add(key)
        return mine


def _check_answer(number: int, source: Source, prompt: Prompt) -> None:
    if not source.needs_answer:
        return
    if not prompt.answer.strip():
        raise MsrlError(
            f"reward.sources: {source.label} compares with the ground truth, but row {prompt.index} of the data has none; "
            "map the column of answers in preprocess.map_keys and preprocess again"
        )
    if reason := source.answer_refusal(prompt.answer):
        raise MsrlError(
            f"reward.sources[{number}].verifier={source.verifier}: the ground truth of row {prompt.index} of the data {reason}. "
            "Remove the row or correct its ground truth, and preprocess again."
        )
