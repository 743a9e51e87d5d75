"""Recorded rollouts as scored groups: interface of records, and the rollout record of a run.

A group that is read has the bits of the group that was recorded. S sequences of T tokens.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from msrl.config.loader import load
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.tracking.rollouts import (
    EpisodeRecord,
    GreedyRecord,
    RolloutRecord,
    column_names,
    iterate_records,
    iterate_values,
    read_records,
    recorded_steps,
)
from msrl.tracking.run import CONFIG
from msrl.types import (
    Completion,
    Episode,
    EpisodeTurn,
    PlacedImage,
    Prompt,
    Reward,
    RolloutGroup,
    ScoredGroup,
    TokenSequence,
    VersionRun,
)

_NEEDED = ("is_decided", "is_dropped", "extra", "episode")  # columns of version 0.9 and later
_INDEX = ("group", "sample", "is_dropped")


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Groups of a step: those that it took, and all others that it sampled."""

    taken: tuple[ScoredGroup, ...]
    dropped: tuple[ScoredGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordFacts:
    """Properties of a record that a replay must fit.

    Attributes:
        num_steps: Number of steps; 0 for a record without steps.
        num_groups: Number of groups that the steps took.
        groups_per_step: Groups that each step took; 0 for a record without steps.
        group_size: Responses of each group.
        max_prompt_tokens: Largest length of a prompt.
        max_response_tokens: Largest length of a response.
        num_epochs: Epochs of the prompts that the record has.
        temperature: Temperature of the sampling distribution; None if it is unknown.
        has_episodes: Whether the responses are episodes.
        has_greedy: Whether all groups have a greedy response.
        has_routes: Whether all responses have the routes of the engine.
        has_older_versions: Whether older policies may have sampled tokens of a step.
        has_logprobs: Whether log-probabilities of the sampling distribution are known.
    """

    num_steps: int
    num_groups: int
    groups_per_step: int
    group_size: int
    max_prompt_tokens: int
    max_response_tokens: int
    num_epochs: int
    temperature: float | None
    has_episodes: bool = False
    has_greedy: bool = False
    has_routes: bool = False
    has_older_versions: bool = False
    has_logprobs: bool = True


class Recording(Protocol):
    """Recorded rollouts."""

    facts: RecordFacts

    @abstractmethod
    def step(self, number: int) -> RecordedStep:
        """Return the groups of a step, counted from 0."""

    @abstractmethod
    def group(self, number: int) -> ScoredGroup:
        """Return a group that a step took. Groups are counted from 0 through all steps."""


class RunRecording(Recording):
    """Rollout record of a run.

    `images` returns the images of a row of the data, which the record names by their checksums.

    Raises:
        MsrlError: The run has no complete record, or one of an earlier version, or the record has
            images without `images`.
    """

    def __init__(
        self,
        run_dir: Path,
        images: Callable[[Prompt], Sequence[PlacedImage]] | None = None,
    ) -> None:
        self._files, self._images = recorded_steps(run_dir), images
        columns = [column_names(path) for path in self._files]
        for path, names in zip(self._files, columns, strict=True):
            if missing := [name for name in _NEEDED if name not in names]:
                raise MsrlError(
                    f"{path}: has no column {', '.join(missing)}, because an earlier version of "
                    "msrl wrote it. Repeat the run with this version."
                )
        if images is None and any("images" in names for names in columns):
            raise MsrlError(
                f"data.train: prompts of {run_dir} have images, which the record only names. Set "
                "it to the data of the recorded run."
            )
        self.facts = _facts(run_dir, self._files, columns)
        self._read = lru_cache(maxsize=8)(self._read_step)

    def step(self, number: int) -> RecordedStep:
        return self._read(number)

    def _read_step(self, number: int) -> RecordedStep:
        records = read_records(self._files[number])
        by_group = [list(rows) for _, rows in groupby(records, key=lambda record: record.group)]
        groups = [(rows[0].is_dropped, self._group(rows)) for rows in by_group]
        return RecordedStep(
            tuple(group for is_dropped, group in groups if not is_dropped),
            tuple(group for is_dropped, group in groups if is_dropped),
        )

    def first_record(self) -> RolloutRecord:
        """Return the first record of the run."""
        return next(iterate_records(self._files[0]))

    def group(self, number: int) -> ScoredGroup:
        step, index = divmod(number, self.facts.groups_per_step)
        return self.step(step).taken[index]

    def _group(self, records: Sequence[RolloutRecord]) -> ScoredGroup:
        first = records[0]
        prompt = self._prompt(first)
        samples = [list(rows) for _, rows in groupby(records, key=lambda record: record.sample)]
        completions = tuple(_completion(prompt, rows) for rows in samples)
        rewards = tuple(
            Reward(rows[0].reward, rows[0].scores, rows[0].is_decided) for rows in samples
        )
        greedy = None if first.greedy is None else _greedy(prompt, first.greedy, first)
        return ScoredGroup(RolloutGroup(prompt, completions), rewards, greedy)

    def _prompt(self, record: RolloutRecord) -> Prompt:
        if record.episode is None:
            token_ids = record.token_ids[~record.is_sampled]
        else:
            token_ids = np.array(record.episode.prompt_ids, np.int64)
        prompt = Prompt(record.prompt_index, token_ids, record.answer, record.extra)
        if self._images is None or not record.images:
            return prompt
        images = tuple(self._images(prompt))
        if [(placed.offset, placed.image.key) for placed in images] != [
            (image.offset, image.key) for image in record.images
        ]:
            raise MsrlError(
                f"data.train: row {prompt.index} has other images than in step {record.step} of "
                "the record. Set it to the data of the recorded run."
            )
        return Prompt(prompt.index, token_ids, prompt.answer, prompt.extra, images)


def _completion(prompt: Prompt, records: Sequence[RolloutRecord]) -> Completion:
    """Return a completion from the records of its sequences, in order."""
    first = records[0]
    runs = _merged([run for record in records for run in record.versions])
    oldest = min((run.version for run in runs), default=first.trainer_version)
    episode = None if first.episode is None else _episode(first.episode, records)
    return Completion(
        np.concatenate([record.token_ids[record.is_sampled] for record in records]),
        np.concatenate([record.behavior_logprobs[record.is_sampled] for record in records]),
        first.finish_reason,  # pyright: ignore[reportArgumentType]
        oldest,
        first.messages[-1][1] if first.episode is None else first.episode.response,
        runs if len(runs) > 1 else (),
        episode,
        first.routes if episode is None else None,
    )


def _merged(runs: Iterable[tuple[int, int]]) -> tuple[VersionRun, ...]:
    """Return run lengths of versions, of which the end of a sequence has split some."""
    by_version = groupby(runs, key=lambda run: run[0])
    return tuple(VersionRun(version, sum(n for _, n in own)) for version, own in by_version)


def _episode(values: EpisodeRecord, records: Sequence[RolloutRecord]) -> Episode:
    first = records[0]
    sequences = tuple(
        TokenSequence(record.token_ids, record.is_sampled, record.routes) for record in records
    )
    turns = tuple(
        EpisodeTurn(**{**turn, "tool_calls": tuple(json.loads(turn["tool_calls"]))})
        for turn in first.turns
    )
    messages = first.messages[1:] if first.messages[0][0] == "prompt" else first.messages
    return Episode(
        sequences,
        turns,
        tuple({"role": role, "content": content} for role, content in messages),
        first.success,
        (first.fault, values.fault_detail),
        values.truncated_messages,
        values.environment,
        values.repeats,
    )


def _greedy(prompt: Prompt, values: GreedyRecord, record: RolloutRecord) -> ScoredGroup:
    token_ids = np.array(values.token_ids, np.int64)
    completion = Completion(
        token_ids,
        np.zeros(0, np.float32),
        values.finish_reason,  # pyright: ignore[reportArgumentType]
        record.trainer_version,
        values.response,
    )
    reward = Reward(values.reward, values.scores, values.is_decided)
    return ScoredGroup(RolloutGroup(prompt, (completion,)), (reward,))


def _facts(run_dir: Path, files: Sequence[Path], columns: Sequence[frozenset[str]]) -> RecordFacts:
    """Return the properties of a record from its index and the configuration of its run.

    Raises:
        MsrlError: The steps or groups of the record differ in size.
    """
    counts = {path: _sizes(iterate_values(path, *_INDEX)) for path in files}
    sizes = {size for groups in counts.values() for size, _ in groups}
    taken = {sum(not is_dropped for _, is_dropped in groups) for groups in counts.values()}
    if len(sizes) != 1 or len(taken) != 1:
        raise MsrlError(
            f"{run_dir}: the groups or steps of the rollout record differ in size, because the "
            "run was resumed with another rollout.samples_per_prompt, or files were changed. "
            "Repeat the run."
        )
    config, (group_size,), (groups_per_step,) = run_config(run_dir), sizes, taken
    rollout = config.rollout
    return RecordFacts(
        num_steps=len(files),
        num_groups=len(files) * groups_per_step,
        groups_per_step=groups_per_step,
        group_size=group_size,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
        num_epochs=config.train.epochs or 1,
        temperature=rollout.sampling.temperature,
        has_episodes=config.environment.is_on,
        has_greedy=all("greedy" in names for names in columns),
        has_routes=all("routes" in names for names in columns),
        has_older_versions=rollout.asynchronous.is_on,
    )


def _sizes(rows: Iterable[tuple[Any, ...]]) -> list[tuple[int, bool]]:
    """Return the number of samples of each group, and whether the step dropped it."""
    groups = dict[int, tuple[int, bool]]()
    for group, sample, is_dropped in rows:
        size, _ = groups.get(group, (0, False))
        groups[group] = max(size, sample + 1), is_dropped
    return list(groups.values())


def run_config(run_dir: Path) -> Config:
    """Return the configuration of a recorded run. Raises MsrlError if its folder has none."""
    path = run_dir / CONFIG
    if not path.is_file():
        raise MsrlError(f"{run_dir}: contains no {CONFIG}. Name the folder of a run.")
    return load([str(path)]).config
