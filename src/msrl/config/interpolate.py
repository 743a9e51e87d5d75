"""Interpolation of `${env:NAME}` and `${section.key}` in values. `$${` escapes `${`.

The environment may contain secrets. A value that uses it keeps its reference, which is written and
printed in place of the value (`config/secrets.py`). In addresses, headers and keys of requests,
`${env:NAME}` is checked but not replaced: the sender resolves it (`config/variables.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace

from msrl.config.messages import written
from msrl.config.sources import Node, Origin, scalar
from msrl.errors import MsrlError, did_you_mean, similar
from msrl.limits import whole_number

_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}")
_MAX_VALUES = 20_000  # that references insert
_MAX_CHARS = 10_000_000
_MAX_HINTS = 10
_MAX_LEVELS = 50  # of references to values with references
_RESOLVED_BY_SENDER = re.compile(
    r"\.headers\.[^.]+$|^reward\.sources\.\d+\.url$|^algo\.distill\.teachers\.\d+\.(url|api_key)$"
)


class Interpolation:
    """Resolver of all references in a tree.

    `errors` collects the errors. Their nodes are missing from the resolved tree.
    """

    def __init__(self, tree: Node, environment: Mapping[str, str] | None = None) -> None:
        self.tree = tree
        self.environment = os.environ if environment is None else environment
        self._origins: dict[str, Origin] = {}  # by error message
        self._num_unknown = 0  # names of keys that do not exist
        self._open: list[str] = []  # paths whose references are being resolved
        self._first_origin = tree.origin  # of the first of them
        self._num_values = self._num_chars = 0  # that references have inserted

    @property
    def errors(self) -> list[str]:
        """Messages of all errors, sorted by file and line."""
        return sorted(self._origins, key=self._position)

    def _position(self, message: str) -> tuple[str, int]:
        origin = self._origins[message]
        return origin.name, origin.line or 0

    def resolve(self) -> Node:
        """Return the tree with all references resolved.

        Raises:
            MsrlError: References to values with references multiply beyond the limits.
        """
        return self._inside(self.tree, "") or Node({}, self.tree.origin)

    def _inside(self, node: Node, path: str) -> Node | None:
        """Return a node with all references resolved, or None after an error."""
        if self._open:
            self._count(node)
        if isinstance(node.value, dict):
            entries = {
                key: self._inside(child, f"{path}.{key}" if path else key)
                for key, child in node.value.items()
            }
            valid = {key: child for key, child in entries.items() if child is not None}
            return Node(valid, node.origin)
        if isinstance(node.value, tuple):
            items = [self._inside(child, f"{path}.{i}") for i, child in enumerate(node.value)]
            return Node(tuple(item for item in items if item is not None), node.origin)
        if isinstance(node.value, str) and "${" in node.value:
            return self._scalar(node, node.value, path)
        return node

    def _count(self, inserted: Node) -> None:
        """Count a value that a reference inserts."""
        self._num_values += 1
        self._num_chars += len(inserted.text or "")
        where = f"{self._first_origin}: {self._open[0]}"
        if len(self._open) > _MAX_LEVELS:
            raise MsrlError(
                f"{where}: refers to values that refer to others, over more than {_MAX_LEVELS} "
                "levels. Use fewer levels."
            )
        if self._num_values > _MAX_VALUES or self._num_chars > _MAX_CHARS:
            raise MsrlError(
                f"{where}: its references and those before it insert more than {_MAX_VALUES:,} "
                f"values or {_MAX_CHARS:,} characters. Write the values."
            )

    def _scalar(self, node: Node, text: str, path: str) -> Node | None:
        if path in self._open:
            cycle = " -> ".join([*self._open[self._open.index(path) :], path])
            return self._fail(node, path, f"refers to itself: {cycle}", nested=True)
        if not self._open:
            self._first_origin = node.origin
        self._open.append(path)
        try:
            resolved = self._resolved(node, text, path)
            if resolved is None or not resolved.reference or not _RESOLVED_BY_SENDER.search(path):
                return resolved
            return replace(resolved, value=resolved.reference, text=resolved.reference)
        finally:
            self._open.pop()

    def _resolved(self, node: Node, text: str, path: str) -> Node | None:
        match = _REFERENCE.fullmatch(text)
        if match and match[1] is not None:
            return self._target(node, match[1].strip(), path)
        return self._mixed(node, text, path)

    def _mixed(self, node: Node, text: str, path: str) -> Node | None:
        """Return a text with the references in it replaced, or None after an error."""
        pieces: list[str] = []
        written: list[str] = []  # the pieces with references in place of the environment's values
        has_secret = False
        literals: list[str] = []
        end = 0
        for match in _REFERENCE.finditer(text):
            literals.append(text[end : match.start()])
            end = match.end()
            replacement = self._replacement(node, match[1], path)
            if replacement is None:
                return None
            replaced = replacement.text or ""
            has_secret = has_secret or replacement.reference is not None
            pieces += [literals[-1], replaced]
            written += [literals[-1], replacement.reference or replaced.replace("${", "$${")]
        literals.append(text[end:])
        if any("${" in literal for literal in literals):
            message = "`${` is not closed by `}`; write `$${` for a literal `${`"
            return self._fail(node, path, message)
        value = "".join([*pieces, literals[-1]])
        reference = "".join([*written, literals[-1]]) if has_secret else None
        return Node(value, node.origin, value, reference)

    def _replacement(self, node: Node, name: str | None, path: str) -> Node | None:
        """Return the value of a reference, or None after an error. The escape `$${` has no name."""
        if name is None:
            return Node("${", node.origin, "${")
        target = self._target(node, name.strip(), path)
        if target is None:
            return None
        if isinstance(target.value, tuple):
            message = f"${{{name}}} is a list, which cannot be inserted into a text"
            return self._fail(node, path, message)
        return target

    def _target(self, node: Node, name: str, path: str) -> Node | None:
        if name.startswith("env:"):
            return self._environment(node, name[4:], path)
        target: Node | None = self.tree
        for key in name.split("."):
            target = _child(target, key)
            if target is None:
                return self._fail(node, path, f"${{{name}}}: unknown key{self._hint(name)}")
        if isinstance(target.value, dict):
            message = f"${{{name}}}: is a section; refer to one of its keys"
            return self._fail(node, path, message)
        resolved = self._inside(target, name)
        return None if resolved is None else replace(resolved, origin=node.origin)

    def _hint(self, name: str) -> str:
        """Return a hint for an unknown key: only for the first ones, since it takes time."""
        self._num_unknown += 1
        close = similar(name, _paths(self.tree)) if self._num_unknown <= _MAX_HINTS else []
        return f"; {did_you_mean(close)}" if close else ""

    def _environment(self, node: Node, name: str, path: str) -> Node | None:
        text = self.environment.get(name)
        if text is None:
            message = f"${{env:{name}}}: environment variable is not set. Export it."
            return self._fail(node, path, message)
        return Node(scalar(text), node.origin, text, f"${{env:{name}}}")

    def _fail(self, node: Node, path: str, message: str, *, nested: bool = False) -> None:
        """Record an error at its own location only, not for every value that refers to it."""
        line = f"{node.origin}: {path}={written(node.value)}: {message}"
        if nested or len(self._open) == 1:
            self._origins[line] = node.origin


def _child(node: Node | None, key: str) -> Node | None:
    if node is None:
        return None
    if isinstance(node.value, dict):
        return node.value.get(key)
    index = whole_number(key)
    if isinstance(node.value, tuple) and index is not None and index < len(node.value):
        return node.value[index]
    return None


def _paths(node: Node, prefix: str = "") -> list[str]:
    if not isinstance(node.value, dict):
        return [prefix]
    paths: list[str] = []
    for key, child in node.value.items():
        paths += _paths(child, f"{prefix}.{key}" if prefix else key)
    return paths
