"""Sources of values: YAML files, `--set` and flags, as trees whose nodes have an origin.

Numbers and booleans follow YAML 1.2: `1e-5` is a number, `no` is text. The files that a file lists
under `defaults:` are merged before it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml

from msrl.errors import ManyErrors, MsrlError, nearest
from msrl.files import read_user_text

PACKAGED = Path(__file__).parent / "packaged"
_FOLDERS = (Path("configs"), Path("configs/rlxf"))  # of --config-name, as in MindSpeed


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a value: `grpo.yaml:14`, `--set`, `--tp`, `preset dapo` or `default`.

    `is_given` is False for presets and defaults, which the user did not set.
    """

    name: str
    line: int | None = None
    is_given: bool = True

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}"


@dataclass(frozen=True, slots=True)
class Node:
    """Value with its origin and, for scalars, its original text. Mappings and lists hold nodes.

    A value from the environment has a `reference`: the text with `${env:NAME}` that it came from.
    """

    value: dict[str, Node] | tuple[Node, ...] | str | int | float | bool | None
    origin: Origin
    text: str | None = None
    reference: str | None = None


# Limits for hostile files. No configuration comes close to them.
_MAX_DIGITS = 300
_MAX_NODES = 100_000
_MAX_DEPTH = 100
_MAX_FILES = 100  # of one configuration with its `defaults:`
_INT = re.compile(r"[-+]?[0-9][0-9_]*$")
_HEX = re.compile(r"0x[0-9a-fA-F]+$")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_SPECIAL = {
    ".inf": float("inf"),
    "+.inf": float("inf"),
    "-.inf": float("-inf"),
    ".nan": float("nan"),
}
_SURROGATE = re.compile("[\ud800-\udfff]")
_OLD_OCTAL = re.compile(r"[-+]?0[0-7_]+$")
_OLD_MINUTES = re.compile(r"[-+]?[1-9][0-9_]*(:[0-5]?[0-9])+$")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "~": None, "": None}
_OLD_WORDS = {**_WORDS, "yes": True, "on": True, "no": False, "off": False}


def scalar(text: str) -> str | int | float | bool | None:
    """Return the value of a plain (unquoted) YAML scalar. Numbers of over 300 digits stay text.

    >>> scalar("1e-5"), scalar("no"), scalar("True"), scalar("8")
    (1e-05, 'no', True, 8)
    """
    lower = text.lower()
    if lower in _WORDS and text in (lower, lower.capitalize(), lower.upper()):
        return _WORDS[lower]
    if len(text) > _MAX_DIGITS:
        return text
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _HEX.match(text):
        return int(text, 16)
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    return _SPECIAL.get(lower, text)


def old_scalar(text: str) -> str | int | float | bool | None:
    """Return the value of a plain scalar in YAML 1.1, which PyYAML and OmegaConf read.

    >>> old_scalar("no"), old_scalar("010"), old_scalar("1:30"), old_scalar("1e-5")
    (False, 8, 90, 1e-05)
    """
    lower = text.lower()
    if lower in _OLD_WORDS and text in (lower, lower.capitalize(), lower.upper()):
        return _OLD_WORDS[lower]
    if _OLD_OCTAL.match(text) and len(text) <= _MAX_DIGITS:
        return int(text.replace("_", ""), 8)
    if _OLD_MINUTES.match(text) and len(text) <= _MAX_DIGITS:
        value = 0
        for digits in text.lstrip("+-").replace("_", "").split(":"):
            value = value * 60 + int(digits)
        return -value if text.startswith("-") else value
    return scalar(text)


