"""Loader of the configuration from files, `--set` and flags. It reports all errors at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

from pydantic import ValidationError

from msrl.config.interpolate import Interpolation
from msrl.config.messages import Loc, error_lines, node_at, written
from msrl.config.presets import preset_names, preset_values
from msrl.config.schema import Config
from msrl.config.secrets import shown, written_references
from msrl.config.sources import (
    Node,
    Origin,
    at,
    children,
    merge,
    parse_assignment,
    plain,
    read_with_defaults,
    references,
    wrap,
)
from msrl.config.unknown import with_unknown
from msrl.errors import ManyErrors, MsrlError

_MAX_PASSES = 10  # a section that has lost a value may be invalid for another reason
DEFAULT = Origin("default", is_given=False)


@functools.cache
def _defaults() -> Config:
    return Config()


def _value_at(config: Config, key: str) -> Any:
    """Return the value of a dotted key. Names of a mapping may contain dots."""
    value: Any = config
    names = key.split(".")
    while names:
        if isinstance(value, dict):
            entries = cast("dict[str, Any]", value)
            ends = range(1, len(names) + 1)
            end = next((end for end in ends if ".".join(names[:end]) in entries), 1)
            value = entries[".".join(names[:end])]
            names = names[end:]
        elif isinstance(value, tuple):
            value = cast("tuple[Any, ...]", value)[int(names.pop(0))]
        else:
            value = getattr(value, names.pop(0))
    return value


class ImportedFile(Protocol):
    """File of another system, translated to msrl's keys."""

    @property
    def tree(self) -> Node: ...

    @property
    def errors(self) -> Sequence[str]: ...

    def refusals(self) -> Sequence[str]:
        """Return one message per key that msrl does not support."""
        ...


@dataclass(frozen=True, slots=True)
class Importers:
    """Functions that recognize the files and keys of other systems.

    `translate` returns None for a file with msrl's keys. `refuse_key` raises MsrlError for a key of
    another system in `--set`.
    """

    translate: Callable[[str], ImportedFile | None] = lambda path: None
    refuse_key: Callable[[str], None] = lambda key: None


NO_IMPORTERS = Importers()


@dataclass(frozen=True, slots=True)
class Flag:
    """Value of a command-line option: configuration key, value, and name of the option."""

    key: str
    value: object
    option: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """Effective configuration, the origin of every dotted key, and translated files."""

    config: Config
    origins: Mapping[str, Origin]
    translations: tuple[ImportedFile, ...] = ()

    def is_set(self, key: str) -> bool:
        """Return True if a file, `--set` or a flag set this key or a key below it."""
        return any(
            origin.is_given
            for name, origin in self.origins.items()
            if name == key or name.startswith(f"{key}.")
        )

    def is_changed(self, key: str) -> bool:
        """Return True if a file, `--set` or a flag changed the default of this key or one below it.

        A configuration that msrl has written sets every key, most of them to their defaults.
        """
        return any(
            origin.is_given and not self._is_default(name)
            for name, origin in self.origins.items()
            if name == key or name.startswith(f"{key}.")
        )

    def _is_default(self, key: str) -> bool:
        try:
            default = _value_at(_defaults(), key)
        except (AttributeError, KeyError, IndexError):  # an item of a list or mapping
            return False
        return bool(self.value(key) == default)

    def value(self, key: str) -> Any:
        """Return the effective value of a dotted key, which may lead into lists and mappings."""
        return _value_at(self.config, key)

    def shown(self, key: str) -> Any:
        """Return the value of a key for messages, with references in place of secrets."""
        return shown(self.config, key, self.value(key))

    def mistake(self, key: str, message: str) -> str:
        """Return an error message as `file:line: key=value: message`."""
        value = self.shown(key)
        text = "" if value is None else f"={written(value)}"
        below = (self.origins[name] for name in self.origins if name.startswith(f"{key}."))
        origin = self.origins.get(key) or next(below, DEFAULT)
        location = "" if origin == DEFAULT else f"{origin}: "
        return f"{location}{key}{text}: {message}"


