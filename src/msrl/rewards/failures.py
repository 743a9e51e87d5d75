"""Counts of failed calls per reward source.

A source that returns no score at all in a step ends the run with `RewardSourceError`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrl.errors import MsrlError
from msrl.rewards.pool import CallResult
from msrl.rewards.sources import Source
from msrl.types import ScoredGroup

ENVIRONMENT = "environment"  # label of the rewards of an environment
MAX_ERROR_CHARACTERS = 300
_ENVIRONMENT_REMEDY = "Fix the environment"
_FAULT_REMEDIES = {
    "timeout": "Fix the environment, or raise environment.timeout_s",
    "lost": "Find what kills the processes, such as the out-of-memory killer (see dmesg)",
    "long_prompt": "Shorten the first messages, or raise rollout.max_prompt_tokens",
}
_REMEDIES = {
    "verifier": "Check the ground truths of the data, or raise timeout_s of this source",
    "function": "Fix the function, or raise timeout_s of this source",
    "url": "Check that the server responds, or raise timeout_s of this source",
    "model": "Check the reward model and its options",
    "judge": "Check that the judge responds and follows the criteria, or raise timeout_s of this "
    "source",
}


class RewardSourceError(MsrlError):
    """A reward source returned no score for any of its calls."""


@dataclass(frozen=True, slots=True)
class SourceCalls:
    """Calls of one reward source.

    `failures` counts the failed calls by kind. `last_error` is the last error as one line.
    """

    setting: str
    remedy: str
    num_calls: int
    failures: Mapping[str, int]
    last_error: str

    @property
    def num_failed(self) -> int:
        """Number of calls without a score, including skipped calls."""
        return sum(self.failures.values())

    @property
    def has_no_score(self) -> bool:
        return 0 < self.num_calls == self.num_failed

    @property
    def was_stopped(self) -> bool:
        """True if calls were skipped because earlier calls failed."""
        return self.failures.get("skipped", 0) > 0

    def plus(self, other: SourceCalls) -> SourceCalls:
        """Return the sum of two counts of the same source."""
        failures = Counter(self.failures) + Counter(other.failures)
        return SourceCalls(
            self.setting,
            other.remedy if other.last_error else self.remedy,
            self.num_calls + other.num_calls,
            dict(failures),
            other.last_error or self.last_error,
        )


def count_calls(number: int, source: Source, results: Sequence[CallResult]) -> SourceCalls:
    """Count the call results of `reward.sources[number]`."""
    failed = [result for result in results if result.failure]
    errors = [result.detail for result in failed if result.failure != "skipped"]
    failures = Counter(str(result.failure) for result in failed)
    setting = f"reward.sources[{number}].{source.kind}={getattr(source, source.kind)}"
    if source.name is not None:
        setting += f" (name={source.name})"
    last_error = error_line(errors[-1]) if errors else ""
    return SourceCalls(setting, _REMEDIES[source.kind], len(results), dict(failures), last_error)


def join_calls(
    first: Mapping[str, SourceCalls], second: Mapping[str, SourceCalls]
) -> dict[str, SourceCalls]:
    """Return the sum of two counts, by the label of the source."""
    total = dict(first)
    for label, calls in second.items():
        total[label] = total[label].plus(calls) if label in total else calls
    return total


def require_scores(
    calls: Mapping[str, SourceCalls], where: str, *, only_stopped: bool = False
) -> None:
    """Raise RewardSourceError if a source returned no score at all.

    Args:
        calls: Counts by the label of the source.
        where: Step or evaluation for the error message.
        only_stopped: Ignore sources that did not yet fail often enough to have calls skipped.
    """
    silent = [source for source in calls.values() if source.has_no_score]
    if only_stopped:
        silent = [source for source in silent if source.was_stopped]
    if silent:
        raise RewardSourceError("\n".join(_message(source, where) for source in silent))


def episode_calls(groups: Sequence[ScoredGroup]) -> SourceCalls:
    """Return the number of episodes and faults as calls of a reward source.

    The remedy comes from the last fault.
    """
    episodes = [item.episode for group in groups for item in group.rollout.completions]
    faults = [item.fault for item in episodes if item is not None and item.fault[0]]
    counts = Counter(reason for reason, _ in faults)
    last_reason, last_detail = faults[-1] if faults else ("", "")
    remedy = _FAULT_REMEDIES.get(last_reason, _ENVIRONMENT_REMEDY)
    return SourceCalls(ENVIRONMENT, remedy, len(episodes), dict(counts), error_line(last_detail))


def fault_notes(groups: Sequence[ScoredGroup]) -> tuple[str, ...]:
    """Return one message per kind of fault, with the row and detail of the first one."""
    counts, first = Counter[str](), dict[str, str]()
    for group in groups:
        for completion in group.rollout.completions:
            if completion.episode is not None and completion.episode.fault[0]:
                reason, detail = completion.episode.fault
                counts[reason] += 1
                text = f"prompt {group.rollout.prompt.index}: {error_line(detail)}"
                first.setdefault(reason, text)
    return tuple(
        f"{ENVIRONMENT}/{reason}: {count} episodes are not trained; first at {first[reason]}"
        for reason, count in counts.items()
    )


def error_line(detail: str) -> str:
    """Return the last error of a traceback, or any other text, as one line without the stack."""
    _, header, last = detail.rpartition("Traceback (most recent call last):\n")
    lines = last.splitlines()
    if header:
        unindented = (number for number, line in enumerate(lines) if line and not line[0].isspace())
        lines = lines[next(unindented, 0) :]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[: MAX_ERROR_CHARACTERS - 3] + "..."


def _message(source: SourceCalls, where: str) -> str:
    skipped = source.failures.get("skipped", 0)
    made = {kind: count for kind, count in source.failures.items() if kind != "skipped"}
    kinds = ", ".join(f"{count} {kind}" for kind, count in made.items())
    remainder = f"; the other {skipped} were skipped" if skipped else ""
    number = "the only call" if source.num_calls == 1 else f"all {sum(made.values())} calls"
    return (
        f"{source.setting}: {number} of {where} failed ({kinds}){remainder}. "
        f"Last error: {source.last_error}. {source.remedy}; "
        "then run again, with --resume auto to continue from the last checkpoint."
    )
