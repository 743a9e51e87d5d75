"""A translation as it grows: the native tree, what became of every key, and the mistakes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from msrl.config.messages import node_at, written
from msrl.config.sources import Node, Origin, at, merge, plain, wrap
from msrl.importers.conversions import CONVERSIONS
from msrl.importers.native_keys import refusal
from msrl.importers.table import Row, Table, canonical


class Fate(Enum):
    """What became of a key; the text heads its group in a report."""

    TOOK = "took effect"
    SAME = "results are the same without it"
    OFF = "asks for nothing"
    DEAD = "has no effect in the original either"
    NOT_YET = "not in this version yet, and would change results"


@dataclass(frozen=True, slots=True)
class Given:
    """One key of a file or command line, as the user wrote it."""

    section: str
    key: str
    path: str
    node: Node

    @property
    def value(self) -> object:
        return plain(self.node)

    @property
    def origin(self) -> Origin:
        return self.node.origin

    def is_quoted_switch(self) -> bool:
        """Whether it is a text that reads like a switch and would count as on, whatever it says."""
        return self.value in ("true", "false", "True", "False")

    def __str__(self) -> str:
        return f"{self.origin}: {self.path}" + ("" if isinstance(self.node.value, dict) else f"={written(self.value)}")


@dataclass(frozen=True, slots=True)
class KeyOutcome:
    """A key and its fate; `text` names the native key or says why there is none."""

    given: Given
    fate: Fate
    text: str

    def __str__(self) -> str:
        return f"{self.given}: {self.text}" if self.fate is Fate.TOOK else f"{self.given}: {self.fate.value}: {self.text}".rstrip(": ")


@dataclass
class Translation:
    """Fed key by key. `tree` has native keys at the places of the originals; keys that are not built yet go to `later` instead."""

    system: str
    table: Table
    name: str
    algorithm: str = ""
    mode: str = ""
    tree: Node = field(init=False)
    later: Node = field(init=False)
    outcomes: list[KeyOutcome] = field(default_factory=list[KeyOutcome])
    errors: list[str] = field(default_factory=list[str])
    defaults: dict[str, object] = field(default_factory=dict[str, object])
    missing: list[str] = field(default_factory=list[str])
    other_defaults: dict[tuple[str, str], object] = field(default_factory=dict[tuple[str, str], object])
    _said: dict[int, Given] = field(default_factory=dict[int, Given])

    def __post_init__(self) -> None:
        self.tree = self.later = Node({}, Origin(self.name))

    # --- what is given ---------------------------------------------------------------------------------------------------------------

    def given(self, section: Node | None, name: str, path: str, *, also: Iterable[str] = ()) -> Iterator[Given]:
        """The keys of a section of the file; those that no table section (`name`, then `also`) has are mistakes."""
        if section is None or section.value is None:
            return
        if not isinstance(section.value, dict):
            self.errors.append(f"{section.origin}: {path}={written(plain(section))}: must be a section of keys")
            return
        seen: dict[str, Given] = {}
        for key, node in section.value.items():
            table_section = next((one for one in (name, *also) if self.table.row(one, key)), None)
            given = Given(table_section or name, canonical(key), f"{path}.{key}" if path else key, node)
            if table_section is None:
                self.errors.append(f"{given}: there is no such key in {self.system}; {self.table.hint(key, name, *also)}")
            elif given.key in seen:
                self.errors.append(f"{given}: stands in {seen[given.key].origin} already, spelt {seen[given.key].path}")
            elif given.is_quoted_switch() and not self.row(given).is_text:
                self.errors.append(f"{given}: must be true or false, without quotes")
            else:
                seen[given.key] = given
                yield given

    def row(self, given: Given) -> Row:
        row = self.table.row(given.section, given.key)
        assert row is not None, given
        return row

    def reads(self, row: Row) -> bool:
        """Whether the original reads the key in this algorithm (or `mode`, such as agentic)."""
        return not row.only or self.algorithm in row.only or self.mode in row.only

    def default(self, section: str, key: str) -> object:
        """What the original takes where nothing is given; `other_defaults` are those of another generation."""
        row = self.table.row(section, key)
        assert row is not None, (section, key)
        return self.other_defaults.get((section, key), row.default)

    # --- what it becomes -------------------------------------------------------------------------------------------------------------

    def say(self, given: Given, fate: Fate, text: str) -> None:
        """Notes the fate of a key, once."""
        if id(given) not in self._said:
            self._said[id(given)] = given
            self.outcomes.append(KeyOutcome(given, fate, text))

    def is_said(self, given: Given) -> bool:
        return id(given) in self._said

    def mistake(self, given: Given, message: str) -> None:
        self.errors.append(f"{given}: {message}")
        self._said[id(given)] = given

    def set(self, key: str, node: Node) -> None:
        """Sets a native key without a word."""
        self.tree = merge(self.tree, at(key, node))

    def set_default(self, key: str, value: object) -> None:
        """Lays in the original's own default of what no file says. One that is not built yet is refused like a given value.

        What stands there already stays: several of an original's keys may become one.
        """
        if node_at(self.tree, key.split(".")) is not None:
            return
        node = wrap(value, Origin(f"default of {self.system}"))
        said = refusal(key, value)
        if not said:
            self.set(key, node)
            self.defaults[key] = value
        elif value is not None:
            self.later = merge(self.later, at(key, node))
            self.missing.append(f"{self.name}: {key}={written(value)} is the default of {self.system}, and {said}; set the original's key")

    def take(self, given: Given, keys: Iterable[str], value: object, *, same: str = "", why: str = "") -> None:
        """A value for native keys; where this version has none, `same` says why that is harmless, else the run is refused."""
        keys = tuple(keys)
        node = wrap(value, given.origin)
        said = next((text for key in keys if (text := refusal(key, value))), "")
        if not said:
            for key in keys:
                self.set(key, node)
            text = f"{' and '.join(keys)}: {written(value)}" + (f" ({why})" if why else "")
            return self.say(given, Fate.TOOK, text)
        if same:
            return self.say(given, Fate.SAME, f"{same} ({keys[0]} is {said})")
        for key in keys:
            self.later = merge(self.later, at(key, node))
        return self.say(given, Fate.NOT_YET, f"{' and '.join(keys)}" + said.removeprefix("not in this version yet"))

    def apply(self, given: Given) -> None:
        """A key whose row says everything."""
        row = self.row(given)
        value = given.value
        if row.dead:
            return self.say(given, Fate.DEAD, row.dead)
        if not self.reads(row):
            return self.say(given, Fate.DEAD, f"read by {' and '.join(row.only)} only")
        if row.is_off(value):
            return self.say(given, Fate.OFF, "")
        if row.refuse:
            return self.mistake(given, f"cannot be done: {row.refuse}")
        if not row.to:
            assert row.same or row.by, f"{given}: the module of {self.system} must say what becomes of it"
            return self.say(given, Fate.SAME, row.same or row.by)
        try:
            converted = CONVERSIONS[row.via](value)
        except ValueError as error:
            return self.mistake(given, str(error))
        return self.take(given, row.to, converted, same=row.same)

    def laid_in(self, sections: Iterable[str], present: Iterable[Given]) -> None:
        """Defaults of the original for keys that are not given and one row says all of; what changes no results may be missing here."""
        there = {(given.section, given.key) for given in present}
        for (section, key), row in self.table.rows.items():
            wanted = section in sections and row.has_default and row.to and not row.by and self.reads(row)
            if wanted and (section, key) not in there:
                value = CONVERSIONS[row.via](self.default(section, key))
                for native in row.to:
                    if not (row.same and refusal(native, value)):
                        self.set_default(native, value)

    # --- the end ---------------------------------------------------------------------------------------------------------------------

    def refused(self) -> list[str]:
        """One line for each key, and default of the original, that a run of this version must not go without."""
        return [*(str(outcome) for outcome in self.outcomes if outcome.fate is Fate.NOT_YET), *self.missing]

    def whole(self) -> Node:
        """The native tree with the keys that are to come: for a file that a run will refuse until they are there."""
        return merge(self.tree, self.later)
