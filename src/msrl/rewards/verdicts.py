"""Correctness of answers: the score of one source of a row, compared with a threshold.

Verifiers use different scores for right and wrong (acc: 1, -0.5 and -1), and the weighted sum of
several sources does not tell whether an answer is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msrl.rewards.sources import Source
from msrl.types import Prompt, ScoredGroup


@dataclass(frozen=True, slots=True)
class Judge:
    """Correctness of answers by the score of one source.

    `source` is the label of the source. Without it, the first source of the row that compares with
    a ground truth decides, or else the first verifier or function. Servers and models decide only
    if `source` names them, because their scores do not state correctness. An answer is right from a
    score of `right_from` on.
    """

    sources: tuple[Source, ...]
    source: str | None = None
    right_from: float = 1.0

    def source_for(self, prompt: Prompt) -> str | None:
        """Return the label of the source that decides on answers to a prompt, or None."""
        sources = [source for source in self.sources if source.applies_to(prompt.extra)]
        if self.source is not None:
            return self.source if self.source in {source.label for source in sources} else None
        deciding = [source for source in sources if source.in_pool]
        deciding.sort(key=lambda source: not source.needs_answer)
        return deciding[0].label if deciding else None

    def verdicts(self, group: ScoredGroup) -> Sequence[bool] | None:
        """Return for each answer of a group whether it is right, or None if no source decides.

        Without a deciding source, an environment may report whether its episode was successful.
        """
        label = self.source_for(group.rollout.prompt)
        if label is None:
            return _successes(group)
        return [reward.scores[label] >= self.right_from for reward in group.rewards]


def _successes(group: ScoredGroup) -> list[bool] | None:
    """Return whether each episode was successful; None if an environment does not report it.

    A failed environment counts as no success.
    """
    episodes = [completion.episode for completion in group.rollout.completions]
    judged = [item is not None and (item.success is not None or item.fault[0]) for item in episodes]
    if not all(judged):
        return None
    return [item is not None and item.success is True for item in episodes]
