"""The box at the end of the response holds the ground truth: 1.0; else -1.0, and 0.1 more for every tool call, never above 0.0.

The box stands in the last `tail` characters and is compared as text. After MindSpeed-RL's verifier of this name (ReTool,
arXiv:2504.11536), which counts the calls in the loop of its tools; here they are counted in the text, by their closing tag.
"""

from __future__ import annotations

from msrl.rewards.math.extract import ground_truth, last_boxed, truth_refusal

WRONG = -1.0
NEEDS_ANSWER = True
answer_refusal = truth_refusal


def score(response: str, answer: str, *, tail: int = 100, tool_bonus: float = 0.1, tool_end: str = "</tool_call>") -> float:
    """1.0, or from -1.0 to 0.0."""
    boxed = last_boxed(response[-tail:] if tail > 0 else response)
    if boxed is not None and boxed == ground_truth(answer):
        return 1.0
    return min(0.0, WRONG + tool_bonus * response.count(tool_end)) if tool_end else WRONG
