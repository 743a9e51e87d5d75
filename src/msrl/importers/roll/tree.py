"""Resolution of hydra `defaults` and references in ROLL files.

Files with DeepSpeed settings may be missing: msrl trains with Megatron.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from msrl.config.sources import Node
from msrl.importers.hydra import compose_file

_VARIABLE = re.compile(r"\$\{(\w+)")
_DEEPSPEED = re.compile(r"\$\{deepspeed_\w+\}")


def resolve_tree(tree: Node, file: Path, errors: list[str]) -> tuple[Node, frozenset[str]]:
    """Return the tree merged over the files of its `defaults`, with every `${...}` resolved.

    Returns also the top-level keys that other keys refer to.
    """
    variables: set[str] = set()

    def prepare(node: Node) -> Node:
        variables.update(_referenced_names(node))
        return _without_deepspeed(node)

    tree = compose_file(tree, file, errors, skip=lambda name: "deepspeed" in name, prepare=prepare)
    return tree, frozenset(variables)


def _referenced_names(node: Node) -> Iterator[str]:
    """Yield the first names of all references `${NAME.KEY}`."""
    if isinstance(node.value, dict):
        children: Iterable[Node] = node.value.values()
    else:
        children = node.value if isinstance(node.value, tuple) else ()
    for child in children:
        yield from _referenced_names(child)
    if isinstance(node.value, str):
        yield from _VARIABLE.findall(node.value)


def _without_deepspeed(node: Node) -> Node:
    """Replace sections `${deepspeed_...}` by {}."""
    if isinstance(node.value, dict):
        return Node(
            {key: _without_deepspeed(child) for key, child in node.value.items()}, node.origin
        )
    if isinstance(node.value, tuple):
        return Node(tuple(_without_deepspeed(child) for child in node.value), node.origin)
    if isinstance(node.value, str) and _DEEPSPEED.fullmatch(node.value.strip()):
        return Node({}, node.origin)
    return node
