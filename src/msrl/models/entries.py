"""Names of tensors that lie in a larger one: `NAME[3]` is entry 3 along the first axis of the Hugging Face tensor NAME.

Families whose files have the experts of a layer one behind the other name them so (see `rules.Rule` and `checkpoint/stacks.py`).
"""

from __future__ import annotations

import re
from collections import Counter

from msrl.models.families import all_rules
from msrl.models.shape import Shape

_ENTRY = re.compile(r"(?P<stack>.+)\[(?P<number>\d+)\]")


def entry(stack: str, number: int) -> str:
    """The name of an entry."""
    return f"{stack}[{number}]"


def stack_of(name: str) -> tuple[str, int] | None:
    """The tensor that an entry lies in, and where; None for a tensor of its own."""
    match = _ENTRY.fullmatch(name)
    return (match["stack"], int(match["number"])) if match else None


def stack_sizes(shape: Shape) -> dict[str, int]:
    """The number of entries of every stack of a model."""
    found = (stack_of(name) for rule in all_rules(shape) if rule.expert is not None for name in rule.hf)
    return Counter(place[0] for place in found if place)


def file_names(shape: Shape) -> frozenset[str]:
    """The names of a model's tensors in Hugging Face files."""
    names = (name for rule in all_rules(shape) for name in rule.hf)
    return frozenset(place[0] if (place := stack_of(name)) else name for name in names)
