"""Composition of files as hydra does it: `defaults`, `${key}`, `${oc.env:NAME}` and `${now:...}`.

A name in `defaults` is a file beside the including one; its keys belong to the section of its
folder, or to the section that `name@section` or its first line `# @package section` names. The
including file overrides them unless `_self_` stands before them. Source: Hydra 1.3, The Defaults
List, and OmegaConf 2.3, Custom Resolvers.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast

from msrl.config.interpolate import Interpolation
from msrl.config.messages import node_at
from msrl.config.sources import Node, Origin, at, merge, parse, plain, read, scalar, wrap
from msrl.errors import MsrlError

_REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+)*)\}")
_RESOLVER = re.compile(r"\$\{(oc\.env|oc\.decode|now):([^{}]*)\}")
_RELATIVE = re.compile(r"\$\{(\.+)([^{}.][^{}]*)\}")
_PACKAGE = re.compile(r"#\s*@package\s+(\S+)")
_MAX_DEPTH = 8  # of files in files, and of sections in sections


def compose_file(
    tree: Node,
    file: Path,
    errors: list[str],
    *,
    skip: Callable[[str], bool] = lambda _: False,
    groups: tuple[str, ...] = (),
    prepare: Callable[[Node], Node] = lambda node: node,
    overrides: Sequence[Override] = (),
) -> Node:
    """Return a file merged with the files of its `defaults`, with every reference resolved.

    Args:
        tree: contents of the file.
        file: its path.
        errors: list that takes the errors.
        skip: True for a name of `defaults` that is not read.
        groups: folders whose files the importer itself reads; their items stay in `defaults`.
        prepare: change of the merged tree before its references are resolved.
        overrides: changes of the command line, `key=value`, in their order.
    """
    if not overrides and not _is_composed(tree):
        return tree
    reader = _Reader(errors, skip, groups)
    tree = reader.with_defaults(tree, file, 0)
    for override in overrides:
        tree = override.apply_to(tree)
    tree = _with_resolvers(prepare(tree), ())
    interpolation = Interpolation(_with_sections(tree, tree, 0))
    complete = interpolation.resolve()
    errors += interpolation.errors
    return complete


def _is_composed(node: Node) -> bool:
    """Return True if a file has `defaults` or a reference."""
    if isinstance(node.value, dict):
        return "defaults" in node.value or any(_is_composed(c) for c in node.value.values())
    if isinstance(node.value, tuple):
        return any(_is_composed(child) for child in node.value)
    return isinstance(node.value, str) and "${" in node.value


# --- Overrides of the command line ---


@dataclass(frozen=True, slots=True)
class Override:
    """Change of one key on a command line: `key=value`, or `~key`, which has no node."""

    path: str
    node: Node | None

    @staticmethod
    def from_text(text: str, origin: Origin) -> Override | None:
        """Return the change that a word makes; None for another word.

        Raises:
            MsrlError: the value is not valid YAML.
        """
        match = _OVERRIDE.fullmatch(text)
        if match is None or (match[3] is None and match[1] != "~"):
            return None
        if match[1] == "~":
            return Override(match[2], None)
        value = parse(_spaced(match[3]), str(origin), located=False, is_old=True)
        return Override(match[2], wrap(plain(value), origin))

    def apply_to(self, tree: Node) -> Node:
        """Return a tree with the change."""
        if self.node is None:
            return _remove_key(tree, self.path.split("."))
        return merge(tree, at(self.path, self.node))


_OVERRIDE = re.compile(r"(~|\+{0,2})([A-Za-z_][\w./@-]*)(?:=(.*))?", re.S)


# A quoted text, or the start of an entry of `{...}`: its key and a colon without a blank.
_ENTRY = re.compile(r"""("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|([{,]\s*[\w.$/-]+):(?=[^\s:])""")


def _spaced(value: str) -> str:
    """Return a value with a blank after each key, which YAML needs and hydra does not.

    >>> _spaced("{lr:1e-6,name:a}")
    '{lr: 1e-6,name: a}'
    """
    if not value.lstrip().startswith(("{", "[{")):
        return value
    return _ENTRY.sub(lambda match: match[1] or f"{match[2]}: ", value)


def _remove_key(tree: Node, path: Sequence[str]) -> Node:
    """Return a tree without the key at a path."""
    if not isinstance(tree.value, dict):
        return tree
    first, *below = path
    entries = dict(tree.value)
    if first in entries and below:
        entries[first] = _remove_key(entries[first], below)
    else:
        entries.pop(first, None)
    return Node(entries, tree.origin)


# --- The defaults list ---