def load(
    files: Sequence[str] = (),
    sets: Sequence[str] = (),
    flags: Sequence[Flag] = (),
    importers: Importers = NO_IMPORTERS,
    environment: Mapping[str, str] | None = None,
) -> Resolved:
    """Merge schema defaults, preset, files (each after its `defaults:`), `--set` and flags.

    Later sources override earlier ones, in this order. `environment` replaces that of this process
    in `${env:NAME}`.

    Raises:
        InvalidConfigError: one message per error.
    """
    translations: list[ImportedFile] = []
    layers, errors = _layers(files, sets, flags, importers, translations)
    defaults = wrap(Config().model_dump(), DEFAULT)
    tree = _merged(defaults, layers, errors)
    preset = _preset(tree)
    if preset is not None:
        tree = _merged(merge(defaults, preset), layers, [])
    interpolation = Interpolation(tree, environment)
    tree = interpolation.resolve()
    config, schema_errors = _validated(tree)
    errors += [*interpolation.errors, *schema_errors]
    if errors or config is None:
        valid_part, known_part = _valid_parts(tree)
        if errors != schema_errors:  # keys of a file that cannot be read are unknown, too
            known_part = None
        raise InvalidConfigError(list(dict.fromkeys(errors)), valid_part, known_part)
    return Resolved(config, _origins(tree), tuple(translations))


class InvalidConfigError(ManyErrors):
    """Errors of a configuration, and what is valid of it.

    Attributes:
        valid_part: The configuration with the defaults in place of invalid values.
        known_part: The same with unknown values instead; None if whole files could not be read.
    """

    def __init__(
        self,
        messages: Sequence[str],
        valid_part: Resolved | None = None,
        known_part: Resolved | None = None,
    ) -> None:
        super().__init__(messages)
        self.valid_part, self.known_part = valid_part, known_part


def _layers(
    files: Sequence[str],
    sets: Sequence[str],
    flags: Sequence[Flag],
    importers: Importers,
    translations: list[ImportedFile],
) -> tuple[list[Node], list[str]]:
    """Return the layers to merge over the defaults, and the errors of unreadable ones.

    Files of other systems are added to `translations`.
    """
    layers: list[Node] = []
    errors: list[str] = []
    sources = [
        *(partial(_file, file, importers, translations) for file in files),
        *(partial(_set, assignment, importers) for assignment in sets),
    ]
    for read_layers in sources:
        try:
            layers += read_layers()
        except ManyErrors as error:
            errors += error.messages
        except MsrlError as error:
            errors.append(str(error))
    layers += [at(flag.key, wrap(_literal(flag.value), Origin(flag.option))) for flag in flags]
    return layers, errors


def _merged(tree: Node, layers: Sequence[Node], errors: list[str]) -> Node:
    """Merge the layers over the defaults in order. Append the messages of errors to `errors`."""
    defaults = tree
    for layer in layers:
        try:
            tree = merge(tree, layer, defaults)
        except MsrlError as error:
            errors.append(str(error))
    return tree


def _preset(tree: Node) -> Node | None:
    """Return the values of `algo.preset`, or None if it is unset or unknown.

    The validation of the tree reports unknown presets.
    """
    node = node_at(tree, ("algo", "preset"))
    name = node.value if node is not None else None
    if not isinstance(name, str) or name not in preset_names():
        return None
    return at("algo", wrap(preset_values(name), Origin(f"preset {name}", is_given=False)))


def _file(path: str, importers: Importers, translations: list[ImportedFile]) -> list[Node]:
    """Return the trees of one file. Translate a file of another system.

    Raises:
        ManyErrors: keys are wrong or not supported.
    """
    translation = importers.translate(path)
    if translation is None:
        return read_with_defaults(path)
    errors = [*translation.errors, *translation.refusals()]
    if errors:
        raise ManyErrors(errors)
    translations.append(translation)
    return [translation.tree]


