"""Resolution of hydra `defaults` and OmegaConf `${...}` in ROLL files."""

from __future__ import annotations

import re
from pathlib import Path

from msrl.config.interpolate import Interpolation
from msrl.config.messages import node_at
from msrl.config.sources import Node, merge, plain, read
from msrl.errors import MsrlError
from msrl.importers.translation import Translation

_REFERENCE = re.compile(r"\$\{(\w+(?:\.\w+)*)\}")
_MAX_REFERENCES = 8  # of sections in sections
_DEEPSPEED = re.compile(r"\$\{deepspeed_\w+\}")


def resolved(tree: Node, file: Path, translation: Translation) -> Node:
    """Return the tree merged over the files of its `defaults`, with every `${...}` resolved.

    Files with DeepSpeed settings may be missing.
    """
    tree = _without_deepspeed(_with_defaults(tree, file, translation))
    interpolation = Interpolation(_with_sections(tree, tree, 0))
    complete = interpolation.resolve()
    translation.errors += interpolation.errors
    return complete


def _with_defaults(tree: Node, file: Path, translation: Translation) -> Node:
    entries = tree.value if isinstance(tree.value, dict) else {}
    defaults = entries.get("defaults")
    base = Node({}, tree.origin)
    items = defaults.value if defaults is not None and isinstance(defaults.value, tuple) else ()
    for item in items:
        name = str(plain(item)).partition("@")[0].removesuffix(".yaml")
        path = file.parent / f"{name}.yaml"
        if name == "_self_" or "deepspeed" in name:
            continue
        if not path.is_file():
            translation.errors.append(f"{item.origin}: defaults: file not found: {path}")
            continue
        try:
            base = merge(base, read(path, is_old=True))
        except MsrlError as error:
            translation.errors.append(str(error))
    return merge(base, tree)


def _with_sections(node: Node, tree: Node, depth: int) -> Node:
    """Replace references to sections, such as `${custom_env.FrozenLake}`, by these sections."""
    if isinstance(node.value, dict):
        return Node(
            {key: _with_sections(child, tree, depth) for key, child in node.value.items()},
            node.origin,
        )
    match = _REFERENCE.fullmatch(node.value.strip()) if isinstance(node.value, str) else None
    target = node_at(tree, match[1].split(".")) if match else None
    if target is None or not isinstance(target.value, dict) or depth >= _MAX_REFERENCES:
        return node
    return _with_sections(target, tree, depth + 1)


def _without_deepspeed(node: Node) -> Node:
    """Replace sections `${deepspeed_...}` by {}, and `${oc.env:NAME}` by `${env:NAME}`."""
    if isinstance(node.value, dict):
        return Node(
            {key: _without_deepspeed(child) for key, child in node.value.items()}, node.origin
        )
    if isinstance(node.value, tuple):
        return Node(tuple(_without_deepspeed(child) for child in node.value), node.origin)
    if isinstance(node.value, str) and _DEEPSPEED.fullmatch(node.value.strip()):
        return Node({}, node.origin)
    if isinstance(node.value, str) and "${oc.env:" in node.value:
        text = node.value.replace("${oc.env:", "${env:")
        return Node(text, node.origin, text)
    return node
