"""Which answers are right: what one source of a row says, held against a score from which on an answer is.

The scores of verifiers are kinds of right and wrong (acc gives 1, -0.5 and -1), and the weighted sum of several sources is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msrl.rewards.sources import Source
from msrl.types import Prompt, ScoredGroup


@dataclass(frozen=True, slots=True)
class Judge:
    """Tells right from wrong by the source named `wanted`.

    Unnamed, it is the first one for the row of those that compare with a ground truth, else the first verifier or function: servers and
    models give no score that means right, unless they are named.
    """

    sources: tuple[Source, ...]
    wanted: str | None = None
    right_from: float = 1.0

    def source_for(self, prompt: Prompt) -> str | None:
        """The name of the source that decides on answers to a prompt; None where there is none."""
        mine = [source for source in self.sources if source.applies_to(prompt.extra)]
        if self.wanted is not None:
            return next((source.label for source in mine if source.label == self.wanted), None)
        decided = [source for source in mine if source.in_pool]
        return next((source.label for source in sorted(decided, key=lambda source: not source.needs_answer)), None)

    def verdicts(self, group: ScoredGroup) -> Sequence[bool] | None:
        """Whether each answer is right; None where no source decides."""
        name = self.source_for(group.rollout.prompt)
        return None if name is None else [reward.scores[name] >= self.right_from for reward in group.rewards]
