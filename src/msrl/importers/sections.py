"""Keys of one section of a foreign file, merged from several layers; the last layer wins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from msrl.config.sources import Node, Origin, plain, read, wrap
from msrl.errors import MsrlError, nearest
from msrl.importers.placeholders import is_placeholder
from msrl.importers.table import as_list, canonical, is_number
from msrl.importers.translation import KeyStatus, SourceKey, Translation

TOWER, PROJECTOR = "train.vision.tower_lr", "train.vision.projector_lr"
_GRACE_S = 15.0  # from the time limit of a program to the limit of its call
_MAX_PROFILED = 10_000  # steps of a profile, which the native key lists


class Keys:
    """Keys of one table section, with the defaults of the original for keys that a file omits."""

    def __init__(
        self,
        translation: Translation,
        section: str,
        entries: Iterable[SourceKey],
        *,
        also: Sequence[str] = (),
    ) -> None:
        """Collect the keys; those that `section` lacks have the defaults of the sections `also`."""
        self.translation = translation
        self.section = section
        self._sections = (section, *also)
        self._entries: dict[str, SourceKey] = {}
        for entry in entries:
            overridden = self._entries.get(entry.key)
            if overridden is not None:
                reason = f"overridden by {entry.path} in {entry.origin}"
                translation.record(overridden, KeyStatus.SAME, reason)
            self._entries[entry.key] = entry

    @staticmethod
    def read(
        translation: Translation,
        section: str,
        node: Node | None,
        path: str,
        *,
        also: Sequence[str] = (),
    ) -> Keys:
        """Return the keys of a section of the file, whose rows may be in the sections `also`."""
        entries = translation.entries(node, section, path, also=also)
        return Keys(translation, section, entries)

    def __iter__(self) -> Iterator[SourceKey]:
        return iter(self._entries.values())

    def get(self, *keys: str) -> SourceKey | None:
        """Return the first of the keys that the file sets; None if it sets none of them."""
        return next((self._entries[key] for key in keys if key in self._entries), None)

    def value(self, *keys: str) -> object:
        """Return the value of the first key that the file sets, or the default of `keys[0]`."""
        entry = self.get(*keys)
        if entry is not None:
            return entry.value
        has_row = self.translation.table.row
        section = next((name for name in self._sections if has_row(name, keys[0])), self.section)
        return self.translation.default(section, keys[0])

    def number(self, *keys: str) -> int | None:
        """Return the value if it is an integer; None for a placeholder. Other values are errors."""
        value = self.value(*keys)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        entry = self.get(*keys)
        if entry is not None and value is not None and not is_placeholder(value):
            self.translation.add_error(entry, "must be an integer")
        return None

    def real(self, key: str, default: float) -> float:
        """Return the value if it is a number, `default` for null. Other values are errors."""
        value = self.value(key)
        if is_number(value):
            return value
        if value is not None:
            self.add_error(key, "must be a finite number")
        return default

    def switch(self, key: str, *, default: bool) -> bool:
        """Return the value if it is a boolean, `default` for null. Other values are errors."""
        value = self.value(key)
        if isinstance(value, bool):
            return value
        if value is not None:
            self.add_error(key, "must be true or false")
        return default

    def assign(
        self, key: str, natives: Iterable[str], value: object, *, same: str = "", why: str = ""
    ) -> None:
        """Assign a value that follows from `key` to native keys, as a default if `key` is unset."""
        entry = self.get(key)
        if entry is not None:
            return self.translation.assign(entry, natives, value, same=same, why=why)
        for native in natives:
            self.translation.set_default(native, value)
        return None

    def put(self, key: str, *natives: str) -> None:
        """Assign the value of `key` to native keys, as a default if `key` is unset."""
        self.assign(key, natives, self.value(key))

    def record(self, key: str, status: KeyStatus, text: str) -> None:
        """Record the status of a key, if the file sets it."""
        entry = self.get(key)
        if entry is not None:
            self.translation.record(entry, status, text)

    def discard(self, keys: Iterable[str], reason: str) -> None:
        """Record keys that the original does not read here; they have their defaults then."""
        for key in keys:
            self.record(key, KeyStatus.DEAD, reason)
            self._entries.pop(key, None)

    def add_error(self, key: str, message: str) -> None:
        """Add an error for the value of `key`, or for its default."""
        entry = self.get(key)
        if entry is not None:
            return self.translation.add_error(entry, message)
        setting = f"{self.section}.{key}={self.value(key)} (default of {self.translation.system})"
        return self.translation.errors.append(f"{self.translation.name}: {setting}: {message}")

    def origin(self, key: str) -> Origin:
        """Return the origin of a key; the origin of the file if it does not set the key."""
        entry = self.get(key)
        return entry.origin if entry is not None else self.translation.tree.origin

    def apply_remaining(self) -> None:
        """Apply the table row of each key that has no status yet."""
        for entry in self:
            if not self.translation.is_recorded(entry):
                self.translation.apply(entry)


def hydra_layers(defaults: Node | None, file: Path, translation: Translation) -> dict[str, Node]:
    """Return the models of the files that `defaults: [{model: [NAME]}]` names, by canonical name.

    The files are model/NAME.yaml beside `file`. A missing file is not an error, because the
    model's config.json contains the same properties.
    """
    models: dict[str, Node] = {}
    for name in _model_names(defaults, translation):
        path = _model_path(file.parent / "model", str(name.value))
        if path is None:
            continue
        try:
            tree = read(path, is_old=True)
        except MsrlError as error:
            translation.errors.append(str(error))
            continue
        entries = tree.value if isinstance(tree.value, dict) else {}
        models |= {canonical(key): node for key, node in entries.items()}
    return models


def _model_names(defaults: Node | None, translation: Translation) -> list[Node]:
    if defaults is None or defaults.value is None:
        return []
    if not isinstance(defaults.value, tuple):
        setting = f"{defaults.origin}: defaults={plain(defaults)}"
        translation.errors.append(f"{setting}: must be a list such as [{{model: [qwen25_7b]}}]")
        return []
    names: list[Node] = []
    for item in defaults.value:
        entry = item.value if isinstance(item.value, dict) else {}
        if set(entry) == {"model"}:
            value = entry["model"].value
            names += value if isinstance(value, tuple) else (entry["model"],)
        elif item.value != "_self_":
            translation.errors.append(
                f"{item.origin}: defaults: must name model files, as in - model: [qwen25_7b]"
            )
    return names


def _model_path(folder: Path, name: str) -> Path | None:
    stem = canonical(name.removesuffix(".yaml"))
    paths = sorted(folder.glob("*.yaml"))
    return next((path for path in paths if canonical(path.stem) == stem), None)


def put_tracker_options(
    keys: Keys, tracker: str, options: Mapping[str, str], *, is_on: bool
) -> None:
    """Translate keys that are options of a tracker, which the original reads if it is on."""
    for key, option in options.items():
        entry = keys.get(key)
        if entry is None:
            continue
        if not is_on:
            keys.record(key, KeyStatus.DEAD, f"read with {tracker} only")
        elif entry.value in (None, ""):
            keys.record(key, KeyStatus.OFF, "")
        else:
            keys.assign(key, [f"log.options.{tracker}.{option}"], entry.value)


def put_profile(keys: Keys, *, is_on: bool, first: int | None, last: int | None) -> None:
    """Translate the key `profile`, with its first and last step, from 1, and `profile_ranks`.

    -1 and `all` select all ranks.
    """
    options = ("profile_step_start", "profile_step_end", "profile_ranks")
    if not is_on or first is None or last is None or last < first:
        if is_on:
            text = "profile_step_start and profile_step_end select no steps"
            keys.record("profile", KeyStatus.DROPPED, text)
        else:
            keys.record("profile", KeyStatus.OFF, "")
        for key in options:
            keys.record(key, KeyStatus.DEAD, "read with profile only")
        return None
    ranks = keys.value("profile_ranks")
    selected = [] if ranks in ("all", -1, [-1]) else as_list(ranks)
    if last - first >= _MAX_PROFILED:
        return keys.add_error("profile_step_end", f"must select at most {_MAX_PROFILED} steps")
    keys.assign("profile", ["log.profile.steps"], list(range(first, last + 1)))
    if keys.get("profile_ranks") is not None or ranks is not None:
        keys.assign("profile_ranks", ["log.profile.ranks"], selected)
    for key in options:
        keys.record(key, KeyStatus.APPLIED, "log.profile.steps")
    return None


def put_repeated(translation: Translation, section: str, key: str, node: Node) -> None:
    """Record a flag that a later flag of the same name overrides."""
    entry = SourceKey(section, key, key, node)
    text = "a later flag of this name overrides it, as in the original"
    translation.record(entry, KeyStatus.SAME, text)


def as_mapping(value: object) -> dict[str, Any]:
    """Return a mapping unchanged, and an empty one for any other value."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def settings_of(entry: SourceKey | None) -> dict[str, Any]:
    """Return the keys of a value that is a section; none for another value."""
    return {} if entry is None else as_mapping(entry.value)


