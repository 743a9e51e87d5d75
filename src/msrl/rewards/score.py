"""From rollouts to rewards: every source scores every completion that it is for, a completion's total is the weighted sum.

What times out, crashes or raises is counted and said. By the source's `on_failure` it scores as wrong; or stays undecided, which is the
mean of the source's other scores in the group (0.0 where there is none), so that it teaches nothing; or ends the run (MsrlError).
A source that gives no score at all in a step or an evaluation always ends the run (`Scores.require_scores`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from msrl.errors import MsrlError
from msrl.rewards.failures import SourceCalls, count_calls, join_calls, require_scores
from msrl.rewards.models.on_ranks import RankModel
from msrl.rewards.pool import DEFAULT_MEMORY_BYTES, Call, CallResult, Pool
from msrl.rewards.remote import Item
from msrl.rewards.rows import RowSources
from msrl.rewards.sources import Source, checked
from msrl.types import Ints, Prompt, Reward, RolloutGroup, ScoredGroup

__all__ = ["Scorer", "Scores", "Source"]
_Place = tuple[int, int, int]  # group, completion, source
_Outcomes = Mapping[_Place, CallResult]


@dataclass(frozen=True, slots=True)
class Scores:
    """Scored groups in the order of the rollouts; `failures` counts `source/timeout`, `source/crash`, `source/error`,
    `source/skipped`, calls that were not made because those before them failed, and `source/retried`, requests that a server had to get
    again.

    `notes` has one message for each kind of failure that occurred, with the first one's row and reason. `calls` counts by source.
    """

    groups: tuple[ScoredGroup, ...]
    failures: Mapping[str, int]
    notes: tuple[str, ...]
    calls: Mapping[str, SourceCalls] = field(default_factory=dict[str, SourceCalls])

    def joined(self, other: Scores) -> Scores:
        """Return the scores of both, `other`'s groups behind these."""
        failures = Counter[str](self.failures) + Counter[str](other.failures)
        return Scores(self.groups + other.groups, dict(failures), self.notes + other.notes, join_calls(self.calls, other.calls))

    def require_scores(self, where: str, *, only_stopped: bool = False) -> None:
        """Raise RewardSourceError if all calls of a source failed; with `only_stopped`, if some were also skipped for that."""
        require_scores(self.calls, where, only_stopped=only_stopped)

    def means(self) -> dict[str, float]:
        """Each source's mean score over the completions that it was for."""
        scores: dict[str, list[float]] = defaultdict(list)
        for group in self.groups:
            for reward in group.rewards:
                for name, score in reward.scores.items():
                    scores[name].append(score)
        return {name: sum(values) / len(values) for name, values in scores.items()}


