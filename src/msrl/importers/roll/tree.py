"""Resolution of hydra `defaults` and references in ROLL files.

Files with DeepSpeed settings may be missing: msrl trains with Megatron.
"""

from __future__ import annotations

import re
from pathlib import Path

from msrl.config.sources import Node
from msrl.importers.hydra import composed

_DEEPSPEED = re.compile(r"\$\{deepspeed_\w+\}")


def resolved(tree: Node, file: Path, errors: list[str]) -> Node:
    """Return the tree merged over the files of its `defaults`, with every `${...}` resolved."""
    return composed(
        tree, file, errors, skip=lambda name: "deepspeed" in name, prepare=_without_deepspeed
    )


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
