"""Report on a translation: one line per key, or one line of counts."""

from __future__ import annotations

from collections.abc import Sequence

from msrl.config.messages import written
from msrl.importers.translation import KeyOutcome, KeyStatus, Translation


def full(translation: Translation) -> list[str]:
    """Return a line per key, grouped by status, and the defaults that were filled in."""
    lines = [summary(translation)]
    for status in KeyStatus:
        outcomes = [outcome for outcome in translation.outcomes if outcome.status is status]
        if outcomes:
            lines.append(f"{status.value}:")
            lines += [_outcome_line(outcome) for outcome in sorted(outcomes, key=_position)]
    if translation.defaults:
        lines.append(f"defaults of {translation.system} for keys that no file sets:")
        defaults = sorted(translation.defaults.items())
        lines += [f"  {key}: {written(value)}" for key, value in defaults]
    return lines


def _outcome_line(outcome: KeyOutcome) -> str:
    return f"  {outcome.entry}" + (f": {outcome.text}" if outcome.text else "")


def summary(translation: Translation) -> str:
    """Return one line with the number of keys of each status."""
    statuses = [outcome.status for outcome in translation.outcomes]
    counts = [
        f"{statuses.count(status)} {_SHORT[status]}" for status in KeyStatus if status in statuses
    ]
    algorithm = f" ({translation.algorithm})" if translation.algorithm else ""
    return (
        f"{translation.name}: read as {translation.system}{algorithm}: "
        f"of {len(statuses)} keys {', '.join(counts)}"
    )


_SHORT = {
    KeyStatus.APPLIED: "took effect",
    KeyStatus.SAME: "do not change results",
    KeyStatus.OFF: "switch nothing on",
    KeyStatus.DEAD: "have no effect in the original either",
    KeyStatus.UNSUPPORTED: "are not in this version yet",
}


def _position(outcome: KeyOutcome) -> tuple[str, int]:
    origin = outcome.entry.origin
    return origin.name, origin.line or 0


def comments(translations: Sequence[Translation]) -> list[str]:
    """Return the report as comments of a YAML file."""
    return [f"# {line}" for translation in translations for line in full(translation)]
