"""Date that chat templates write with transformers' `strftime_now` (Llama 3.1, gpt-oss, ...).

A fixed date replaces the calls in the source of the template. Whoever renders the result then
writes that date: transformers, vLLM, and exported models.
"""

from __future__ import annotations

import json
import re
from datetime import date

from msrl.errors import MsrlError

_NAME = re.compile(r"\bstrftime_now\b")
_CALL = re.compile(r"""\bstrftime_now\s*\(\s*(?:format\s*=\s*)?(?:"([^"\\]*)"|'([^'\\]*)')\s*\)""")
_ANY_CALL = re.compile(r"\bstrftime_now\s*\(")


def writes_date(template: str) -> bool:
    """Return True if a chat template may write the current date into a text."""
    return _NAME.search(template) is not None


def with_fixed_day(template: str, day: str) -> str:
    """Return a chat template that writes a fixed day.

    Raises:
        MsrlError: the template computes the format of the date.

    >>> dated("Today: {{ strftime_now('%d %b %Y') }}", "2024-07-26")
    'Today: {{ "26 Jul 2024" }}'
    """
    chosen = date.fromisoformat(day)

    def text(call: re.Match[str]) -> str:
        return json.dumps(chosen.strftime(call[1] if call[2] is None else call[2]))

    fixed = _CALL.sub(text, template)
    if _ANY_CALL.search(fixed):
        raise MsrlError(
            f"date={day}: the chat template computes the format of its date, so that the date "
            "cannot be fixed. Use a packaged template."
        )
    return fixed
