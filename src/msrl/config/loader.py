"""From files, `--set` and flags to one frozen Config, or to all mistakes at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

from pydantic import ValidationError

from msrl.config.interpolate import Interpolation
from msrl.config.messages import lines, node_at, written
from msrl.config.presets import PRESETS
from msrl.config.schema import Config
from msrl.config.sources import Node, Origin, at, files_of, from_set, merge, plain, wrap
from msrl.errors import ManyErrors, MsrlError

DEFAULT = Origin("default", is_given=False)


class ImportedFile(Protocol):
    """A file of another system, translated to msrl's keys."""

    @property
    def tree(self) -> Node: ...

    @property
    def errors(self) -> Sequence[str]: ...

    def refused(self) -> Sequence[str]:
        """Return one line per key that msrl cannot honor."""
        ...


@dataclass(frozen=True, slots=True)
class Importers:
    """Functions that recognize the files and keys of other systems.

    `translate` returns None for a file in msrl's own keys. `refuse_key` raises MsrlError for a key of another system in `--set`.
    """

    translate: Callable[[str], ImportedFile | None] = lambda path: None
    refuse_key: Callable[[str], None] = lambda key: None


NO_IMPORTERS = Importers()


@dataclass(frozen=True, slots=True)
class Flag:
    """A value given on the command line: the key that it overlays, the value, and the option as the user knows it."""

    key: str
    value: object
    option: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """The configuration in force, for every dotted key where its value came from, and how files of other systems were read."""

    config: Config
    origins: Mapping[str, Origin]
    translations: tuple[ImportedFile, ...] = ()

    def is_set(self, key: str) -> bool:
        """Whether a file, `--set` or a flag gave this key (or a key below it)."""
        return any(
            origin.is_given
            for name, origin in self.origins.items()
            if name == key or name.startswith(f"{key}.")
        )

    def value(self, key: str) -> Any:
        """The value in force of a dotted key, lists and free mappings (`cluster.env.NAME`) included."""
        value: Any = self.config
        for part in key.split("."):
            if isinstance(value, tuple):
                value = cast("tuple[Any, ...]", value)[int(part)]
            else:
                value = (
                    cast("dict[str, Any]", value)[part]
                    if isinstance(value, dict)
                    else getattr(value, part)
                )
        return value

    def mistake(self, key: str, message: str) -> str:
        """`file:line: key=value: message`."""
        value = self.value(key)
        text = "" if value is None else f"={written(value)}"
        origin = self.origins.get(key) or next(
            (self.origins[name] for name in self.origins if name.startswith(f"{key}.")), DEFAULT
        )
        return (
            f"{key}{text}: {message}" if origin == DEFAULT else f"{origin}: {key}{text}: {message}"
        )


def load(
    files: Sequence[str] = (),
    sets: Sequence[str] = (),
    flags: Sequence[Flag] = (),
    importers: Importers = NO_IMPORTERS,
) -> Resolved:
    """Merge schema defaults, the preset's values, files (each over its `defaults:`), `--set` and flags, in this order.

    Raises ManyErrors with one line per mistake.
    """
    translations: list[ImportedFile] = []
    layers, errors = _layers(files, sets, flags, importers, translations)
    defaults = wrap(Config().model_dump(), DEFAULT)
    tree = _merged(defaults, layers, errors)
    preset = _preset(tree)
    if preset is not None:
        tree = _merged(merge(defaults, preset), layers, [])
    interpolation = Interpolation(tree)
    tree = interpolation.resolve()
    config, more = _validated(tree)
    errors += [*interpolation.errors, *more]
    if errors or config is None:
        raise ManyErrors(list(dict.fromkeys(errors)))
    return Resolved(config, _origins(tree), tuple(translations))


