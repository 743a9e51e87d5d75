"""Placeholders: values of shipped files that the user must replace, such as `your data path`."""

from __future__ import annotations

import re

_PATTERN = re.compile(
    r"\byour\b|\byour_|\bpath[ _/]to\b|\b(ip|socket ifname|ifname) (for|of)\b|<[^<>]+>|^x{2,}$"
    r"|\bx{3,}\b|/path/|^path$|\bip address\b|^\.{3}$|\*{4,}",
    re.I,
)


def is_placeholder(value: object) -> bool:
    """Return True if a value is a text that the user must replace.

    >>> is_placeholder("your data path"), is_placeholder("./model_from_hf/qwen3")
    (True, False)
    """
    return isinstance(value, str) and _PATTERN.search(value) is not None
