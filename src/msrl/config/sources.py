"""Where values come from: YAML files, `--set` and flags, each as a tree whose every node knows its origin.

Numbers and booleans are YAML 1.2's: `1e-5` is a number, `no` is text. A file may name others in `defaults:`, which are laid under it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import yaml

from msrl.errors import ManyErrors, MsrlError, nearest

PACKAGED = Path(__file__).parent / "packaged"


@dataclass(frozen=True, slots=True)
class Origin:
    """`grpo.yaml:14`, `--set`, `--tp`, `preset dapo` or `default`; the last two were not given by the user."""

    name: str
    line: int | None = None
    is_given: bool = True

    def __str__(self) -> str:
        return self.name if self.line is None else f"{self.name}:{self.line}"


@dataclass(frozen=True, slots=True)
class Node:
    """A value, its origin, and (scalars) how it was written. Mappings hold nodes by key, lists hold nodes in order."""

    value: dict[str, Node] | tuple[Node, ...] | str | int | float | bool | None
    origin: Origin
    text: str | None = None


_INT = re.compile(r"[-+]?[0-9][0-9_]*$")
_HEX = re.compile(r"0x[0-9a-fA-F]+$")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$")
_SPECIAL = {
    ".inf": float("inf"),
    "+.inf": float("inf"),
    "-.inf": float("-inf"),
    ".nan": float("nan"),
}
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None, "~": None, "": None}


def scalar(text: str) -> str | int | float | bool | None:
    """The value of a plain (unquoted) YAML scalar.

    >>> scalar("1e-5"), scalar("no"), scalar("True"), scalar("8")
    (1e-05, 'no', True, 8)
    """
    lower = text.lower()
    if lower in _WORDS and text in (lower, lower.capitalize(), lower.upper()):
        return _WORDS[lower]
    if _INT.match(text):
        return int(text.replace("_", ""))
    if _HEX.match(text):
        return int(text, 16)
    if _FLOAT.match(text):
        return float(text.replace("_", ""))
    return _SPECIAL.get(lower, text)


def parse(text: str, name: str, *, located: bool = True) -> Node:
    """One YAML document as a tree, whose nodes know their line in `name` if `located`.

    Raises ManyErrors that names all duplicate or non-text keys, tags and merge keys; MsrlError for what is not YAML.
    """
    try:
        loader = yaml.SafeLoader(text)
        document = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}" if mark and located else name
        is_star = "alias" in f"{error.context} {error.problem}"
        hint = "; a text that begins with * stands in quotes, as in '*.bias'" if is_star else ""
        raise MsrlError(
            f"{where}: not valid YAML: {error.problem or error.context}{hint}"
        ) from None
    except yaml.YAMLError as error:
        raise MsrlError(f"{name}: not valid YAML: {error}") from None
    if document is None:
        return Node(None, Origin(name), "")
    builder = _Builder(name, lines=located)
    tree = builder.node(document, document.start_mark.line)
    if builder.errors:
        raise ManyErrors(builder.errors)
    return tree


class _Builder:
    """From PyYAML's nodes to ours, collecting mistakes."""

    def __init__(self, name: str, *, lines: bool) -> None:
        self.name = name
        self.lines = lines
        self.errors: list[str] = []
        self.resolver = yaml.resolver.Resolver()
        self._open: list[int] = []

    def node(self, node: yaml.Node, line: int) -> Node:
        origin = Origin(self.name, line + 1 if self.lines else None)
        if id(node) in self._open:
            self.errors.append(f"{origin}: an anchor holds itself")
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
            plain = isinstance(node, yaml.ScalarNode) and node.style is None
            return Node(scalar(node.value) if plain else node.value, origin, node.value)
        finally:
            self._open.pop()

    def _refuse_tag(self, node: yaml.Node, origin: Origin) -> None:
        """Notes a tag that was written out, which is one that PyYAML would not have given by itself."""
        plain = isinstance(node, yaml.ScalarNode) and node.style is None
        resolve = cast("Callable[..., str]", self.resolver.resolve)  # pyright: ignore[reportUnknownMemberType]
        own = resolve(type(node), node.value if plain else None, (plain, not plain))
        if node.tag != own:
            self.errors.append(f"{origin}: {node.tag}: tags have no meaning here; take it away")

    def _entries(self, node: yaml.MappingNode) -> Iterator[tuple[str, Node]]:
        seen: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line
            origin = Origin(self.name, line + 1 if self.lines else None)
            if not isinstance(key, yaml.ScalarNode):
                self.errors.append(f"{origin}: a key must be text")
            elif key.value == "<<" and key.style is None:
                self.errors.append(
                    f"{origin}: merge keys (<<) are not read; name shared files in `defaults:`"
                )
            elif key.value in seen:
                first = f"; it stands in line {seen[key.value]} already" if self.lines else ""
                self.errors.append(f"{origin}: {key.value}: given twice in one section{first}")
            else:
                seen[key.value] = line + 1
                yield key.value, self.node(value, line)


