"""What a translation says: every key, in the order of its lines, or the counts in one line."""

from __future__ import annotations

from collections.abc import Sequence

from msrl.config.messages import written
from msrl.importers.translation import Fate, KeyOutcome, Translation


def full(translation: Translation) -> list[str]:
    """A line per key, group by group, and the original's defaults that were laid in."""
    lines = [summary(translation)]
    for fate in Fate:
        found = sorted((one for one in translation.outcomes if one.fate is fate), key=_place)
        if found:
            lines.append(f"{fate.value}:")
            lines += [f"  {one.given}" + (f": {one.text}" if one.text else "") for one in found]
    if translation.defaults:
        lines.append(f"defaults of {translation.system}, which no file gives:")
        lines += [f"  {key}: {written(value)}" for key, value in sorted(translation.defaults.items())]
    return lines


def summary(translation: Translation) -> str:
    """One line: how many keys met which fate."""
    counts = [(fate, sum(one.fate is fate for one in translation.outcomes)) for fate in Fate]
    told = ", ".join(f"{count} {_SHORT[fate]}" for fate, count in counts if count)
    algorithm = f" ({translation.algorithm})" if translation.algorithm else ""
    return f"{translation.name}: read as {translation.system}{algorithm}: of {len(translation.outcomes)} keys {told}"


_SHORT = {
    Fate.TOOK: "took effect",
    Fate.SAME: "leave results the same",
    Fate.OFF: "ask for nothing",
    Fate.DEAD: "have no effect in the original either",
    Fate.NOT_YET: "are not in this version yet",
}


def _place(outcome: KeyOutcome) -> tuple[str, int]:
    origin = outcome.given.origin
    return origin.name, origin.line or 0


def comments(translations: Sequence[Translation]) -> list[str]:
    """The report as comments of a YAML file."""
    return [f"# {line}" for translation in translations for line in full(translation)]
