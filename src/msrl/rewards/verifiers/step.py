"""Number of step markers in the response: 1/3 per marker, at most 1.0.

Markers are `Step 3:`, `2.` at the start of a line, a bullet (`-`, `*`) on a new line, `First,`,
`Second,`, `Next,` and `Finally,`. It follows MindSpeed-RL's verifier of this name.
"""

from __future__ import annotations

import re

WRONG = 0.0
NEEDS_ANSWER = False
_MARK = re.compile(r"Step \d+:|^\d+\.|\n-|\n\*|First,|Second,|Next,|Finally,", re.MULTILINE)


def score(response: str, answer: str) -> float:
    """Return 0.0, 1/3, 2/3 or 1.0; the ground truth is not used."""
    return min(1.0, len(_MARK.findall(response)) / 3)