def _set(assignment: str, importers: Importers) -> list[Node]:
    """Return the tree of one `--set`.

    Raises:
        MsrlError: the key belongs to another system.
    """
    importers.refuse_key(assignment.partition("=")[0].strip())
    return [parse_assignment(assignment)]


def _literal(value: Any) -> Any:
    """Return a flag's value with `${` escaped: values from the shell are not interpolated."""
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, (list, tuple)):
        return [_literal(item) for item in cast("list[Any]", value)]
    return value


def _validated(tree: Node) -> tuple[Config | None, list[str]]:
    """Return the Config of a tree, or its error messages.

    Where the schema requires text, a scalar such as 007 is read as the text that the user wrote.
    """
    try:
        config = Config.model_validate(plain(tree))
        return config.with_references(written_references(config, references(tree))), []
    except ValidationError as error:
        with_texts = _with_texts(error, tree)
        if with_texts is not tree:
            return _validated(with_texts)
        return None, error_lines(error, tree)


def _valid_parts(tree: Node) -> tuple[Resolved, Resolved] | tuple[None, None]:
    """Return the configuration with defaults and with unknowns in place of its invalid values.

    Returns None, None if nothing else remains.
    """
    origins, paths = _origins(tree), list[Loc]()
    for _ in range(_MAX_PASSES):
        try:
            config = Config.model_validate(plain(tree))
        except ValidationError as error:
            locs = [details["loc"] for details in error.errors(include_url=False)]
            removed = dict.fromkeys(filter(None, (_removable(tree, loc) for loc in locs)))
            paths += removed
            tree = _edited(tree, removed) or tree
            continue
        known = config
        for path in paths:
            known = with_unknown(known, path)
        return Resolved(config, _origins(tree)), Resolved(known, origins)
    return None, None


def _removable(tree: Node, loc: Loc) -> Loc:
    """Return the part of a path that leads to its last value that is no item of a list."""
    end = len(loc)
    while end and (node_at(tree, loc[:end]) is None or isinstance(loc[end - 1], int)):
        end -= 1
    return loc[:end]


def _with_texts(error: ValidationError, tree: Node) -> Node:
    """Return the tree with the original text of all scalars where the schema requires text."""
    texts: dict[Loc, Node | None] = {}
    for details in error.errors(include_url=False):
        node = node_at(tree, details["loc"]) if details["type"] == "string_type" else None
        if node is not None and node.text is not None and node.value is not None:
            texts[details["loc"]] = replace(node, value=node.text)
    return (_edited(tree, texts) or tree) if texts else tree


def _edited(node: Node, edits: Mapping[Loc, Node | None]) -> Node | None:
    """Return a node with other nodes at these paths below it, and without those that are None.

    One pass makes all edits, since each one copies the sections above it.
    """
    if () in edits:
        return edits[()]
    below: dict[str, dict[Loc, Node | None]] = {}
    for loc, new in edits.items():
        below.setdefault(str(loc[0]), {})[loc[1:]] = new
    items = [
        (key, _edited(child, below[key]) if key in below else child)
        for key, child in children(node).items()
    ]
    kept = {key: child for key, child in items if child is not None}
    return replace(node, value=kept if isinstance(node.value, dict) else tuple(kept.values()))


def _origins(tree: Node, prefix: str = "") -> dict[str, Origin]:
    """Return the origin of every value by dotted key.

    Lists, items of lists and empty mappings count as values.
    """
    origins: dict[str, Origin] = {}
    is_section = isinstance(tree.value, dict) and bool(tree.value)
    if prefix and not is_section:
        origins[prefix] = tree.origin
    for key, child in children(tree).items():
        origins.update(_origins(child, f"{prefix}.{key}" if prefix else key))
    return origins
