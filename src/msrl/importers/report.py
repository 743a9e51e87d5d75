"""Report on a translation: one line per key, or one line of counts."""

from __future__ import annotations

from msrl.config.messages import written
from msrl.importers.secrets import mask_secrets
from msrl.importers.status import HEADINGS, KeyStatus
from msrl.importers.translation import KeyResult, Translation
from msrl.limits import one_line


def full(translation: Translation) -> list[str]:
    """Return a line per key, grouped by status, and the defaults that were filled in."""
    lines = [summary(translation)]
    for heading in HEADINGS:
        key_results = [item for item in translation.key_results if item.status.heading == heading]
        if key_results:
            lines.append(f"{heading}:")
            lines += [_result_line(key_result) for key_result in sorted(key_results, key=_position)]
    if translation.differences or translation.remarks:
        lines.append("results differ from the original:")
        lines += [f"  {line}" for line in (*translation.differences, *translation.remarks)]
    if translation.notes:
        lines.append("read differently than by bash:")
        lines += [f"  {line}" for line in translation.notes]
    if translation.defaults:
        lines.append(f"defaults of {translation.system} for keys that no file sets:")
        defaults = sorted(translation.defaults.items())
        lines += [f"  {key}: {written(value)}" for key, value in defaults]
    return [mask_secrets(one_line(line)) for line in lines]


def _result_line(key_result: KeyResult) -> str:
    qualified = (KeyStatus.OFF, KeyStatus.DEAD, KeyStatus.UNSUPPORTED)
    reason = key_result.status.value if key_result.status in qualified else ""
    return ": ".join(text for text in (f"  {key_result.entry}", reason, key_result.text) if text)


def summary(translation: Translation) -> str:
    """Return one line with the number of keys of each status."""
    headings = [key_result.status.heading for key_result in translation.key_results]
    counts = [
        f"{headings.count(heading)} {_SHORT.get(heading, heading)}"
        for heading in HEADINGS
        if heading in headings
    ]
    algorithm = f" ({translation.algorithm})" if translation.algorithm else ""
    return (
        f"{translation.name}: read as {translation.system}{algorithm}: "
        f"of {len(headings)} keys {', '.join(counts)}"
    )


_SHORT = {
    KeyStatus.SAME.value: "with the same results",
    KeyStatus.SPEED.value: "change memory or speed only",
}


def _position(key_result: KeyResult) -> tuple[str, int]:
    origin = key_result.entry.origin
    return origin.name, origin.line or 0