def refuse_unknown(translation: Translation, entry: SourceKey, known: Iterable[str]) -> None:
    """Add an error for each key that the arguments of the original do not include."""
    names = list(known)
    if entry.value is not None and not isinstance(entry.node.value, dict):
        translation.add_error(entry, "must be a section of keys")
    section = entry.node.value if isinstance(entry.node.value, dict) else {}
    for key, node in section.items():
        if key not in names:
            text = f"unknown key of {translation.system}; {nearest(key, names)}"
            translation.errors.append(f"{node.origin}: {entry.path}.{key}: {text}")


def put_call_time(translation: Translation, origin: Origin, time_s: float) -> None:
    """Set the time limit of calls to a tool that runs each program for at most `time_s`."""
    translation.set("environment.timeout_s", wrap(time_s + _GRACE_S, origin))


def same_path(first: object, second: object) -> bool:
    """Return True if two values name the same folder, with or without a trailing slash."""
    return isinstance(first, str) and isinstance(second, str) and Path(first) == Path(second)


def put_tower_rates(keys: Keys, key: str, *natives: str) -> None:
    """Set rates of a vision tower to the learning rate `key`, or to its default."""
    value, origin = keys.value(key), keys.origin(key)
    for native in natives:
        if keys.get(key) is not None:
            keys.translation.set(native, wrap(value, origin))
        else:
            keys.translation.set_default(native, value)