def parse(text: str, name: str, *, located: bool = True, is_old: bool = False) -> Node:
    """Return one YAML document as a tree. If `located`, its nodes have their line in `name`.

    With `is_old`, scalars have their meaning in YAML 1.1, and merge keys are followed.

    Raises:
        ManyErrors: the document has duplicate or non-text keys, tags, merge keys, or null
            characters.
        MsrlError: the text is not valid YAML, is nested too deeply, or is too large with its
            aliases expanded.
    """
    try:
        document = _Loader(text).get_single_node()
    except _TooManyValuesError:
        raise _too_many_values(Origin(name)) from None
    except _TooDeepError as error:
        origin = Origin(name, error.args[0] if located else None)
        raise MsrlError(
            f"{origin}: is nested too deeply. Use at most {_MAX_DEPTH} levels."
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark and located else name
        is_star = "alias" in f"{error.context} {error.problem}"
        hint = "; quote a text that begins with *, as in '*.bias'" if is_star else ""
        raise MsrlError(
            f"{where}: not valid YAML: {error.problem or error.context}{hint}"
        ) from None
    # ValueError: a version of YAML of thousands of digits.
    except (yaml.YAMLError, ValueError) as error:
        raise MsrlError(f"{name}: not valid YAML: {error}") from None
    if document is None:
        return Node(None, Origin(name), "")
    builder = _Builder(name, lines=located, is_old=is_old)
    tree = builder.node(document, document.start_mark.line)
    if builder.errors:
        raise ManyErrors(builder.errors)
    return tree


class _TooManyValuesError(Exception):
    """A file has more values than a configuration may have."""


class _TooDeepError(Exception):
    """A file has more levels than a configuration may have, from the line in its argument on."""


class _Loader(yaml.SafeLoader):
    """Loader that stops at too many values and levels.

    PyYAML needs a minute for a million values, and its time grows with the square of the levels.
    """

    num_nodes = 0
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node."""
        self.num_nodes += 1
        if self.num_nodes > _MAX_NODES:
            raise _TooManyValuesError
        self.depth += 1
        self._require_depth(self.depth)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:  # noqa: N803 - as in PyYAML
        """Read an opening bracket. The scanner reads many of them before their nodes."""
        self._require_depth(self.flow_level)
        cast("Any", super()).fetch_flow_collection_start(TokenClass)

    def _require_depth(self, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise _TooDeepError(cast("Any", self).get_mark().line + 1)


def _too_many_values(origin: Origin) -> MsrlError:
    return MsrlError(
        f"{origin}: the file has more than {_MAX_NODES:,} values with its aliases expanded. Use "
        "fewer values, or fewer aliases (*NAME)."
    )


def _unwritable(text: str) -> str | None:
    """Return what no name of a file may have, if the text has it."""
    if "\0" in text:
        return "a null character"
    return "half of a character (an unpaired surrogate)" if _SURROGATE.search(text) else None


class _Builder:
    """Converter of PyYAML nodes to `Node`, which collects errors."""

    def __init__(self, name: str, *, lines: bool, is_old: bool = False) -> None:
        self.name = name
        self.is_old = is_old
        self.scalar = old_scalar if is_old else scalar
        self.lines = lines
        self.errors: list[str] = []
        self.resolver = yaml.resolver.Resolver()
        self._open: list[int] = []  # ids of the nodes that are being converted
        self._num_nodes = 0

    def node(self, node: yaml.Node, line: int) -> Node:
        origin = Origin(self.name, line + 1 if self.lines else None)
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES:
            raise _too_many_values(origin)
        if id(node) in self._open:
            self.errors.append(f"{origin}: an anchor contains itself")
            return Node(None, origin)
        self._open.append(id(node))
        try:
            self._refuse_tag(node, origin)
            if isinstance(node, yaml.MappingNode):
                return Node(dict(self._entries(node)), origin)
            if isinstance(node, yaml.SequenceNode):
                return Node(
                    tuple(self.node(item, item.start_mark.line) for item in node.value), origin
                )
            if problem := _unwritable(node.value):
                self.errors.append(f"{origin}: a value has {problem}; remove it")
            is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
            return Node(self.scalar(node.value) if is_plain else node.value, origin, node.value)
        finally:
            self._open.pop()

    def _refuse_tag(self, node: yaml.Node, origin: Origin) -> None:
        """Record an explicit tag: one that differs from the tag that PyYAML infers."""
        is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
        resolve = cast("Callable[..., str]", self.resolver.resolve)  # pyright: ignore[reportUnknownMemberType]
        value = node.value if is_plain else None
        inferred = resolve(type(node), value, (is_plain, not is_plain))
        if node.tag != inferred:
            self.errors.append(f"{origin}: {node.tag}: tags are not supported; remove the tag")

    def _entries(self, node: yaml.MappingNode) -> Iterator[tuple[str, Node]]:
        """Yield the keys and values of a section, and record keys that are not valid."""
        seen: dict[str, int] = {}
        own = {key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)}
        for key, value in node.value:
            line = key.start_mark.line
            origin = Origin(self.name, line + 1 if self.lines else None)
            if not isinstance(key, yaml.ScalarNode):
                self.errors.append(f"{origin}: a key must be text")
            elif problem := _unwritable(key.value):
                self.errors.append(f"{origin}: a key has {problem}; remove it")
            elif key.value == "<<" and key.style is None and self.is_old:
                merged = dict(self._merged(value, origin))
                yield from ((name, item) for name, item in merged.items() if name not in own)
            elif key.value == "<<" and key.style is None:
                self.errors.append(
                    f"{origin}: merge keys (<<) are not supported; list shared files in `defaults:`"
                )
            elif key.value in seen:
                first = f"; the first is in line {seen[key.value]}" if self.lines else ""
                self.errors.append(
                    f"{origin}: {key.value}: key appears twice in one section{first}"
                )
            else:
                seen[key.value] = line + 1
                yield key.value, self.node(value, line)

    def _merged(self, node: yaml.Node, origin: Origin) -> Iterator[tuple[str, Node]]:
        """Yield the keys of the section, or of the list of sections, that a merge key names."""
        sections = node.value[::-1] if isinstance(node, yaml.SequenceNode) else [node]
        for section in sections:
            if isinstance(section, yaml.MappingNode):
                yield from self._entries(section)
            else:
                self.errors.append(f"{origin}: <<: must name sections (*NAME)")


def merge(under: Node, over: Node, defaults: Node | None = None) -> Node:
    """Return the tree `under` with the values of `over`, merged section by section.

    A list replaces a list, but a section whose keys are numbers changes single items. Setting a
    section or mapping to `null` resets it to `defaults`; an empty section changes nothing.
    """
    if over.value is None and isinstance(under.value, dict):
        if not over.text:
            return under  # `train:` with nothing below it
        return over if defaults is None else defaults
    if not isinstance(over.value, dict):
        return over
    if isinstance(under.value, tuple) and over.value and all(key.isdigit() for key in over.value):
        return _merge_items(under.value, over.value, over.origin)
    if not isinstance(under.value, dict):
        return over
    entries = dict(under.value)
    usual = defaults.value if defaults is not None and isinstance(defaults.value, dict) else {}
    for key, node in over.value.items():
        entries[key] = merge(entries[key], node, usual.get(key)) if key in entries else node
    return Node(entries, over.origin)


def _merge_items(items: tuple[Node, ...], changes: Mapping[str, Node], origin: Origin) -> Node:
    new = list(items)
    for key, node in changes.items():
        if int(key) >= len(new):
            count = f"the list has {len(new)} items, counted from 0"
            raise MsrlError(f"{origin}: item {key} does not exist; {count}")
        new[int(key)] = merge(new[int(key)], node)
    return Node(tuple(new), origin)


def plain(node: Node) -> Any:
    """Return the value of a tree without origins."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, tuple):
        return [plain(child) for child in node.value]
    return node.value


def printable_value(node: Node) -> Any:
    """Return the value of a tree for messages: with references in place of their values."""
    if node.reference is not None:
        return node.reference
    if isinstance(node.value, dict):
        return {key: printable_value(child) for key, child in node.value.items()}
    if isinstance(node.value, tuple):
        return [printable_value(child) for child in node.value]
    return node.value


def children(node: Node) -> dict[str, Node]:
    """Return the nodes of a section by key and those of a list by number; none of other values."""
    if isinstance(node.value, dict):
        return node.value
    if isinstance(node.value, tuple):
        return {str(i): item for i, item in enumerate(node.value)}
    return {}


def references(node: Node, prefix: str = "") -> dict[str, str]:
    """Return the references of all values from the environment by dotted key."""
    if node.reference is not None:
        return {prefix: node.reference}
    keys: dict[str, str] = {}
    for key, child in children(node).items():
        keys |= references(child, f"{prefix}.{key}" if prefix else key)
    return keys


def wrap(value: Any, origin: Origin) -> Node:
    """Return a value as a tree whose nodes all have this origin."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return Node({str(key): wrap(child, origin) for key, child in entries.items()}, origin)
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        return Node(tuple(wrap(child, origin) for child in items), origin)
    return Node(value, origin, None if value is None else str(value))


def at(path: str, node: Node) -> Node:
    """Return a tree that contains only `node`, at the dotted `path`."""
    for key in reversed(path.split(".")):
        node = Node({key: node}, node.origin)
    return node


def parse_assignment(assignment: str) -> Node:
    """Return the tree of one `--set a.b=value`, whose value is YAML.

    Raises:
        MsrlError: `=` or the key is missing, or the value is not valid YAML.
    """
    path, equals, text = assignment.partition("=")
    path = path.strip()
    if not equals or not path or not all(path.split(".")):
        raise MsrlError(f"--set {assignment}: write it as key=value, as in --set train.steps=10")
    try:
        node = parse(text, "--set", located=False)
    except ManyErrors:
        raise
    except MsrlError as error:
        raise MsrlError(f"--set: {assignment}{str(error).removeprefix('--set')}") from None
    return at(path, replace(node, text="null") if node.value is None else node)


def read_with_defaults(path: str) -> list[Node]:
    """Return the trees of the files in `defaults:` and of the file itself, in order of merging.

    `path` is a file or the name of a packaged configuration.

    Raises:
        MsrlError: a file is missing, lists itself directly or indirectly, or has no sections, or
            the `defaults:` lead to too many files.
    """
    try:
        return _read_layers(path, [])
    except _TooManyFilesError:
        raise MsrlError(
            f"{path}: its `defaults:` lead to more than {_MAX_FILES} files. Use fewer, and list "
            "no file several times."
        ) from None


class _TooManyFilesError(Exception):
    """The `defaults:` of a configuration lead to too many files."""


def _read_layers(
    path: str, opened: list[str], inside: Path | None = None, parents: tuple[Path, ...] = ()
) -> list[Node]:
    """Return the trees of a file. Relative paths are resolved against the folder `inside`.

    `opened` are all files so far: files that list others twice multiply. `parents` are those whose
    `defaults:` led to this file.
    """
    if len(opened) == _MAX_FILES:
        raise _TooManyFilesError
    opened.append(path)
    file = find(path, inside)
    if file.resolve() in parents:
        raise MsrlError(f"{file}: its `defaults:` include the file itself")
    tree = read(file)
    entries: dict[str, Node] = tree.value if isinstance(tree.value, dict) else {}
    layers: list[Node] = []
    errors: list[str] = []
    for name in _defaults(entries.get("defaults")):
        try:
            layers += _read_layers(str(name.value), opened, file.parent, (*parents, file.resolve()))
        except ManyErrors as error:
            errors += error.messages
        except MsrlError as error:
            errors.append(f"{name.origin}: defaults: {error}")
    if errors:
        raise ManyErrors(errors)
    values = {key: node for key, node in entries.items() if key != "defaults"}
    return [*layers, Node(values, tree.origin)]


def _defaults(node: Node | None) -> tuple[Node, ...]:
    if node is None or node.value is None:
        return ()
    if isinstance(node.value, tuple) and all(isinstance(item.value, str) for item in node.value):
        return node.value
    raise MsrlError(
        f"{node.origin}: defaults: must be a list of files or names of packaged configurations "
        f"({', '.join(packaged_names())})"
    )


def find(path: str, inside: Path | None = None) -> Path:
    """Return the file at `path`, relative to `inside`, or the packaged configuration of that name.

    Raises:
        MsrlError: neither exists.
    """
    file = (inside or Path()) / path
    if file.is_file():
        return file
    if file.is_dir():
        raise MsrlError(f"{file}: is a folder, not a configuration file")
    packaged = PACKAGED / f"{path.removesuffix('.yaml')}.yaml"
    if path.removesuffix(".yaml") in packaged_names():
        return packaged
    raise MsrlError(
        f"{file}: neither a file nor the name of a packaged configuration; "
        f"{nearest(path, packaged_names())}"
    )


def find_by_name(name: str) -> str:
    """Return the file of `--config-name`: in ./configs or ./configs/rlxf, or else a packaged one.

    Raises:
        MsrlError: no configuration has this name.
    """
    stem = name.removesuffix(".yaml")
    local = next(
        (file for file in (at / f"{stem}.yaml" for at in _FOLDERS) if file.is_file()), None
    )
    if local is not None:
        return str(local)
    if stem in packaged_names():
        return stem
    known = [*packaged_names(), *(file.stem for at in _FOLDERS for file in at.glob("*.yaml"))]
    raise MsrlError(
        f"--config-name={name}: no such configuration in ./configs, ./configs/rlxf or among the "
        "packaged ones; "
        f"{nearest(stem, known)}"
    )


def packaged_names() -> tuple[str, ...]:
    """Return the names of the configurations that come with msrl."""
    return tuple(sorted(file.stem for file in PACKAGED.glob("*.yaml")))


def read(file: Path, *, is_old: bool = False) -> Node:
    """Return the tree of one file, without its `defaults:`. `is_old` means YAML 1.1.

    Raises:
        MsrlError: the file cannot be read or has no sections.
    """
    text = read_user_text(file)
    name = f"packaged/{file.name}" if file.parent == PACKAGED else str(file)
    tree = parse(text, name, is_old=is_old)
    if tree.value is None:
        return Node({}, tree.origin)
    if not isinstance(tree.value, dict):
        is_yaml = file.suffix in (".yaml", ".yml")
        hint = "" if is_yaml else "; use `msrl config import` for scripts of other systems"
        raise MsrlError(f"{tree.origin}: must hold sections such as `model:` and `train:`{hint}")
    return tree
