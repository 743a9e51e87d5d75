"""Names of slices of a larger tensor: `NAME[3]` is entry 3 along the first axis of NAME.

Families whose Hugging Face files stack the experts of a layer in one tensor use such names (see
`rules.Rule` and `checkpoint/hf/expert_stacks.py`).
"""

from __future__ import annotations

import re
from collections import Counter

from msrl.models.families import all_rules
from msrl.models.shape import Shape

_ENTRY = re.compile(r"(?P<stack>.+)\[(?P<number>\d+)\]")


def entry(stack: str, number: int) -> str:
    """Return the name of an entry."""
    return f"{stack}[{number}]"


def split_entry(name: str) -> tuple[str, int] | None:
    """Return the tensor that contains an entry, and the entry's number.

    None for a name that is not an entry.
    """
    match = _ENTRY.fullmatch(name)
    return (match["stack"], int(match["number"])) if match else None


def stack_sizes(shape: Shape) -> dict[str, int]:
    """Return the number of entries of every stack of a model."""
    names = (name for rule in all_rules(shape) for name in rule.hf if name.endswith("]"))
    return Counter(stack_entry[0] for name in names if (stack_entry := split_entry(name)))


def file_names(shape: Shape) -> frozenset[str]:
    """Return the names of a model's tensors in Hugging Face files."""
    names = (name for rule in all_rules(shape) for name in rule.hf)
    return frozenset(
        stack_entry[0] if (stack_entry := split_entry(name)) else name for name in names
    )
