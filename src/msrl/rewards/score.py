"""From rollouts to rewards: every source scores every completion, a completion's total is the weighted sum.

Verification never stops a run: what times out, crashes or raises scores as the verifier's wrong value, is counted, and is said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from msrl import registry
from msrl.errors import MsrlError
from msrl.rewards.pool import DEFAULT_MEMORY_BYTES, Call, Outcome, Pool
from msrl.rewards.worker import Function
from msrl.types import Reward, RolloutGroup, ScoredGroup

VERIFIERS = "msrl.rewards.verifiers"


@dataclass(frozen=True, slots=True)
class Source:
    """One entry of `reward.sources`: a verifier by name, its weight in the total, its limit per completion, its options."""

    verifier: str
    weight: float = 1.0
    timeout_s: float = 30.0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Scores:
    """Scored groups in the order of the rollouts; `failures` counts `verifier/timeout`, `verifier/crash` and `verifier/error`.

    `notes` has one message for each kind of failure that occurred, with the first one's row and reason.
    """

    groups: tuple[ScoredGroup, ...]
    failures: Mapping[str, int]
    notes: tuple[str, ...]


class Scorer:
    """Scores completions with `sources` in `num_workers` processes; a context manager.

    Raises MsrlError, before any process starts, for an unknown verifier, an option that it does not take, a limit that is not
    positive, a verifier that is listed twice, or no source at all.
    """

    def __init__(self, sources: Sequence[Source], num_workers: int, *, memory_bytes: int = DEFAULT_MEMORY_BYTES) -> None:
        self._sources = tuple(sources)
        self._modules = _checked(self._sources)
        functions = [
            Function(module.__name__, "score", dict(source.options), source.timeout_s)
            for source, module in zip(self._sources, self._modules, strict=True)
        ]
        self._pool = Pool(functions, num_workers, memory_bytes=memory_bytes)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        self._pool.close()

    def score(self, groups: Sequence[RolloutGroup]) -> Scores:
        """The rewards of all completions, by their decoded text and their prompt's answer.

        Raises MsrlError when a verifier compares with the ground truth and a prompt has none.
        """
        self._check_answers(groups)
        flat = [(completion.text, group.prompt) for group in groups for completion in group.completions]
        calls = [Call(s, text, prompt.answer) for text, prompt in flat for s in range(len(self._sources))]
        outcomes = self._pool.map(calls)
        rows = [outcomes[i : i + len(self._sources)] for i in range(0, len(outcomes), len(self._sources))]
        rewards = iter([self._reward(row) for row in rows])
        scored = tuple(ScoredGroup(group, tuple(next(rewards) for _ in group.completions)) for group in groups)
        return Scores(scored, *self._failures(rows, [prompt.index for _, prompt in flat]))

    def _reward(self, row: Sequence[Outcome]) -> Reward:
        scores = {
            source.verifier: module.WRONG if outcome.score is None else outcome.score
            for source, module, outcome in zip(self._sources, self._modules, row, strict=True)
        }
        return Reward(sum(source.weight * scores[source.verifier] for source in self._sources), scores)

    def _failures(self, rows: Sequence[Sequence[Outcome]], prompts: Sequence[int]) -> tuple[dict[str, int], tuple[str, ...]]:
        counts: Counter[str] = Counter()
        first: dict[str, str] = {}
        for row, prompt in zip(rows, prompts, strict=True):
            for source, outcome in zip(self._sources, row, strict=True):
                if outcome.failure:
                    name = f"{source.verifier}/{outcome.failure}"
                    counts[name] += 1
                    first.setdefault(name, f"prompt {prompt}: {outcome.detail.strip()}")
        return dict(counts), tuple(f"{name}: {counts[name]} scored as wrong; first at {text}" for name, text in first.items())

    def _check_answers(self, groups: Sequence[RolloutGroup]) -> None:
        readers = [s.verifier for s, module in zip(self._sources, self._modules, strict=True) if module.NEEDS_ANSWER]
        without = [group.prompt.index for group in groups if not group.prompt.answer.strip()]
        if readers and without:
            raise MsrlError(
                f"reward.sources: {readers[0]} compares with the ground truth, but row {without[0]} of the data has none "
                f"({len(without)} of {len(groups)} prompts of this step); map the column of answers in data.map_keys and preprocess again"
            )


def _checked(sources: Sequence[Source]) -> tuple[ModuleType, ...]:
    """The verifiers' modules, if everything about the sources is in order."""
    if not sources:
        raise MsrlError("reward.sources is empty: name at least one verifier, for instance [{verifier: acc}]")
    modules: list[ModuleType] = []
    for number, source in enumerate(sources):
        key = f"reward.sources[{number}]"
        module = registry.load(VERIFIERS, source.verifier, key=f"{key}.verifier")
        registry.check_options(module.score, source.options, key=f"{key}.options")
        if source.timeout_s <= 0:
            raise MsrlError(f"{key}.timeout_s={source.timeout_s}: the limit of {source.verifier} has to be positive")
        if module in modules:
            raise MsrlError(f"{key}.verifier={source.verifier}: listed twice; give it one entry with the sum of the weights")
        modules.append(module)
    return tuple(modules)
