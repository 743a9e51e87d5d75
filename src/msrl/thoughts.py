"""Thoughts of reasoning models: text in tags at the beginning of an answer.

This module alone decides what a thought is. It ends at its first end tag, as for vLLM's reasoning
parsers. Tags at any other place are text.
"""

from __future__ import annotations

from typing import NamedTuple

from msrl.errors import MsrlError

THOUGHT = ("<think>", "</think>")


class SplitAnswer(NamedTuple):
    """Thought of an answer, or None, and the text after it.

    The text of an unterminated thought is a thought, and nothing follows it.
    """

    thought: str | None
    text: str
    is_terminated: bool = True


def split_thought(
    answer: str, tags: tuple[str, str] = THOUGHT, *, is_open: bool = False
) -> SplitAnswer:
    """Return the thought that an answer begins with, and the text after it.

    White space may stand before the thought. With `is_open`, the prompt has begun the thought, and
    the answer may lack the start tag.
    """
    start, end = tags
    stripped = answer.lstrip()
    if stripped.startswith(start):
        inside = stripped.removeprefix(start)
    elif is_open:
        inside = answer
    else:
        return SplitAnswer(None, answer)
    thought, end_tag, text = inside.partition(end)
    return SplitAnswer(thought, text, is_terminated=bool(end_tag))


def split_trained_answer(
    answer: str, tags: tuple[str, str] = THOUGHT, *, is_open: bool = False
) -> SplitAnswer:
    """Return the thought and the text of an answer that is trained.

    Raises:
        MsrlError: The thought has no end or no beginning, or no text follows it.
    """
    start, end = tags
    split = split_thought(answer, tags, is_open=is_open)
    if not split.is_terminated:
        begun = "of the prompt" if is_open else f"after {start}"
        raise MsrlError(f"the thought {begun} has no {end}. Complete or remove the answer.")
    before, end_tag, _ = split.text.partition(end)
    if end_tag and start not in before:
        raise MsrlError(
            f"the answer contains {end} without {start} before it. Begin the answer with {start} "
            f"if it has a thought; otherwise remove {end}."
        )
    if split.thought is not None and not split.text.strip():
        raise MsrlError("no answer follows the thought. Complete or remove the answer.")
    return split


def without_thought(answer: str) -> str:
    """Return an answer without its thought, for use as ground truth.

    Raises:
        MsrlError: A thought ends in the answer that has no beginning.
    """
    if answer.lstrip().startswith(THOUGHT[0]):
        return split_thought(answer).text.lstrip()
    return split_trained_answer(answer).text
