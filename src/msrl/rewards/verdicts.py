"""Correctness of answers: the score of one source of a row, compared with a threshold.

Verifiers use different scores for right and wrong (acc: 1, -0.5 and -1), and the weighted sum of
several sources does not tell whether an answer is right.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from msrl.rewards.sources import Source
from msrl.types import Episode, Prompt, ScoredGroup

_MAX_CHARACTERS = 20_000  # of a response whose score is explained


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

    def verdicts(self, groups: Sequence[ScoredGroup]) -> list[Sequence[bool] | None]:
        """Return for each group whether its answers are right.

        The verdicts are None if nothing decides, or the deciding source left an answer undecided.

        Without a deciding source, an answer is right if the environment reports success for its
        episode. `groups` are all groups of an evaluation: see `reporting_environments`.
        """
        completions = [item for group in groups for item in group.rollout.completions]
        reporting = reporting_environments([item.episode for item in completions])
        return [self._verdicts(group, reporting) for group in groups]

    def reasons(self, response: str, answer: str, scores: Mapping[str, float]) -> dict[str, str]:
        """Return why each verifier gave its score, for those that explain it."""
        if len(response) > _MAX_CHARACTERS:
            return {}
        reasons = {
            source.label: _reason(source, response, answer)
            for source in self.sources
            if source.label in scores
        }
        return {label: reason for label, reason in reasons.items() if reason}

    def _verdicts(self, group: ScoredGroup, reporting: Set[str]) -> Sequence[bool] | None:
        label = self.source_for(group.rollout.prompt)
        if label is not None:
            if not all(label in reward.scores for reward in group.rewards):
                return None
            return [reward.scores[label] >= self.right_from for reward in group.rewards]
        episodes = [completion.episode for completion in group.rollout.completions]
        if not all(item is not None and item.environment in reporting for item in episodes):
            return None
        return [item is not None and item.success is True for item in episodes]


def _reason(source: Source, response: str, answer: str) -> str:
    module = None if source.own_function or source.verifier is None else source.module
    explain = getattr(module, "explain", None)
    if explain is None:
        return ""
    names = _parameters(explain)
    options = {name: value for name, value in source.options.items() if name in names}
    try:
        return explain(response, answer, **options)
    except Exception:  # a reason is worth less than the training that records it
        return ""


@functools.cache
def _parameters(function: Callable[..., str]) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def reporting_environments(episodes: Iterable[Episode | None]) -> Set[str]:
    """Return the names of the environments that report the success of at least one episode.

    An environment reports at its end, so the runner's limits and faults leave episodes without a
    report. With other episodes of the same environment, they count as not successful.
    """
    return {item.environment for item in episodes if item is not None and item.success is not None}
