"""Number of step markers in the response: 1/3 per marker, at most 1.0.

Markers are `Step 3:`, `2.` at the start of a line, a bullet (`-`, `*`) on a new line, `First,`,
`Second,`, `Next,` and `Finally,`. MindSpeed-RL's verifier of this name counts a number such as `1.`
only at the start of the response; `numbers: response` does the same.
"""

from __future__ import annotations

import re
from typing import Literal

WRONG = 0.0
NEEDS_ANSWER = False
_MARK = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,")
_MARK_OF_LINES = re.compile(_MARK.pattern, re.MULTILINE)


def score(response: str, answer: str, *, numbers: Literal["lines", "response"] = "lines") -> float:
    """Return 0.0, 1/3, 2/3 or 1.0; the ground truth is not used.

    `numbers` selects where a number such as `2.` counts: at the start of every line, or only at the
    start of the response.
    """
    mark = _MARK_OF_LINES if numbers == "lines" else _MARK
    return min(1.0, len(mark.findall(response)) / 3)
