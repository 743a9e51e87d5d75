"""Scoring of rollouts: the reward of a completion is the weighted sum of its sources' scores.

Calls that time out, crash or raise are counted and reported. The source's `on_failure` decides how
they score:

- `wrong`: as a wrong response.
- `undecided`: not at all. The completion has no advantage and counts in no statistic of rewards.
- `fail`: the run ends with an MsrlError.

A source that returns no score at all in a step or an evaluation always ends the run
(`Scores.require_scores`).
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from msrl.errors import MsrlError
from msrl.models.hf_config import ReadConfig, read_hf_config
from msrl.rewards.failures import (
    ENVIRONMENT,
    SourceCalls,
    count_calls,
    episode_calls,
    fault_notes,
    join_calls,
    require_scores,
)
from msrl.rewards.image_files import ImageFiles
from msrl.rewards.models.on_ranks import RankModel
from msrl.rewards.pool import Call, CallResult, Pool
from msrl.rewards.remote import Item
from msrl.rewards.rows import RowSources, row_columns
from msrl.rewards.shaping import with_environment, with_neutral_totals
from msrl.rewards.sources import Source, check_sources
from msrl.types import Completion, Ints, Prompt, Reward, RolloutGroup, ScoredGroup
from msrl.vision.shown import shown_ids

__all__ = ["Scorer", "Scores", "Source", "check_functions"]
_CallKey = tuple[int, int, int]  # group, completion, source
_CallResults = Mapping[_CallKey, CallResult]
_RETRIED = "/retried"
_POLICY_TEXTS = {"wrong": "scored as wrong", "undecided": "left undecided"}


@dataclass(frozen=True, slots=True)
class Scores:
    """Scored groups in the order of the rollouts, and the failures of their calls.

    Attributes:
        groups: Scored groups.
        failures: Counts of `SOURCE/timeout`, `SOURCE/crash`, `SOURCE/error`, `SOURCE/skipped`
            (calls not made because earlier calls failed) and `SOURCE/retried` (repeated requests).
        notes: One message per kind of failure, with the row and reason of the first one.
        calls: Counts of calls by the label of the source.
        usage: What the requests to judges took, as `SOURCE/requests`, `SOURCE/prompt_tokens` etc.
    """

    groups: tuple[ScoredGroup, ...]
    failures: Mapping[str, int]
    notes: tuple[str, ...]
    calls: Mapping[str, SourceCalls] = field(default_factory=dict[str, SourceCalls])
    usage: Mapping[str, float] = field(default_factory=dict[str, float])

    def plus(self, other: Scores) -> Scores:
        """Return the concatenated groups and notes and the summed counts of two scorings."""
        failures = Counter[str](self.failures) + Counter[str](other.failures)
        return Scores(
            self.groups + other.groups,
            dict(failures),
            self.notes + other.notes,
            join_calls(self.calls, other.calls),
            dict(Counter[str](self.usage) + Counter[str](other.usage)),
        )

    def require_scores(self, where: str, *, only_stopped: bool = False) -> None:
        """Raise RewardSourceError if all calls of a source failed. See `failures`."""
        require_scores(self.calls, where, only_stopped=only_stopped)

    def means(self) -> dict[str, float]:
        """Return the mean score of each source over the completions that it scored."""
        scores: dict[str, list[float]] = defaultdict(list)
        rewards = [reward for group in self.groups for reward in group.rewards]
        for reward in rewards:
            for name, score in reward.scores.items():
                scores[name].append(score)
        return {name: sum(values) / len(values) for name, values in scores.items()}


def check_functions(sources: Sequence[Source]) -> None:
    """Load the users' functions among the sources in a worker process, as a run does.

    Raises:
        MsrlError: A file cannot be imported, or it does not define the function.
    """
    functions = [
        source.worker_function(number)
        for number, source in enumerate(sources)
        if source.own_function is not None
    ]
    if functions:
        with Pool(functions, num_workers=1) as pool:
            pool.start()


class Scorer:
    """Context manager that scores completions with reward sources.

    Args:
        sources: Entries of `reward.sources`.
        num_workers: Number of processes for verifiers and functions.
        prompt_text: Function that decodes tokens, with special ones, for servers and models. An
            image is one token.
        read_config: Function that returns the config.json of a reward model's folder.
        environment_weight: Weight of the rewards of an environment, which makes sources optional;
            None if a response is one turn.
        is_optional: Whether there may be no source, so that every reward is 0.

    Raises:
        ManyErrors: `sources.mistakes` finds mistakes. No process is started.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        num_workers: int,
        *,
        prompt_text: Callable[[Ints], str] | None = None,
        read_config: ReadConfig = read_hf_config,
        environment_weight: float | None = None,
        is_optional: bool = False,
    ) -> None:
        self._environment_weight = environment_weight
        has_none = not sources and (is_optional or environment_weight is not None)
        self._sources = () if has_none else check_sources(sources, read_config)
        numbers = range(len(self._sources))
        self._in_pool = [s for s in numbers if self._sources[s].in_pool]
        self._clients = {
            s: self._sources[s].client(read_config) for s in numbers if s not in self._in_pool
        }
        self._rows = RowSources(self._sources, is_optional=has_none)
        self._prompt_text = prompt_text or (lambda _: "")
        functions = [self._sources[s].worker_function(s) for s in self._in_pool]
        self._image_readers = {n for n, each in enumerate(functions) if each.reads_images}
        self._pool = Pool(functions, num_workers) if functions else None
        self._lock = threading.Lock()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def rank_models(self) -> dict[str, RankModel]:
        """Reward models on the training ranks by the label of their source, to be connected."""
        models: dict[str, RankModel] = {}
        for s, client in self._clients.items():
            if isinstance(client, RankModel):
                models[self._sources[s].label] = client
        return models

    def close(self) -> None:
        """Close the pool and the clients."""
        if self._pool is not None:
            self._pool.close()
        for client in self._clients.values():
            client.close()

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise MsrlError for the first row that cannot be scored."""
        self._rows.check(prompts)

    def score(self, groups: Sequence[RolloutGroup]) -> Scores:
        """Score the decoded text of all completions against the ground truth of their prompts.

        Calls of several threads run one after the other.

        Raises:
            MsrlError: A source cannot use the ground truth of a prompt, no source applies to the
                tag of a prompt, or a source with `on_failure: fail` failed.
        """
        with self._lock:
            return self._score(groups)

    def _score(self, groups: Sequence[RolloutGroup]) -> Scores:
        sources = [self._rows.select(group.prompt) for group in groups]
        keys: list[_CallKey] = []
        for g, group in enumerate(groups):
            keys += [(g, c, s) for c in range(len(group.completions)) for s in sources[g]]
        results = self._call_sources(groups, keys)
        failures, notes = self._failures(results, groups)
        scored = [self._score_group(g, groups[g], sources[g], results) for g in range(len(groups))]
        counts = self._take_counts()
        failures |= {name: int(n) for name, n in counts.items() if name.endswith(_RETRIED)}
        usage = {name: n for name, n in counts.items() if not name.endswith(_RETRIED)}
        scores = Scores(tuple(scored), failures, notes, self._count_calls(results), usage)
        weight = self._environment_weight
        if weight is not None:
            scores = _with_environment(scores, weight)
        return replace(scores, groups=tuple(with_neutral_totals(group) for group in scores.groups))

    def _count_calls(self, results: _CallResults) -> dict[str, SourceCalls]:
        """Return the counts of calls by the label of the source."""
        by_source: dict[int, list[CallResult]] = defaultdict(list)
        for (_, _, s), result in results.items():
            by_source[s].append(result)
        counts: dict[str, SourceCalls] = {}
        for s, calls in by_source.items():
            counts[self._sources[s].label] = count_calls(s, self._sources[s], calls)
        return counts

    def _call_sources(
        self, groups: Sequence[RolloutGroup], keys: Sequence[_CallKey]
    ) -> _CallResults:
        """Call all sources. Servers and models run concurrently with the pool."""
        results: dict[_CallKey, CallResult] = {}
        client_keys: dict[int, list[_CallKey]] = {}
        for s in self._clients:
            client_keys[s] = [key for key in keys if key[2] == s]
        with ThreadPoolExecutor(max(1, len(self._clients))) as threads:
            running: dict[int, Future[list[CallResult]]] = {}
            for s, own_keys in client_keys.items():
                if own_keys:
                    items = self._items(groups, own_keys)
                    running[s] = threads.submit(self._clients[s].score, items)
            results.update(self._call_pool(groups, keys))
            for s, future in running.items():
                results.update(zip(client_keys[s], future.result(), strict=True))
        return {key: results[key] for key in keys}

    def _call_pool(self, groups: Sequence[RolloutGroup], keys: Sequence[_CallKey]) -> _CallResults:
        if self._pool is None:
            return {}
        pool_keys = [key for key in keys if key[2] in self._in_pool]
        # Score the first completion of every prompt, then the second, and so on. A prompt on which
        # a source always hangs then does not delay the source's first calls of other prompts.
        pool_keys.sort(key=lambda key: key[1])
        with ImageFiles() as files:
            results = self._pool.map(self._calls(groups, pool_keys, files))
        return dict(zip(pool_keys, results, strict=True))

    def _calls(
        self, groups: Sequence[RolloutGroup], keys: Iterable[_CallKey], files: ImageFiles
    ) -> list[Call]:
        calls: list[Call] = []
        for g, c, s in keys:
            prompt, completion = groups[g].prompt, groups[g].completions[c]
            function = self._in_pool.index(s)
            columns = row_columns(prompt, completion)
            images = files.paths(prompt) if function in self._image_readers else ()
            calls.append(Call(function, completion.text, prompt.answer, columns, images))
        return calls

    def _items(self, groups: Sequence[RolloutGroup], keys: Iterable[_CallKey]) -> list[Item]:
        prompt_ids = [shown_ids(group.prompt) for group in groups]
        prompt_texts = [self._prompt_text(token_ids) for token_ids in prompt_ids]
        items: list[Item] = []
        for g, c, _ in keys:
            prompt, completion = groups[g].prompt, groups[g].completions[c]
            columns = row_columns(prompt, completion)
            decoded = self._decode(prompt_ids[g], prompt_texts[g], completion)
            items.append(Item(prompt_texts[g], completion.text, prompt.answer, columns, decoded))
        return items

    def _decode(self, prompt_ids: Ints, prompt_text: str, completion: Completion) -> str:
        """Return the text of all tokens of a response, also of special ones.

        For an episode of several turns, it is the text of their answers and the token that ended
        the last one.
        """
        token_ids = completion.token_ids
        if not len(token_ids):
            return ""
        if completion.episode is None:
            # Decoded alone, the response may lose the space before its first word.
            text = self._prompt_text(np.concatenate((prompt_ids, token_ids)))
            if text.startswith(prompt_text):
                return text.removeprefix(prompt_text)
        text = self._prompt_text(token_ids)
        if completion.episode is None or text.startswith(completion.text):
            return text
        last = self._prompt_text(token_ids[-1:])
        lacks_end = completion.finish_reason == "stop" and not completion.text.endswith(last)
        return completion.text + last if lacks_end else completion.text

    def _score_group(
        self, g: int, group: RolloutGroup, sources: Sequence[int], results: _CallResults
    ) -> ScoredGroup:
        count = range(len(group.completions))
        rewards: list[Reward] = []
        for c in count:
            rewards.append(self._reward({s: results[g, c, s] for s in sources}))
        return ScoredGroup(group, tuple(rewards))

    def _reward(self, results: Mapping[int, CallResult]) -> Reward:
        """Return the reward of a completion. A failed call decides nothing, or counts as wrong."""
        total, scores, is_decided = 0.0, dict[str, float](), True
        for s, result in results.items():
            source, score = self._sources[s], result.score
            if score is None and source.policy != "undecided":
                score = source.wrong_score
            if score is None:
                is_decided = is_decided and source.weight == 0
                continue
            total += source.weight * score
            scores[source.label] = score
        return Reward(total, scores, is_decided)

    def _failures(
        self, results: _CallResults, groups: Sequence[RolloutGroup]
    ) -> tuple[dict[str, int], tuple[str, ...]]:
        """Return the counts of failures and one note per kind."""
        counts: Counter[tuple[int, str]] = Counter()
        first: dict[tuple[int, str], str] = {}
        for (g, _, s), result in results.items():
            if result.failure is None:
                continue
            source = self._sources[s]
            text = f"prompt {groups[g].prompt.index}: {result.detail.strip()}"
            if source.policy == "fail":
                message = f"{source.label} failed ({result.failure}) at {text}"
                raise MsrlError(f"reward.sources: {message}")
            counts[s, result.failure] += 1
            first.setdefault((s, result.failure), text)
        failures: dict[str, int] = {}
        notes: list[str] = []
        for (s, kind), count in counts.items():
            name = f"{self._sources[s].label}/{kind}"
            failures[name] = count
            effect = _POLICY_TEXTS[self._sources[s].policy]
            notes.append(f"{name}: {count} {effect}; first at {first[s, kind]}")
        return failures, tuple(notes)

    def _take_counts(self) -> dict[str, float]:
        """Return the counts of the clients since the previous call."""
        return {
            f"{self._sources[s].label}/{name}": number
            for s, client in self._clients.items()
            for name, number in client.take_counts().items()
        }


def _with_environment(scores: Scores, weight: float) -> Scores:
    """Return scores with the rewards and faults of environments."""
    groups = tuple(with_environment(group, weight) for group in scores.groups)
    calls = episode_calls(groups)
    failures = {f"{ENVIRONMENT}/{reason}": count for reason, count in calls.failures.items()}
    return Scores(
        groups,
        {**scores.failures, **failures},
        scores.notes + fault_notes(groups),
        {**scores.calls, ENVIRONMENT: calls},
        scores.usage,
    )
