"""`${env:NAME}` and `${section.key}` inside values; `$${` stands for `${` itself.

In the headers of a request `${env:NAME}` is proven and left as it is: a token is read by who sends it (`with_environment`), and stands
neither in a run's config.yaml nor in what is printed or tracked of a configuration.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from msrl.config.sources import Node, Origin, scalar
from msrl.errors import nearest

_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}")
_VARIABLE = re.compile(r"\$\{env:([^{}]*)\}")
_HEADER = re.compile(r"\.headers\.[^.]+$")


def with_environment(text: str) -> str:
    """A text with the values of the environment variables that it names. Raises KeyError for one that is not set."""
    return _VARIABLE.sub(lambda found: os.environ[found[1].strip()], text)


class Interpolation:
    """Resolves all references of a tree; `errors` names the mistakes, and their nodes are left out."""

    def __init__(self, tree: Node, environment: Mapping[str, str] | None = None) -> None:
        self.tree = tree
        self.environment = os.environ if environment is None else environment
        self._found: dict[str, Origin] = {}
        self._open: list[str] = []

    @property
    def errors(self) -> list[str]:
        """One line per mistake; those of one file in the order of its lines."""
        return sorted(self._found, key=lambda line: (self._found[line].name, self._found[line].line or 0))

    def resolve(self) -> Node:
        return self._inside(self.tree, "") or Node({}, self.tree.origin)

    def _inside(self, node: Node, path: str) -> Node | None:
        if isinstance(node.value, dict):
            entries = {key: self._inside(child, f"{path}.{key}" if path else key) for key, child in node.value.items()}
            return Node({key: child for key, child in entries.items() if child is not None}, node.origin)
        if isinstance(node.value, tuple):
            items = [self._inside(child, f"{path}.{i}") for i, child in enumerate(node.value)]
            return Node(tuple(item for item in items if item is not None), node.origin)
        if isinstance(node.value, str) and "${" in node.value:
            return self._scalar(node, node.value, path)
        return node

    def _scalar(self, node: Node, text: str, path: str) -> Node | None:
        if path in self._open:
            circle = " -> ".join([*self._open[self._open.index(path) :], path])
            return self._fail(node, path, f"refers to itself: {circle}", nested=True)
        self._open.append(path)
        try:
            whole = _REFERENCE.fullmatch(text)
            if whole and whole[1] is not None:
                return self._referred(node, whole[1].strip(), path)
            return self._mixed(node, text, path)
        finally:
            self._open.pop()

    def _mixed(self, node: Node, text: str, path: str) -> Node | None:
        parts: list[str] = []
        literals: list[str] = []
        end = 0
        for match in _REFERENCE.finditer(text):
            literals.append(text[end : match.start()])
            parts.append(literals[-1])
            end = match.end()
            found = None if match[1] is None else self._referred(node, match[1].strip(), path)
            if match[1] is not None and found is None:
                return None
            if found is not None and isinstance(found.value, tuple):
                return self._fail(node, path, f"${{{match[1]}}} is a list and cannot stand inside a text")
            parts.append("${" if found is None else found.text or "")
        if any("${" in literal for literal in [*literals, text[end:]]):
            return self._fail(node, path, "`${` is not closed by `}`; write `$${` where `${` itself is meant")
        value = "".join([*parts, text[end:]])
        return Node(value, node.origin, value)

    def _referred(self, node: Node, name: str, path: str) -> Node | None:
        if name.startswith("env:"):
            return self._environment(node, name[4:], path)
        target: Node | None = self.tree
        for key in name.split("."):
            target = _child(target, key)
            if target is None:
                return self._fail(node, path, f"${{{name}}}: there is no such key; {nearest(name, _paths(self.tree))}")
        if isinstance(target.value, dict):
            return self._fail(node, path, f"${{{name}}}: is a section; refer to one of its keys")
        found = self._inside(target, name)
        return None if found is None else Node(found.value, node.origin, found.text)

    def _environment(self, node: Node, name: str, path: str) -> Node | None:
        text = self.environment.get(name)
        if text is None:
            return self._fail(node, path, f"${{env:{name}}}: this environment variable is not set; export it, or write the value")
        if _HEADER.search(path):
            text = f"${{env:{name}}}"
        return Node(scalar(text), node.origin, text)

    def _fail(self, node: Node, path: str, message: str, *, nested: bool = False) -> None:
        """Notes a mistake once: where it stands, not again for each value that refers to it."""
        line = f"{node.origin}: {path}={node.value}: {message}"
        if nested or len(self._open) == 1:
            self._found[line] = node.origin


def _child(node: Node | None, key: str) -> Node | None:
    if node is not None and isinstance(node.value, dict):
        return node.value.get(key)
    if node is not None and isinstance(node.value, tuple) and key.isdigit() and int(key) < len(node.value):
        return node.value[int(key)]
    return None


def _paths(node: Node, prefix: str = "") -> list[str]:
    if not isinstance(node.value, dict):
        return [prefix]
    return [path for key, child in node.value.items() for path in _paths(child, f"{prefix}.{key}" if prefix else key)]