class Scorer:
    """Scores completions with `sources`, verifiers and functions in `num_workers` processes; a context manager.

    `prompt_text` decodes prompts for servers and models. Raises ManyErrors, before any process starts, for everything that
    `sources.mistakes` finds.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        num_workers: int,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        prompt_text: Callable[[Ints], str] | None = None,
    ) -> None:
        self._sources = checked(sources)
        self._in_pool = [number for number, source in enumerate(self._sources) if source.in_pool]
        self._clients = {number: source.client() for number, source in enumerate(self._sources) if not source.in_pool}
        self._rows = RowSources(self._sources)
        self._prompt_text = prompt_text or (lambda _: "")
        functions = [self._sources[number].worker_function(number) for number in self._in_pool]
        self._pool = Pool(functions, num_workers, memory_bytes=memory_bytes) if functions else None

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rank_models(self) -> dict[str, RankModel]:
        """The reward models that stand on the training ranks, by the names of their sources; they wait to be connected."""
        return {self._sources[s].label: client for s, client in self._clients.items() if isinstance(client, RankModel)}

    def close(self) -> None:
        """End the processes."""
        for end in (self._pool, *self._clients.values()):
            if end is not None:
                end.close()

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise MsrlError for the first row that cannot be scored, before any is."""
        self._rows.check(prompts)

    def score(self, groups: Sequence[RolloutGroup]) -> Scores:
        """The rewards of all completions, by their decoded text and their prompt's answer.

        Raises MsrlError when a source cannot use the ground truth of a prompt, when no source is for a prompt's tag, and when a source
        with `on_failure: fail` fails.
        """
        of_group = [self._rows.of_prompt(group.prompt) for group in groups]
        places = [(g, c, s) for g, group in enumerate(groups) for c in range(len(group.completions)) for s in of_group[g]]
        outcomes = self._outcomes(groups, places)
        failures, notes = self._failures(outcomes, groups)
        scored = tuple(self._scored(g, group, of_group[g], outcomes) for g, group in enumerate(groups))
        return Scores(scored, failures, notes, self._count(outcomes))

    def _count(self, outcomes: _Outcomes) -> dict[str, SourceCalls]:
        """The calls of every source that was asked, by its label."""
        of_source: dict[int, list[CallResult]] = defaultdict(list)
        for (_, _, s), outcome in outcomes.items():
            of_source[s].append(outcome)
        return {self._sources[s].label: count_calls(s, self._sources[s], mine) for s, mine in of_source.items()}

    def _outcomes(self, groups: Sequence[RolloutGroup], places: Sequence[_Place]) -> _Outcomes:
        """What became of every call: servers and models work beside the pool."""
        outcomes: dict[_Place, CallResult] = {}
        with ThreadPoolExecutor(max(1, len(self._clients))) as threads:
            of_client = {s: [place for place in places if place[2] == s] for s in self._clients}
            running = {s: threads.submit(self._clients[s].outcomes, self._items(groups, mine)) for s, mine in of_client.items() if mine}
            # One completion of every prompt after the other: a prompt on which a source always hangs does not hold up its first calls.
            mine = sorted((place for place in places if place[2] in self._in_pool), key=lambda place: place[1])
            if self._pool is not None:
                outcomes.update(zip(mine, self._pool.map(self._calls(groups, mine)), strict=True))
            for s, answers in running.items():
                outcomes.update(zip(of_client[s], answers.result(), strict=True))
        return {place: outcomes[place] for place in places}

    def _calls(self, groups: Sequence[RolloutGroup], places: Iterable[_Place]) -> list[Call]:
        position = {number: i for i, number in enumerate(self._in_pool)}
        return [
            Call(position[s], groups[g].completions[c].text, groups[g].prompt.answer, groups[g].prompt.extra) for g, c, s in places
        ]  # fmt: skip

    def _items(self, groups: Sequence[RolloutGroup], places: Iterable[_Place]) -> list[Item]:
        prompts = [(self._prompt_text(group.prompt.token_ids), group.prompt) for group in groups]
        return [Item(prompts[g][0], groups[g].completions[c].text, prompts[g][1].answer, prompts[g][1].extra) for g, c, _ in places]

    def _scored(self, g: int, group: RolloutGroup, numbers: Sequence[int], outcomes: _Outcomes) -> ScoredGroup:
        count = len(group.completions)
        columns = {s: self._column(self._sources[s], [outcomes[g, c, s] for c in range(count)]) for s in numbers}
        return ScoredGroup(group, tuple(self._reward({s: column[c] for s, column in columns.items()}) for c in range(count)))

    @staticmethod
    def _column(source: Source, outcomes: Sequence[CallResult]) -> list[float]:
        """One source's scores of a group, those that it could not decide filled in."""
        decided = [outcome.score for outcome in outcomes if outcome.score is not None]
        # The mean of equal numbers is not always that number in floating point, and would teach something.
        neutral = (decided[0] if len(set(decided)) == 1 else sum(decided) / len(decided)) if decided else 0.0
        missing = neutral if source.policy == "undecided" else source.wrong_score
        return [missing if outcome.score is None else outcome.score for outcome in outcomes]

    def _reward(self, scores: Mapping[int, float]) -> Reward:
        total = sum(self._sources[s].weight * score for s, score in scores.items())
        return Reward(total, {self._sources[s].label: score for s, score in scores.items()})

    def _failures(self, outcomes: _Outcomes, groups: Sequence[RolloutGroup]) -> tuple[dict[str, int], tuple[str, ...]]:
        counts: Counter[tuple[int, str]] = Counter()
        first: dict[tuple[int, str], str] = {}
        for (g, _, s), outcome in outcomes.items():
            if outcome.failure:
                what = f"prompt {groups[g].prompt.index}: {outcome.detail.strip()}"
                if self._sources[s].policy == "fail":
                    raise MsrlError(f"reward.sources: {self._sources[s].label} failed ({outcome.failure}) at {what}")
                counts[s, outcome.failure] += 1
                first.setdefault((s, outcome.failure), what)
        names = {key: f"{self._sources[key[0]].label}/{key[1]}" for key in counts}
        said = {"wrong": "scored as wrong", "undecided": "left undecided"}
        notes = tuple(f"{names[k]}: {counts[k]} {said[self._sources[k[0]].policy]}; first at {first[k]}" for k in counts)
        retried = {f"{self._sources[s].label}/retried": client.take_retried() for s, client in self._clients.items()}
        return {**{names[key]: count for key, count in counts.items()}, **{k: n for k, n in retried.items() if n}}, notes