def _layers(
    files: Sequence[str],
    sets: Sequence[str],
    flags: Sequence[Flag],
    importers: Importers,
    translations: list[ImportedFile],
) -> tuple[list[Node], list[str]]:
    """All layers over the defaults, and the mistakes of those that cannot be read. Files of other systems are added to `translations`."""
    layers: list[Node] = []
    errors: list[str] = []
    sources = [
        *(partial(_file, file, importers, translations) for file in files),
        *(partial(_set, assignment, importers) for assignment in sets),
    ]
    for read in sources:
        try:
            found = read()
            layers += found if isinstance(found, list) else [found]
        except ManyErrors as error:
            errors += error.messages
        except MsrlError as error:
            errors.append(str(error))
    layers += [at(flag.key, wrap(_literal(flag.value), Origin(flag.option))) for flag in flags]
    return layers, errors


def _merged(tree: Node, layers: Sequence[Node], errors: list[str]) -> Node:
    """The layers over the tree of defaults, from left to right; mistakes go to `errors`."""
    defaults = tree
    for layer in layers:
        try:
            tree = merge(tree, layer, defaults)
        except MsrlError as error:
            errors.append(str(error))
    return tree


def _preset(tree: Node) -> Node | None:
    """What `algo.preset` fills in, where there is one of this name; the others are refused when the tree is validated."""
    node = node_at(tree, ("algo", "preset"))
    name = node.value if node is not None else None
    if not isinstance(name, str) or name not in PRESETS:
        return None
    return at("algo", wrap(PRESETS[name], Origin(f"preset {name}", is_given=False)))


def _file(path: str, importers: Importers, translations: list[ImportedFile]) -> list[Node]:
    """The trees of one file, translated if it is another system's. Raises ManyErrors for keys that are wrong or not built yet."""
    translation = importers.translate(path)
    if translation is None:
        return files_of(path)
    errors = [*translation.errors, *translation.refused()]
    if errors:
        raise ManyErrors(errors)
    translations.append(translation)
    return [translation.tree]


def _set(assignment: str, importers: Importers) -> Node:
    """The tree of one `--set`. Raises MsrlError for a key of another system's files."""
    importers.refuse_key(assignment.partition("=")[0].strip())
    return from_set(assignment)


def _literal(value: Any) -> Any:
    """A flag's value with its `${` protected: what the shell passed is meant as it is."""
    if isinstance(value, str):
        return value.replace("${", "$${")
    if isinstance(value, (list, tuple)):
        return [_literal(item) for item in cast("list[Any]", value)]
    return value


def _validated(tree: Node) -> tuple[Config | None, list[str]]:
    """The Config of a tree, or the lines of its mistakes. A scalar where text is wanted is taken as it was written."""
    try:
        return Config.model_validate(plain(tree)), []
    except ValidationError as error:
        as_text = [
            finding["loc"]
            for finding in error.errors(include_url=False)
            if finding["type"] == "string_type"
        ]
        retold = tree
        for loc in as_text:
            node = node_at(tree, loc)
            if node is not None and node.text is not None and node.value is not None:
                retold = _replace(retold, loc, Node(node.text, node.origin, node.text))
        if retold is not tree:
            return _validated(retold)
        return None, lines(error, tree)


def _replace(tree: Node, loc: Sequence[int | str], new: Node) -> Node:
    if not loc:
        return new
    key, rest = loc[0], loc[1:]
    if isinstance(tree.value, dict):
        return Node(
            {**tree.value, str(key): _replace(tree.value[str(key)], rest, new)}, tree.origin
        )
    if isinstance(tree.value, tuple):
        return Node(
            tuple(
                _replace(item, rest, new) if i == key else item for i, item in enumerate(tree.value)
            ),
            tree.origin,
        )
    return tree


def _origins(tree: Node, prefix: str = "") -> dict[str, Origin]:
    """The origin of every value, by dotted key; lists and empty mappings count as values, and so do the items of lists."""
    children: dict[str, Node] = {}
    if isinstance(tree.value, dict):
        children = tree.value
    elif isinstance(tree.value, tuple):
        children = {str(i): item for i, item in enumerate(tree.value)}
    found = (
        {} if (isinstance(tree.value, dict) and children) or not prefix else {prefix: tree.origin}
    )
    for key, child in children.items():
        found.update(_origins(child, f"{prefix}.{key}" if prefix else key))
    return found
