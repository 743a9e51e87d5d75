"""Accuracy of the box at the end of the response: right 1.0, else -1.0 plus 0.1 per tool call.

A wrong response scores at most 0.0. The box must be in the last `tail` characters and is compared
as text. It follows MindSpeed-RL's verifier of this name (ReTool, arXiv:2504.11536), which counts
calls in its tool loop; this one counts their closing tags in the text.
"""

from __future__ import annotations

from msrl.rewards.math.extract import ground_truth, last_boxed, truth_refusal

WRONG = -1.0
NEEDS_ANSWER = True
answer_refusal = truth_refusal


def score(
    response: str,
    answer: str,
    *,
    tail: int = 100,
    tool_bonus: float = 0.1,
    tool_end: str = "</tool_call>",
) -> float:
    """Return 1.0 for a right answer, or a score from -1.0 to 0.0."""
    boxed = last_boxed(response[-tail:] if tail > 0 else response)
    if boxed is not None and boxed == ground_truth(answer):
        return 1.0
    if not tool_end:
        return WRONG
    return min(0.0, WRONG + tool_bonus * response.count(tool_end))
