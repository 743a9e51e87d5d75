"""GSM8K (github.com/openai/grade-school-math): a question, and a worked answer whose last line is `#### number`.

The answer is the text after `####` without thousands separators, as the benchmark's own scorer reads it.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from msrl.data.columns import ColumnMapping
from msrl.errors import MsrlError
from msrl.types import Conversation, Message

KINDS = ("prompts", "sft")
COLUMNS = {"question": "question", "answer": "answer"}
REQUIRED = frozenset({"question", "answer"})
_CALCULATOR = re.compile(r"<<.*?>>")


def conversation(row: Any, columns: ColumnMapping, *, style: Literal["worked", "r1"] = "worked", calculator: bool = True) -> Conversation:
    """The question and the worked answer.

    style: `worked` keeps the answer as published; `r1` is `<think>steps</think><answer>\\boxed{number}</answer>`.
    calculator: whether annotations such as `<<48/2=24>>` stay.
    """
    if style not in ("worked", "r1"):
        raise MsrlError(f"preprocess.options.style={style}: must be worked or r1")
    worked = columns.text(row, "answer")
    steps, mark, number = worked.rpartition("####")
    if not mark or not number.strip():
        raise MsrlError(f"column {columns.paths['answer']!r} (for 'answer') has no `#### number`: {worked[-60:]!r}")
    answer = number.strip().replace(",", "")
    shown = worked if style == "worked" else f"<think>{steps.strip()}</think><answer>\\boxed{{{answer}}}</answer>"
    shown = shown if calculator else _CALCULATOR.sub("", shown)
    messages = (Message("user", columns.text(row, "question")), Message("assistant", shown))
    return Conversation(messages, answer=answer, extra=columns.extra(row))
