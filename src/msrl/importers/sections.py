"""The keys of one section of a foreign file, looked up by name; keys of several layers in one, the last one winning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from msrl.config.sources import Node, Origin, plain, read
from msrl.errors import MsrlError
from msrl.importers.table import canonical
from msrl.importers.translation import Fate, Given, Translation


class Keys:
    """Given keys of one table section, and the original's defaults of the others."""

    def __init__(self, translation: Translation, section: str, given: Iterable[Given]) -> None:
        self.translation = translation
        self.section = section
        self._given: dict[str, Given] = {}
        for one in given:
            before = self._given.get(one.key)
            if before is not None:
                translation.say(before, Fate.SAME, f"{one.path} in {one.origin} counts")
            self._given[one.key] = one

    def __iter__(self) -> Iterator[Given]:
        return iter(self._given.values())

    def get(self, *keys: str) -> Given | None:
        """The first of the keys that is given."""
        return next((self._given[key] for key in keys if key in self._given), None)

    def value(self, *keys: str) -> object:
        """The value of the first of the keys that is given; else the original's default of the first."""
        given = self.get(*keys)
        if given is not None:
            return given.value
        return self.translation.default(self.section, keys[0])

    def number(self, *keys: str) -> int | None:
        """The value where it is a whole number; the native key's own check tells of any other."""
        value = self.value(*keys)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def take(self, key: str, natives: Iterable[str], value: object, *, same: str = "", why: str = "") -> None:
        """A value that follows from `key`, at its place; the original's default of it where it is not given."""
        given = self.get(key)
        if given is not None:
            return self.translation.take(given, natives, value, same=same, why=why)
        for native in natives:
            self.translation.set_default(native, value)
        return None

    def say(self, key: str, fate: Fate, text: str) -> None:
        given = self.get(key)
        if given is not None:
            self.translation.say(given, fate, text)

    def mistake(self, key: str, message: str) -> None:
        """A mistake at `key`, or in its default."""
        given = self.get(key)
        if given is not None:
            return self.translation.mistake(given, message)
        line = f"{self.translation.name}: {self.section}.{key}={self.value(key)} ({self.translation.system}'s default): {message}"
        return self.translation.errors.append(line)

    def origin(self, key: str) -> Origin:
        given = self.get(key)
        return given.origin if given is not None else self.translation.tree.origin

    def apply_rest(self) -> None:
        """Everything that no rule has spoken of, by its row alone."""
        for given in self:
            if not self.translation.is_said(given):
                self.translation.apply(given)


def hydra_layers(defaults: Node | None, file: Path, translation: Translation) -> dict[str, Node]:
    """The model files that `defaults: [{model: [NAME]}]` names, by canonical name: model/NAME.yaml beside the file.

    A file that is not there is no mistake by itself: what it says stands in the model's own config.json too.
    """
    found: dict[str, Node] = {}
    for name in _model_names(defaults, translation):
        path = _model_path(file.parent / "model", str(name.value))
        if path is None:
            continue
        try:
            tree = read(path)
        except MsrlError as error:
            translation.errors.append(str(error))
            continue
        entries = tree.value if isinstance(tree.value, dict) else {}
        found |= {canonical(key): node for key, node in entries.items()}
    return found


def _model_names(defaults: Node | None, translation: Translation) -> list[Node]:
    items = defaults.value if defaults is not None and isinstance(defaults.value, tuple) else ()
    if defaults is not None and defaults.value is not None and not isinstance(defaults.value, tuple):
        translation.errors.append(f"{defaults.origin}: defaults={plain(defaults)}: must be a list such as [{{model: [qwen25_7b]}}]")
    names: list[Node] = []
    for item in items:
        entry = item.value if isinstance(item.value, dict) else {}
        if set(entry) == {"model"}:
            value = entry["model"].value
            names += value if isinstance(value, tuple) else (entry["model"],)
        elif item.value != "_self_":
            translation.errors.append(f"{item.origin}: defaults: must name model files, as in - model: [qwen25_7b]")
    return names


def _model_path(folder: Path, name: str) -> Path | None:
    wanted = canonical(name.removesuffix(".yaml"))
    return next((path for path in sorted(folder.glob("*.yaml")) if canonical(path.stem) == wanted), None)


def as_list(value: object) -> list[Any]:
    """A list as it is, anything else as a list of one."""
    return cast("list[Any]", value) if isinstance(value, list) else [value]


def same_path(one: object, other: object) -> bool:
    """Whether two values name one folder, written with or without a slash at the end."""
    return isinstance(one, str) and isinstance(other, str) and Path(one) == Path(other)