def merge(under: Node, over: Node, defaults: Node | None = None) -> Node:
    """`over` laid over `under`, section by section; a list is replaced whole, but a section with numbers for keys changes its items.

    A section or mapping that is set to `null` is what `defaults` has in its place; with nothing written below it, it stays as it is.
    """
    if over.value is None and isinstance(under.value, dict):
        if not over.text:
            return under  # `train:` without a word
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
            raise MsrlError(
                f"{origin}: item {key} does not exist; the list has {len(new)} items, counted from 0"
            )
        new[int(key)] = merge(new[int(key)], node)
    return Node(tuple(new), origin)


def plain(node: Node) -> Any:
    """The bare value of a tree."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, tuple):
        return [plain(child) for child in node.value]
    return node.value


def wrap(value: Any, origin: Origin) -> Node:
    """A bare value as a tree that stands at `origin` throughout."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, Any]", value)
        return Node({str(key): wrap(child, origin) for key, child in entries.items()}, origin)
    if isinstance(value, (list, tuple)):
        items = cast("Sequence[Any]", value)
        return Node(tuple(wrap(child, origin) for child in items), origin)
    return Node(value, origin, None if value is None else str(value))


def at(path: str, node: Node) -> Node:
    """A tree that holds `node` at the dotted `path` and nothing else."""
    for key in reversed(path.split(".")):
        node = Node({key: node}, node.origin)
    return node


def from_set(assignment: str) -> Node:
    """The tree of one `--set a.b=value`; the value is YAML. Raises MsrlError when there is no `=` or no key."""
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


def files_of(
    path: str, *, inside: Path | None = None, parents: tuple[Path, ...] = ()
) -> list[Node]:
    """The tree of a file, after those of its `defaults:`, in the order in which they are merged.

    `inside` is the folder that a relative path starts from. Raises MsrlError for files that are missing, circular or not sections of keys.
    """
    file = find(path, inside)
    if file.resolve() in parents:
        raise MsrlError(f"{file}: its `defaults:` lead back to itself")
    tree = read(file)
    entries: dict[str, Node] = tree.value if isinstance(tree.value, dict) else {}
    layers: list[Node] = []
    errors: list[str] = []
    for name in _defaults(entries.get("defaults")):
        try:
            layers += files_of(
                str(name.value), inside=file.parent, parents=(*parents, file.resolve())
            )
        except ManyErrors as error:
            errors += error.messages
        except MsrlError as error:
            errors.append(f"{name.origin}: defaults: {error}")
    if errors:
        raise ManyErrors(errors)
    return [
        *layers,
        Node({key: node for key, node in entries.items() if key != "defaults"}, tree.origin),
    ]


def _defaults(node: Node | None) -> tuple[Node, ...]:
    if node is None or node.value is None:
        return ()
    if isinstance(node.value, tuple) and all(isinstance(item.value, str) for item in node.value):
        return node.value
    raise MsrlError(
        f"{node.origin}: defaults: must be a list of files or of packaged names ({', '.join(packaged_names())})"
    )


def find(path: str, inside: Path | None = None) -> Path:
    """The file called `path`, relative to `inside`; else the packaged one of that name. Raises MsrlError when there is none."""
    file = (inside or Path()) / path
    if file.is_file():
        return file
    if file.is_dir():
        raise MsrlError(f"{file}: is a folder, not a configuration file")
    packaged = PACKAGED / f"{path.removesuffix('.yaml')}.yaml"
    if path.removesuffix(".yaml") in packaged_names():
        return packaged
    raise MsrlError(
        f"{file}: there is no such file, nor a packaged configuration of this name; {nearest(path, packaged_names())}"
    )


def named(name: str) -> str:
    """The file of `--config-name`: in ./configs, else a packaged one. Raises MsrlError when there is none."""
    stem = name.removesuffix(".yaml")
    local = Path("configs") / f"{stem}.yaml"
    if local.is_file():
        return str(local)
    if stem in packaged_names():
        return stem
    known = [*packaged_names(), *(file.stem for file in Path("configs").glob("*.yaml"))]
    raise MsrlError(
        f"--config-name={name}: neither ./configs nor msrl has a configuration of this name; {nearest(stem, known)}"
    )


def packaged_names() -> tuple[str, ...]:
    """The configurations that come with msrl."""
    return tuple(sorted(file.stem for file in PACKAGED.glob("*.yaml")))


def read(file: Path) -> Node:
    """The tree of one file alone. Raises MsrlError when it cannot be read or is not a section of keys."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise MsrlError(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise MsrlError(f"{file}: is not UTF-8 text") from None
    tree = parse(text, f"packaged/{file.name}" if file.parent == PACKAGED else str(file))
    if tree.value is None:
        return Node({}, tree.origin)
    if not isinstance(tree.value, dict):
        other = (
            ""
            if file.suffix in (".yaml", ".yml")
            else "; scripts of other systems are read by `msrl config import`"
        )
        raise MsrlError(f"{tree.origin}: must hold sections such as `model:` and `train:`{other}")
    return tree
