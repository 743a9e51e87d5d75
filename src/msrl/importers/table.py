"""What becomes of every key of another system: one table per system, in `tables/`.

A row says one of these of a key (or of several, parted by commas):
  to      native key or keys that take its value; `via` names the conversion; `default` is the original's own default, which is laid in
          where a file does not give the key; `off` lists values that ask for nothing
  by      what the system's module makes of it together with other keys (`to` names the native keys that this concerns)
  same    why results are the same without it: it changes speed, memory or what is written (with `to`: used where msrl has the key)
  dead    why it has no effect in the original either
  shape   the fact of the model's config.json that it repeats; checked, not set
  refuse  why msrl cannot do what it asks for
  only    the algorithms in which the original reads it
  is_text that a quoted "true" or "false" is meant as it is; elsewhere it is a mistake
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, cast

from msrl.config.sources import plain, read
from msrl.errors import nearest

TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True)
class Row:
    """One key of another system. A field that says nothing is empty; `has_default` tells a default of null from none."""

    section: str
    key: str
    to: tuple[str, ...] = ()
    by: str = ""
    via: str = ""
    off: tuple[object, ...] = ()
    default: object = None
    has_default: bool = False
    same: str = ""
    dead: str = ""
    shape: str = ""
    refuse: str = ""
    only: tuple[str, ...] = ()
    is_text: bool = False  # whether "true" in quotes is meant as it is

    def is_off(self, value: object) -> bool:
        """Whether a value asks for nothing. Lists are compared by their items; true is not 1."""
        return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in self.off)


@dataclass(frozen=True, slots=True)
class Table:
    """All rows of one system, by section and canonical key."""

    system: str
    rows: Mapping[tuple[str, str], Row]

    def row(self, section: str, key: str) -> Row | None:
        return self.rows.get((section, canonical(key)))

    def keys(self, *sections: str) -> list[str]:
        return [key for own, key in self.rows if own in sections]

    def hint(self, key: str, *sections: str) -> str:
        """The nearest key of the sections; else where else a key of this name stands."""
        elsewhere = [own for own, name in self.rows if name == canonical(key)]
        return f"it belongs in {' or '.join(elsewhere)}" if elsewhere else nearest(canonical(key), self.keys(*sections))


def canonical(key: str) -> str:
    """The key with underscores: hyphens are the same, and so are the two dashes of a flag.

    >>> canonical("--clip-ratio")
    'clip_ratio'
    """
    return key.strip().lstrip("-").replace("-", "_")


@cache
def load_table(system: str) -> Table:
    """The table of a system by the name of its file, such as `mindspeed_rl`."""
    sections = cast("dict[str, dict[str, dict[str, Any]]]", plain(read(TABLES / f"{system}.yaml"))["sections"])
    rows: dict[tuple[str, str], Row] = {}
    for section, entries in sections.items():
        for names, entry in entries.items():
            for name in names.split(","):
                row = _row(section, canonical(name), entry)
                assert (section, row.key) not in rows, f"{system}: {section}.{row.key} stands twice"
                rows[section, row.key] = row
    return Table(system, rows)


_FIELDS = {field.name for field in fields(Row)} - {"section", "key", "has_default"}


def _row(section: str, key: str, entry: Mapping[str, Any]) -> Row:
    unknown = set(entry) - _FIELDS
    assert not unknown, f"{section}.{key}: {unknown}"
    given: dict[str, Any] = {name: tuple(_listed(value)) if name in ("to", "off", "only") else value for name, value in entry.items()}
    return Row(section, key, has_default="default" in entry, **given)


def _listed(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else [value]