@dataclass(frozen=True)
class _Reader:
    """Merging of the files in `defaults` lists."""

    errors: list[str]
    skip: Callable[[str], bool]
    groups: tuple[str, ...]

    def with_defaults(self, tree: Node, file: Path, depth: int) -> Node:
        """Return a tree merged with the files that it includes, in their order."""
        entries = tree.value if isinstance(tree.value, dict) else {}
        defaults = entries.get("defaults")
        items = defaults.value if defaults is not None else ()
        if not isinstance(items, tuple):
            return tree  # reported by the importer
        own = Node({key: node for key, node in entries.items() if key != "defaults"}, tree.origin)
        whole = Node({}, tree.origin)
        remaining = tuple(item for item in items if _group(item) in self.groups)
        for item in items:
            if plain(item) == "_self_":
                whole, own = merge(whole, own), Node({}, tree.origin)
            elif item not in remaining:
                whole = self._with_item(whole, item, file, depth)
        return _with_remaining(merge(whole, own), remaining)

    def _with_item(self, whole: Node, item: Node, file: Path, depth: int) -> Node:
        """Merge the files of one item of `defaults`."""
        for name, package in _names(item):
            if self.skip(name) or depth >= _MAX_DEPTH:
                continue
            path = file.parent / f"{name.removeprefix('/').removesuffix('.yaml')}.yaml"
            if not path.is_file():
                if "optional" not in str(plain(item)):
                    self.errors.append(f"{item.origin}: defaults: file not found: {path}")
                continue
            try:
                below = self.with_defaults(read(path, is_old=True), path, depth + 1)
            except MsrlError as error:
                self.errors.append(str(error))
                continue
            section = _section(name, package, path)
            whole = merge(whole, at(section, below) if section else below)
        return whole


def _with_remaining(whole: Node, remaining: tuple[Node, ...]) -> Node:
    """Add items that the importer itself reads to the items of the included files."""
    before = node_at(whole, ["defaults"])
    items = before.value if before is not None and isinstance(before.value, tuple) else ()
    if not remaining and not items:
        return whole
    return merge(whole, at("defaults", Node((*items, *remaining), whole.origin)))


def _group(item: Node) -> str:
    """Return the folder of `group: name`; empty for a name by itself."""
    keys = list(item.value) if isinstance(item.value, dict) else []
    return keys[0] if len(keys) == 1 else ""


def _names(item: Node) -> list[tuple[str, str | None]]:
    """Return the files of an item with their sections; None if the folder names the section."""
    group, value = _group(item), plain(item)
    choices = value[group] if group else value
    words = group.split()
    if words[:1] == ["override"] or (words and words[-1].startswith("hydra/")):
        return []
    names = cast("list[object]", choices) if isinstance(choices, list) else [choices]
    texts = [str(name) for name in names if name is not None]
    folder, _, package = (words[-1] if words else "").partition("@")
    if folder:
        return [(f"{folder}/{text}", package or None) for text in texts]
    pairs = [text.removeprefix("optional ").partition("@") for text in texts]
    return [(name, package or None) for name, _, package in pairs]


def _section(name: str, package: str | None, path: Path) -> str:
    """Return the section that a file of `defaults` belongs to; empty for the whole file."""
    header = _PACKAGE.match(path.read_text(encoding="utf-8"))
    folders = PurePosixPath(name).parts[:-1]
    group = "" if ".." in folders else ".".join(folders)
    section = package or (header[1] if header else "_group_")
    return {"_global_": "", "_here_": "", "_group_": group}.get(section, section)


# --- References ---


def _with_sections(node: Node, tree: Node, depth: int) -> Node:
    """Replace references to sections, such as `${custom_env.FrozenLake}`, by these sections."""
    if isinstance(node.value, dict):
        return Node(
            {key: _with_sections(child, tree, depth) for key, child in node.value.items()},
            node.origin,
        )
    match = _REFERENCE.fullmatch(node.value.strip()) if isinstance(node.value, str) else None
    target = node_at(tree, match[1].split(".")) if match else None
    if target is None or not isinstance(target.value, dict) or depth >= _MAX_DEPTH:
        return node
    return _with_sections(target, tree, depth + 1)


def _with_resolvers(node: Node, path: tuple[str, ...]) -> Node:
    """Replace resolvers of OmegaConf and relative references by what msrl resolves."""
    if isinstance(node.value, dict):
        return Node(
            {key: _with_resolvers(child, (*path, key)) for key, child in node.value.items()},
            node.origin,
        )
    if isinstance(node.value, tuple):
        items = (_with_resolvers(child, (*path, str(i))) for i, child in enumerate(node.value))
        return Node(tuple(items), node.origin)
    if not isinstance(node.value, str) or "${" not in node.value:
        return node
    text = node.value
    for _ in range(_MAX_DEPTH):
        changed = _RELATIVE.sub(lambda match: _absolute(match, path), text)
        changed = _RESOLVER.sub(_resolve_reference, changed)
        if changed == text:
            break
        text = changed
    is_resolved = "${" not in text and node.value.strip().startswith("${")
    return Node(scalar(text) if is_resolved else text, node.origin, text)


def _absolute(match: re.Match[str], path: tuple[str, ...]) -> str:
    """Return `${.key}` and `${..key}` with the path of the section that the dots name."""
    section = path[: max(0, len(path) - len(match[1]))]
    return "${" + ".".join((*section, match[2])) + "}"


def _resolve_reference(match: re.Match[str]) -> str:
    kind, argument = match[1], match[2]
    if kind == "now":
        return time.strftime(argument)
    if kind == "oc.decode":
        return argument
    name, comma, default = argument.partition(",")
    is_set = name.strip() in os.environ
    return f"${{env:{name.strip()}}}" if is_set or not comma else default.strip().strip("'\"")
