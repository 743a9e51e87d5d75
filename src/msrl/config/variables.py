"""Environment variables in texts: `${env:NAME}` becomes the value of NAME, and back.

Only the standard library is imported, because processes of rewards and environments use this
module too.
"""

from __future__ import annotations

import os
import re

_VARIABLE = re.compile(r"\$\{env:([^{}]*)\}")
_MIN_SECRET = 6  # shorter values are not replaced in texts, where they may be ordinary words


def with_environment(text: str) -> str:
    """Return a text with `${env:NAME}` replaced by the values of the environment variables.

    Raises:
        KeyError: a variable is not set.
    """
    return _VARIABLE.sub(lambda match: os.environ[match[1].strip()], text)


def without_environment(text: str, template: str) -> str:
    """Return a text in which the values of the variables of `template` are references again.

    >>> without_environment(f"no file {os.environ['PATH']}", "${env:PATH}/x")
    'no file ${env:PATH}'
    """
    names = {name.strip() for name in _VARIABLE.findall(template)}
    values = {os.environ.get(name, ""): name for name in sorted(names)}
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _MIN_SECRET:
            text = text.replace(value, f"${{env:{values[value]}}}")
    return text
