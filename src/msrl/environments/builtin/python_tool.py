"""Questions with a Python interpreter: the tool `code_interpreter` runs programs in the sandbox.

The setting of ReTool (arXiv:2504.11536). Every call is a new program; its standard output is the
reply. The reward comes from the reward sources.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msrl.environments.base import Environment
from msrl.environments.builtin._prompts import row_prompt
from msrl.environments.tools import tool
from msrl.errors import MsrlError
from msrl.rewards import sandbox
from msrl.rewards.sandbox import Case, Limits
from msrl.types import Message

_PROBLEMS = {
    "timeout": "Error: the program exceeded the time limit.",
    "memory": "Error: the program exceeded the memory limit.",
    "output": "Error: the program printed too much.",
}


class PythonTool(Environment):
    """Environment with a Python interpreter."""

    def __init__(
        self, prompt_column: str, system: str, limits: Limits, max_output_chars: int
    ) -> None:
        self._prompt_column, self._system = prompt_column, system
        self._limits, self._max_output_chars = limits, max_output_chars

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the question of the row."""
        return row_prompt(row, self._prompt_column, self._system)

    @tool
    def code_interpreter(self, code: str) -> str:
        """Run a Python program and return what it prints.

        Args:
            code: The program. Print the values that you need.
        """
        (case,) = sandbox.run(code, [""], self._limits)
        return self._shorten(_output(case))

    def _shorten(self, text: str) -> str:
        """Return the beginning and the end of a long output, and the length of the rest."""
        excess = len(text) - self._max_output_chars
        if excess <= 0:
            return text
        half = self._max_output_chars // 2
        return f"{text[:half]}\n[{excess} characters omitted]\n{text[len(text) - half :]}"


def prepare(**_: Any) -> None:
    """Check that this machine can run the sandbox.

    Raises:
        MsrlError: It cannot.
    """
    if reason := sandbox.refusal():
        raise MsrlError(f"environment.name=python_tool: {reason}")


def environment(
    *,
    prompt_column: str = "",
    system: str = "",
    max_calls: int = 0,
    time_s: float = 5.0,
    memory_mb: int = 512,
    processes: int = 16,
    max_output_chars: int = 2000,
) -> Environment:
    """Return a new environment.

    Args:
        prompt_column: Column with the question. Empty keeps the prompt of the row, which must show
            the tool.
        system: System text; empty for none.
        max_calls: Number of calls of one answer that run; 0 is no limit.
        time_s: Wall-clock limit of a program.
        memory_mb: Memory limit of a program in MiB.
        processes: Maximum number of processes of a program.
        max_output_chars: Maximum length of the output; the middle of longer ones is omitted.
    """
    limits = Limits(
        case_s=time_s, total_s=time_s, memory_bytes=memory_mb << 20, processes=processes
    )
    tools = PythonTool(prompt_column, system, limits, max_output_chars)
    tools.max_calls = max_calls
    return tools


def _output(case: Case) -> str:
    """Return the output of a program for the model, with the error that ended it."""
    sections = [case.stdout.rstrip("\n")]
    if case.status in _PROBLEMS:
        sections.append(_PROBLEMS[case.status])
    elif case.status == "error":
        sections.append(case.stderr.strip() or "Error: the program failed.")
    return "\n".join(section for section in sections if section) or "(no output)"
