"""Programs of answers, which run in the sandbox of msrl in place of the harness's own process.

The tasks of lm-evaluation-harness 0.4.13 that run programs call `evaluate.load("code_eval")`, whose
programs run in this process without a sandbox.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import numpy as np

from msrl.algorithms.pass_at_k import pass_at_k
from msrl.rewards import sandbox
from msrl.rewards.code_harness import harness

_LIMITS = sandbox.Limits(case_s=10.0, total_s=10.0)


class SandboxedPrograms:
    """The metric `code_eval` of the package evaluate, in the sandbox."""

    def compute(
        self, *, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]
    ) -> tuple[dict[str, float], dict[str, Any]]:
        """Return pass@k of the programs of each row with the tests of the row."""
        counts = [
            (sum(passes(program, tests) for program in programs), len(programs))
            for programs, tests in zip(predictions, references, strict=True)
        ]
        values = {
            f"pass@{depth}": float(
                np.mean([pass_at_k(np.array([right]), count, depth) for right, count in counts])
            )
            for depth in k
        }
        return values, {}


def passes(program: str, tests: str) -> bool:
    """Return True if a program passes the tests, which it cannot read or change."""
    word = secrets.token_hex(16)
    (case, *_) = sandbox.run(harness(program), [f"{word}\n{tests}"], _LIMITS)
    return case.status == "ok" and case.stdout.endswith(word)


@contextmanager
def sandboxed_programs() -> Generator[None, None, None]:
    """Give the tasks that are imported here the metric that runs programs in the sandbox."""
    evaluate: Any = import_module("evaluate")
    original = evaluate.load

    def load(path: str, *arguments: Any, **options: Any) -> Any:
        if path == "code_eval":
            return SandboxedPrograms()
        return original(path, *arguments, **options)

    evaluate.load = load
    try:
        yield
    finally:
        evaluate.load = original
