"""Translation of a foreign file: the native tree, the status of every key, and the errors."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from msrl.config.messages import node_at, written
from msrl.config.sources import Node, Origin, at, merge, plain, printable_value, wrap
from msrl.config.unsupported import NOT_YET_TEXT
from msrl.errors import similar
from msrl.importers.conversions import CONVERSIONS, weights_by_prefix
from msrl.importers.native_keys import refusal
from msrl.importers.placeholders import is_placeholder
from msrl.importers.secrets import REFUSAL, holds_secret, is_secret_name, mask_secrets
from msrl.importers.status import KeyStatus
from msrl.importers.table import Row, Table, canonical

_TRAININGS = {"train", "data", "algo"}  # sections of trainings
_SECRET_KEYS = ("use_wandb",)  # LightRFT's switch, whose value is the key of an account


@dataclass(frozen=True, slots=True)
class SourceKey:
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
        """Return True for the text "true" or "false", which the original would treat as true."""
        return self.value in ("true", "false", "True", "False")

    def __str__(self) -> str:
        printable = printable_value(self.node)
        value = "" if isinstance(self.node.value, dict) else f"={written(printable)}"
        if self.is_secret:
            value = "=***"
        return mask_secrets(f"{self.origin}: {self.path}{value}")

    @property
    def is_secret(self) -> bool:
        """True for a literal text of a key whose name shows that it is a secret."""
        is_named = self.key in _SECRET_KEYS or is_secret_name(self.path.rpartition(".")[2])
        is_reference = self.node.reference is not None or "${" in str(self.value)
        return is_named and isinstance(self.value, str) and not is_reference


@dataclass(frozen=True, slots=True)
class KeyResult:
    """A key with its status; `text` names the native key or the reason why there is none."""

    entry: SourceKey
    status: KeyStatus
    text: str

    def __str__(self) -> str:
        if self.status is KeyStatus.APPLIED:
            return f"{self.entry}: {self.text}"
        return f"{self.entry}: {self.status.value}: {self.text}".rstrip(": ")


@dataclass
class Translation:
    """Native configuration that grows key by key.

    `tree` holds the supported native keys with the origins of the source keys, `later` the keys
    that this version does not support. `differences` are settings that msrl computes differently:
    errors, unless the user accepts the nearest setting. `notes` are lines of a script that bash
    reads differently, `remarks` what msrl computes differently by design. With `ignores_unknown`,
    the original reads files with any additional keys, with `ignored_sections` only at these places.
    It passes other keys of the sections in `forwarded` on; these functions translate them.
    `variables` are top-level keys that other keys refer to.
    """

    system: str
    table: Table
    name: str
    algorithm: str = ""
    mode: str = ""
    tree: Node = field(init=False)
    later: Node = field(init=False)
    key_results: list[KeyResult] = field(default_factory=list[KeyResult])
    errors: list[str] = field(default_factory=list[str])
    differences: list[str] = field(default_factory=list[str])
    accepts_differences: bool = False
    is_refused: bool = False
    ignores_unknown: bool = False
    variables: frozenset[str] = frozenset()
    ignored_sections: tuple[str, ...] = ()
    reserved: frozenset[str] = frozenset()  # sections of other programs of the system
    forwarded: Mapping[str, Callable[[Translation, SourceKey], None]] = field(
        default_factory=dict[str, "Callable[[Translation, SourceKey], None]"]
    )
    defaults: dict[str, object] = field(default_factory=dict[str, object])
    missing: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    remarks: list[str] = field(default_factory=list[str])
    other_defaults: dict[tuple[str, str], object] = field(
        default_factory=dict[tuple[str, str], object]
    )
    _recorded: dict[int, SourceKey] = field(default_factory=dict[int, SourceKey])

    def __post_init__(self) -> None:
        self.tree = self.later = Node({}, Origin(self.name))

    # --- source keys

    def entries(
        self, section: Node | None, name: str, path: str, *, also: Iterable[str] = ()
    ) -> Iterator[SourceKey]:
        """Yield the valid keys of a section; add errors for unknown, duplicate and quoted ones.

        `name` and `also` are the table sections that are searched for a key, in this order.
        """
        if section is None or section.value is None:
            return
        if not isinstance(section.value, dict):
            setting = f"{section.origin}: {path}={written(plain(section))}"
            self.errors.append(f"{setting}: must be a section of keys")
            return
        seen: dict[str, SourceKey] = {}
        for key, node in section.value.items():
            sections = (table for table in (name, *also) if self.table.row(table, key))
            table_section = next(sections, None)
            key_path = f"{path}.{key}" if path else key
            entry = SourceKey(table_section or name, canonical(key), key_path, node)
            if table_section is None:
                self._add_unknown(entry, key, (name, *also))
            elif entry.key in seen:
                first = seen[entry.key]
                self.errors.append(f"{entry}: duplicate of {first.path} in {first.origin}")
            elif problem := self._problem(entry):
                self.errors.append(f"{entry}: {problem}")
            else:
                seen[entry.key] = entry
                yield entry

    def _problem(self, entry: SourceKey) -> str:
        """Return why the original cannot read the value of a key; empty if it can."""
        row = self.row(entry)
        if entry.is_quoted_switch() and not row.is_text:
            return "must be true or false, without quotes"
        return row.problem(entry.value)

    def _add_unknown(self, entry: SourceKey, key: str, sections: tuple[str, ...]) -> None:
        """Add an error for a key without a row, or record one that the original ignores."""
        is_known = (
            key in self.reserved
            or self.table.is_original(key)
            or similar(canonical(key), self.table.keys(*sections))
        )
        is_ignored = self.ignores_unknown or sections[0] in self.ignored_sections
        forwarded = self.forwarded.get(sections[0])
        names = self.table.keys(*sections)
        is_variable = key in self.variables and not self.table.is_untranslated(key)
        if sections[0] == "top" and is_variable:
            self.record(entry, KeyStatus.APPLIED, "a variable that other keys refer to")
        elif forwarded and not difflib.get_close_matches(canonical(key), names, cutoff=0.9):
            forwarded(self, entry)
        elif is_ignored and not is_known:
            self.record(entry, KeyStatus.DEAD, "not a key of the original, which ignores it")
        else:
            self.errors.append(f"{entry}: {self._unknown_key_message(key, *sections)}")

    def _unknown_key_message(self, key: str, *sections: str) -> str:
        """Return the message for a key without a row: of the original, or misspelled."""
        if self.table.is_original(key):
            hint = self.table.elsewhere(key)
            remedy = f"; {hint}" if hint else ". Remove it if you do not need it."
            return f"not supported: a key of {self.system} that msrl has no setting for{remedy}"
        return f"unknown key of {self.system}; {self.table.hint(key, *sections)}"

    def refuse_misspelled(self) -> None:
        """Add an error for each key inside the value of a key that is almost one of the original.

        `entries` checks the keys of sections that are translated key by key; the others are inside
        sections that are off, that change files only, or that no importer reads.
        """
        for result in self.key_results:
            if self.table.row(result.entry.section, result.entry.key) is not None:
                self._refuse_misspelled(result.entry.node, result.entry.path)

    def _refuse_misspelled(self, node: Node, path: str) -> None:
        if self.table.has_names(path.rpartition(".")[2]):
            return
        for item in node.value if isinstance(node.value, tuple) else ():
            self._refuse_misspelled(item, path)
        for key, child in (node.value if isinstance(node.value, dict) else {}).items():
            where = f"{child.origin}: {path}.{key}"
            near = self.table.nearest_key(key)
            if near and not any(error.startswith(where) for error in self.errors):
                self.errors.append(f"{where}: unknown key of {self.system}; did you mean '{near}'?")
            self._refuse_misspelled(child, f"{path}.{key}")

    def row(self, entry: SourceKey) -> Row:
        """Return the table row of a key."""
        row = self.table.row(entry.section, entry.key)
        assert row is not None, entry
        return row

    def reads(self, row: Row) -> bool:
        """Return True if the original reads the key in this algorithm or mode (such as agentic)."""
        return not row.only or self.algorithm in row.only or self.mode in row.only

    def default(self, section: str, key: str) -> object:
        """Return the original's default; `other_defaults` belong to another generation."""
        row = self.table.row(section, key)
        assert row is not None, (section, key)
        return self.other_defaults.get((section, key), row.default)

    # --- native keys

    def record(self, entry: SourceKey, status: KeyStatus, text: str) -> None:
        """Record the status of a key, unless it has one."""
        if id(entry) not in self._recorded:
            self._recorded[id(entry)] = entry
            self.key_results.append(KeyResult(entry, status, text))

    def is_recorded(self, entry: SourceKey) -> bool:
        """Return True if the key has a status or an error."""
        return id(entry) in self._recorded

    def add_error(self, entry: SourceKey, message: str) -> None:
        """Add an error for a key once, unless the complete input is refused."""
        self._recorded[id(entry)] = entry
        line = f"{entry}: {message}"
        if not self.is_refused and line not in self.errors:
            self.errors.append(line)

    def refuse_as_one(self) -> None:
        """Keep only the last error, which explains why the complete input is refused."""
        self.errors = self.errors[-1:]
        self.is_refused = True

    def difference(self, entry: SourceKey, text: str) -> None:
        """Drop a key that changes results, which is an error unless differences are accepted."""
        self.differences.append(f"{entry}: {text}. --approximate drops it; results differ.")
        self.record(entry, KeyStatus.DROPPED, f"results differ: {text}")

    def report_difference(self, entry: SourceKey, text: str) -> None:
        """Report that an applied key computes something else, unless differences are accepted."""
        self.differences.append(f"{entry}: {text}. --approximate accepts it; results differ.")

    def approximate(
        self, entry: SourceKey | None, key: str, value: object, difference: str
    ) -> None:
        """Set a native key to the nearest value of what the original computes."""
        where = str(entry) if entry is not None else self.name
        advice = f"--approximate sets {key}={written(value)}"
        self.differences.append(f"{where}: {difference}. {advice}; results differ.")
        origin = entry.origin if entry is not None else Origin(self.name)
        self.set(key, wrap(value, origin))
        if entry is not None:
            text = f"{key}: {written(value)} (results differ: {difference})"
            self.record(entry, KeyStatus.APPLIED, text)

    def set(self, key: str, node: Node) -> None:
        """Set a native key without recording a status."""
        self.tree = merge(self.tree, at(key, node))

    def set_default(self, key: str, value: object) -> None:
        """Set a native key to the original's default; an unsupported one is refused like a value.

        A native key that has a value keeps it, because several source keys can map to one native
        key.
        """
        if node_at(self.tree, key.split(".")) is not None:
            return
        node = wrap(value, Origin(f"default of {self.system}"))
        reason = refusal(key, value)
        if not reason:
            self.set(key, node)
            self.defaults[key] = value
        elif value is not None:
            self.later = merge(self.later, at(key, node))
            self.missing.append(
                f"{self.name}: {key}={written(value)} (default of {self.system}): {reason}. "
                "Set the key of the original."
            )

    def assign(
        self,
        entry: SourceKey,
        keys: Iterable[str],
        value: object,
        *,
        same: str = "",
        why: str = "",
        status: KeyStatus = KeyStatus.SAME,
    ) -> None:
        """Assign a value to native keys.

        If this version does not support them, the key is recorded with `status` for the reason
        `same`; without a reason a run refuses the key.
        """
        keys = tuple(keys)
        if holds_secret(value) or (entry.is_secret and value == entry.value):
            return self._refuse_secret(entry, keys)
        node = wrap(value, entry.origin)
        if entry.node.reference is not None and value == entry.value:
            node = replace(node, reference=entry.node.reference)
        reason = next((text for key in keys if (text := refusal(key, value))), "")
        if reason:
            if same:
                return self.record(entry, status, f"{same} ({keys[0]} is {reason})")
            return self._assign_unsupported(entry, keys, node, reason)
        for key in keys:
            self.set(key, node)
        why = "placeholder: replace it before a run" if is_placeholder(value) else why
        text = f"{' and '.join(keys)}: {written(printable_value(node))}"
        text += f" ({why})" if why else ""
        return self.record(entry, KeyStatus.APPLIED, text)

    def _refuse_secret(self, entry: SourceKey, keys: tuple[str, ...]) -> None:
        """Refuse a literal secret. A variable of workers is exported instead."""
        if keys[0].startswith("cluster.env."):
            text = "secrets are not written to files. Export it before msrl starts."
            return self.record(entry, KeyStatus.DROPPED, text)
        return self.add_error(entry, REFUSAL)

    def _assign_unsupported(
        self, entry: SourceKey, keys: tuple[str, ...], node: Node, reason: str
    ) -> None:
        for key in keys:
            self.later = merge(self.later, at(key, node))
        names = " and ".join(keys)
        is_later = reason.startswith(NOT_YET_TEXT)  # the status says it already
        text = names + (reason.removeprefix(NOT_YET_TEXT) if is_later else f": {reason}")
        self.record(entry, KeyStatus.UNSUPPORTED, text)

    def apply(self, entry: SourceKey) -> None:
        """Translate a key whose table row is sufficient."""
        row = self.row(entry)
        if row.dead:
            self.record(entry, KeyStatus.DEAD, row.dead)
        elif not self.reads(row):
            self.record(entry, KeyStatus.DEAD, f"read by {' and '.join(row.only)} only")
        elif row.is_off(entry.value):
            self.record(entry, KeyStatus.OFF, "")
        elif row.refuse:
            self.add_error(entry, f"not supported: {row.refuse}")
        elif row.differs:
            self.difference(entry, row.differs)
        elif not row.to:
            status, reason = row.neutral
            assert reason or row.by, f"{entry}: no row field and no rule of {self.system}"
            self.record(entry, status, reason or row.by)
        else:
            self._convert(entry, row)

    def _convert(self, entry: SourceKey, row: Row) -> None:
        natives = row.to
        try:
            if row.via == "one_path" and len(weights_by_prefix(entry.value)) > 1:
                value, natives = weights_by_prefix(entry.value), ("data.blend",)
            else:
                value = CONVERSIONS[row.via](entry.value)
        except ValueError as error:
            return self.add_error(entry, str(error))
        status, reason = row.neutral
        return self.assign(entry, natives, value, same=reason, status=status)

    def fill_defaults(self, sections: Iterable[str], present: Iterable[SourceKey]) -> None:
        """Set the original's defaults of keys that are not present and that one row describes.

        A default that changes no results may be unsupported.
        """
        present_keys = {(entry.section, entry.key) for entry in present}
        for (section, key), row in self.table.rows.items():
            if section not in sections or (section, key) in present_keys:
                continue
            if row.has_default and row.to and not row.by and self.reads(row):
                value = CONVERSIONS[row.via](self.default(section, key))
                for native in row.to:
                    if not (row.neutral[1] and refusal(native, value)):
                        self.set_default(native, value)

    def include(self, other: Translation) -> None:
        """Add the translation of a file that this one names."""
        self.tree, self.later = merge(self.tree, other.tree), merge(self.later, other.later)
        self.algorithm = self.algorithm or other.algorithm
        self.key_results += other.key_results
        self.errors += other.errors
        self.differences += other.differences
        self.is_refused = self.is_refused or other.is_refused
        self.missing += other.missing
        self.notes += other.notes
        self.remarks += other.remarks
        self.defaults |= other.defaults

    # --- results

    def complete(self, *, approximate: bool) -> None:
        """Name the run of a training, and record the differences that `approximate` accepts."""
        self.accepts_differences = approximate
        if not self.is_refused:
            self.refuse_misspelled()
        if not self.is_training:
            return
        file = Path(self.name)
        name = file.stem if file.suffix else self.system.lower()
        if node_at(self.tree, ["run", "name"]) is None:
            self.set("run.name", wrap(name, Origin(self.name)))
        if approximate and self.differences:
            lines = [line.partition(". --approximate")[0] for line in self.differences]
            self.set("run.differences", wrap(lines, Origin("--approximate")))

    def refusals(self) -> list[str]:
        """Return one line for each key, and default of the original, that a run must refuse."""
        unsupported = [
            key_result
            for key_result in self.key_results
            if key_result.status is KeyStatus.UNSUPPORTED
        ]
        differences = [] if self.accepts_differences else self.differences
        return [*map(str, unsupported), *self.missing, *differences]

    @property
    def is_training(self) -> bool:
        """True if the native keys configure a training."""
        return bool(_TRAININGS & set(plain(self.tree)))

    def complete_tree(self) -> Node:
        """Return the native tree including the unsupported keys, which a run refuses."""
        return merge(self.tree, self.later)
