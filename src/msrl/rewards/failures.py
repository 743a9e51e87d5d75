"""Failed calls of reward sources, counted by source, and the error that ends a run when a source gives no score at all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msrl.errors import MsrlError
from msrl.rewards.pool import CallResult
from msrl.rewards.sources import Source

MAX_ERROR_CHARACTERS = 300
_REMEDIES = {
    "verifier": "Check the ground truths of the data, or raise timeout_s of this source",
    "function": "Fix the function, or raise timeout_s of this source",
    "url": "Check that the server answers, or raise timeout_s of this source",
    "model": "Check the reward model and its options",
}


class RewardSourceError(MsrlError):
    """A reward source that gave no score at all where it was asked."""


@dataclass(frozen=True, slots=True)
class SourceCalls:
    """The calls of one reward source. `failures` counts the failed ones by kind, `last_error` is one line."""

    setting: str
    remedy: str
    num_calls: int
    failures: Mapping[str, int]
    last_error: str

    @property
    def num_failed(self) -> int:
        """Calls without a score, skipped ones included."""
        return sum(self.failures.values())

    @property
    def has_no_score(self) -> bool:
        return 0 < self.num_calls == self.num_failed

    @property
    def was_stopped(self) -> bool:
        """Whether calls were skipped because those before them failed."""
        return self.failures.get("skipped", 0) > 0

    def joined(self, other: SourceCalls) -> SourceCalls:
        """Return the calls of both."""
        failures = Counter(self.failures) + Counter(other.failures)
        return SourceCalls(self.setting, self.remedy, self.num_calls + other.num_calls, dict(failures), other.last_error or self.last_error)


def count_calls(number: int, source: Source, outcomes: Sequence[CallResult]) -> SourceCalls:
    """Count the outcomes of `reward.sources[number]`."""
    failed = [outcome for outcome in outcomes if outcome.failure]
    made = [outcome for outcome in failed if outcome.failure != "skipped"]
    failures = Counter(str(outcome.failure) for outcome in failed)
    setting = f"reward.sources[{number}].{source.kind}={getattr(source, source.kind)}"
    setting += f" (name={source.name})" if source.name is not None else ""
    return SourceCalls(setting, _REMEDIES[source.kind], len(outcomes), dict(failures), error_line(made[-1].detail) if made else "")


def join_calls(first: Mapping[str, SourceCalls], second: Mapping[str, SourceCalls]) -> dict[str, SourceCalls]:
    """Return the calls of both by source."""
    both = dict(first)
    for label, calls in second.items():
        both[label] = both[label].joined(calls) if label in both else calls
    return both


def require_scores(calls: Mapping[str, SourceCalls], where: str, *, only_stopped: bool = False) -> None:
    """Raise RewardSourceError if a source gave no score at all; with `only_stopped`, if its calls were also skipped for that."""
    silent = [source for source in calls.values() if source.has_no_score and (source.was_stopped or not only_stopped)]
    if silent:
        raise RewardSourceError("\n".join(_message(source, where) for source in silent))


def error_line(detail: str) -> str:
    """Return the last error of a traceback in one line, without the stack; other text as one line."""
    _, mark, last = detail.rpartition("Traceback (most recent call last):\n")
    lines = last.splitlines()
    if mark:
        first = next((number for number, line in enumerate(lines) if line and not line[0].isspace()), 0)
        lines = lines[first:]
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= MAX_ERROR_CHARACTERS else text[: MAX_ERROR_CHARACTERS - 3] + "..."


def _message(source: SourceCalls, where: str) -> str:
    skipped = source.failures.get("skipped", 0)
    kinds = ", ".join(f"{count} {kind}" for kind, count in source.failures.items() if kind != "skipped")
    rest = f"; the other {skipped} were skipped" if skipped else ""
    number = "the only call" if source.num_calls == 1 else f"all {source.num_failed - skipped} calls"
    return (
        f"{source.setting}: {number} of {where} failed ({kinds}){rest}. Last error: {source.last_error}. "
        f"{source.remedy}; then run again, with --resume auto to continue from the last checkpoint."
    )
