"""Declaration of a benchmark: the constants of its file."""

from __future__ import annotations

from dataclasses import dataclass

from msrl.registry import BENCHMARKS
from msrl.registry.declarations import declaration


@dataclass(frozen=True, slots=True)
class Benchmark:
    """Constants of a file of `benchmarks`, which its package describes."""

    name: str
    task: str
    chat_task: str
    folder: str
    columns: tuple[str, ...]
    metric: str
    generates: bool
    shots: int
    runs_code: bool
    nltk_data: str

    @staticmethod
    def read(name: str) -> Benchmark:
        """Return the declaration of a benchmark.

        Raises:
            MsrlError: There is no benchmark of this name.
        """
        constant = declaration(BENCHMARKS, name, key="evaluate.benchmarks").constant
        return Benchmark(
            name=name,
            task=constant("TASK"),
            chat_task=constant("CHAT_TASK", constant("TASK")),
            folder=constant("FOLDER"),
            columns=constant("COLUMNS"),
            metric=constant("METRIC"),
            generates=constant("GENERATES", False),
            shots=constant("SHOTS", 0),
            runs_code=constant("RUNS_CODE", False),
            nltk_data=constant("NLTK_DATA", ""),
        )
