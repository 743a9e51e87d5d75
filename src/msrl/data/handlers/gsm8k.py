"""GSM8K (github.com/openai/grade-school-math): a question and a worked answer.

The last line of the worked answer is `#### number`. The ground truth is the text after `####`
without thousands separators, as in the benchmark's scorer.
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


def conversation(
    row: Any,
    columns: ColumnMapping,
    *,
    style: Literal["worked", "r1"] = "worked",
    calculator: bool = True,
) -> Conversation:
    r"""Return the question and the worked answer.

    style: `worked` keeps the published answer, `r1` converts it to
        `<think>steps</think><answer>\boxed{number}</answer>`.
    calculator: keep annotations such as `<<48/2=24>>`.
    """
    if style not in ("worked", "r1"):
        raise MsrlError(f"preprocess.options.style={style}: must be worked or r1")
    worked = columns.text(row, "answer")
    steps, mark, number = worked.rpartition("####")
    if not mark or not number.strip():
        column = columns.paths["answer"]
        raise MsrlError(
            f"column {column!r} (for 'answer') contains no `#### number`: {worked[-60:]!r}"
        )
    answer = number.strip().replace(",", "")
    shown = (
        worked
        if style == "worked"
        else f"<think>{steps.strip()}</think><answer>\\boxed{{{answer}}}</answer>"
    )
    shown = shown if calculator else _CALCULATOR.sub("", shown)
    messages = (Message("user", columns.text(row, "question")), Message("assistant", shown))
    return Conversation(messages, answer=answer, extra=columns.extra(row))
