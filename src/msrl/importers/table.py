"""Mapping of every key of another system: one table per system, in `tables/`.

A row describes one key, or several that are separated by commas, with these fields:

- `to`: native key or keys that receive the value. `via` names the conversion. `default` is the
  original's default, which is filled in if a file does not set the key. `off` lists values that
  switch nothing on.
- `by`: how the module of the system computes the native value (`to` names the native keys
  concerned)
- `same`: why results do not depend on the key: it changes speed, memory or output files only (with
  `to`: the key is applied if this version supports it)
- `dead`: why the key has no effect in the original either
- `shape`: the property of the model's config.json that the key repeats; it is checked, not set
- `refuse`: why msrl does not support the key
- `differs`: what msrl computes without the key, which is refused unless differences are accepted
- `only`: algorithms in which the original reads the key
- `is_text`: True if a quoted "true" or "false" is valid; for other keys it is an error
- `form`: what the value must be: switch, number, text, texts, list, section, or names, a section
  whose keys the user chooses. A key whose `default` or `off` is true or false is a switch.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard, cast

from msrl.config.sources import plain, read
from msrl.errors import nearest
from msrl.importers.placeholders import is_placeholder
from msrl.importers.status import KeyStatus

TABLES = Path(__file__).parent / "tables"


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True for a finite number, and False for a boolean."""
    return isinstance(value, (int, float)) and _is_finite(value) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _is_text(value: object) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _is_texts(value: object) -> bool:
    return all(_is_text(item) for item in as_list(value))


def _is_list(value: object) -> bool:
    return isinstance(value, list)


def _is_section(value: object) -> bool:
    return isinstance(value, dict)


# Checks of values and their messages, by form. YAML reads some texts as numbers.
FORMS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "switch": (_is_switch, "must be true or false"),
    "number": (is_number, "must be a finite number"),
    "text": (_is_text, "must be a text"),
    "texts": (_is_texts, "must be a text or a list of texts"),
    "list": (_is_list, "must be a list"),
    "section": (_is_section, "must be a section of keys"),
    "names": (_is_section, "must be a section of keys"),
}
_MISSPELLED = 0.85  # similarity of `modee` and `mode`


@dataclass(frozen=True, slots=True)
class Row:
    """Mapping of one key. Absent fields are empty.

    `has_default` tells a default of null from no default.
    """

    section: str
    key: str
    to: tuple[str, ...] = ()
    by: str = ""
    via: str = ""
    off: tuple[object, ...] = ()
    default: object = None
    has_default: bool = False
    same: str = ""
    speed: str = ""
    placement: str = ""
    dropped: str = ""
    dead: str = ""
    shape: str = ""
    refuse: str = ""
    differs: str = ""
    only: tuple[str, ...] = ()
    is_text: bool = False
    form: str = ""

    def problem(self, value: object) -> str:
        """Return why the original cannot read a value; empty if it can, and for null."""
        is_switch = any(isinstance(value, bool) for value in (*self.off, self.default))
        form = self.form or ("switch" if is_switch and not (self.refuse or self.differs) else "")
        is_open = is_placeholder(value) and form not in ("list", "section", "names")
        if not form or value is None or is_open:
            return ""
        is_valid, problem = FORMS[form]
        return "" if is_valid(value) else problem

    @property
    def neutral(self) -> tuple[KeyStatus, str]:
        """Return status and reason of a key that needs no native key; without reason, none."""
        reasons = {
            KeyStatus.SPEED: self.speed,
            KeyStatus.PLACEMENT: self.placement,
            KeyStatus.DROPPED: self.dropped,
        }
        return next(
            ((key, text) for key, text in reasons.items() if text), (KeyStatus.SAME, self.same)
        )

    def is_off(self, value: object) -> bool:
        """Return True if a value has no effect. Lists compare by item; true is not 1."""
        return any(
            value == off and isinstance(value, bool) == isinstance(off, bool) for off in self.off
        )


@dataclass(frozen=True, slots=True)
class Table:
    """All rows of one system, by section and canonical key."""

    system: str
    rows: Mapping[tuple[str, str], Row]

    def is_original(self, key: str) -> bool:
        """Return True if the original has this key, with or without a row here."""
        name = canonical(key)
        return name in original_keys(self.system) or any(name == other for _, other in self.rows)

    def nearest_key(self, key: str) -> str:
        """Return the key of the original that an unknown one almost equals; empty without one."""
        if self.is_original(key):
            return ""
        names = {*original_keys(self.system), *(name for _, name in self.rows)}
        return next(iter(difflib.get_close_matches(canonical(key), names, 1, _MISSPELLED)), "")

    def has_names(self, key: str) -> bool:
        """Return True if the user chooses the keys inside the value of a key."""
        name = canonical(key)
        return any(row.form == "names" and name == other for (_, other), row in self.rows.items())

    def is_untranslated(self, key: str) -> bool:
        """Return True if the original has this key, and no section here has a row for it."""
        return canonical(key) in original_keys(self.system) and not self.elsewhere(key)

    def row(self, section: str, key: str) -> Row | None:
        """Return the row of a key in a section; None if there is none."""
        return self.rows.get((section, canonical(key)))

    def keys(self, *sections: str) -> list[str]:
        """Return the keys of the sections."""
        return [key for section, key in self.rows if section in sections]

    def hint(self, key: str, *sections: str) -> str:
        """Return the other sections that have this key, or the nearest key of `sections`."""
        return self.elsewhere(key) or nearest(canonical(key), self.keys(*sections))

    def elsewhere(self, key: str) -> str:
        """Return a hint to the sections that have this key; empty if there are none."""
        own = canonical(key)
        sections = [section for section, name in self.rows if name == own]
        return f"it belongs in {' or '.join(sections)}" if sections else ""


def canonical(key: str) -> str:
    """Return the key with underscores, without the dashes of a flag.

    >>> canonical("--clip-ratio")
    'clip_ratio'
    """
    return key.strip().lstrip("-").replace("-", "_")


@cache
def load_table(system: str) -> Table:
    """Return the table of a system by its file name, such as `mindspeed_rl`."""
    tree = plain(read(TABLES / f"{system}.yaml"))
    sections = cast("dict[str, dict[str, dict[str, Any]]]", tree["sections"])
    rows: dict[tuple[str, str], Row] = {}
    for section, entries in sections.items():
        for names, entry in entries.items():
            for name in names.split(","):
                row = _row(section, canonical(name), entry)
                assert (section, row.key) not in rows, f"{system}: {section}.{row.key} is duplicate"
                rows[section, row.key] = row
    return Table(system, rows)


@cache
def original_keys(system: str) -> frozenset[str]:
    """Return the names of all keys of a system's own configuration classes and parsers."""
    names = plain(read(TABLES / "original_keys.yaml")).get(system, "")
    return frozenset(str(names).split())


_FIELDS = {field.name for field in fields(Row)} - {"section", "key", "has_default"}


def _row(section: str, key: str, entry: Mapping[str, Any]) -> Row:
    unknown = set(entry) - _FIELDS
    assert not unknown, f"{section}.{key}: {unknown}"
    assert entry.get("form", "text") in FORMS, f"{section}.{key}: {entry['form']}"
    values: dict[str, Any] = {
        name: tuple(as_list(value)) if name in ("to", "off", "only") else value
        for name, value in entry.items()
    }
    return Row(section, key, has_default="default" in entry, **values)


def as_list(value: object) -> list[Any]:
    """Return a list unchanged, and any other value as a list of length 1."""
    return cast("list[Any]", value) if isinstance(value, list) else [value]
