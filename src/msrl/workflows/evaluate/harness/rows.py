"""Rows of benchmarks in a local folder.

    FOLDER/BENCHMARK/SPLIT.jsonl             gsm8k/test.jsonl
    FOLDER/BENCHMARK/SUBJECT/SPLIT.jsonl     mmlu/astronomy/dev.jsonl

SUBJECT is the name of the dataset's subset, and SPLIT the name of its split. A downloaded dataset
has this layout too: `data` may stand before the split, and its shards are read together. All
formats of `msrl.data.files.readers` are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrl.data.files.readers import is_data_file, read_batches
from msrl.errors import MsrlError
from msrl.files import digest_of_ends


@dataclass(frozen=True, slots=True)
class BenchmarkFolder:
    """Folder with the rows of one benchmark, which must have `columns`."""

    root: Path
    benchmark: str
    columns: Sequence[str]

    def read(self, subject: str, split: str, *, has_subjects: bool) -> list[dict[str, Any]]:
        """Return the rows of a split.

        Args:
            subject: Name of the subset.
            split: Name of the split.
            has_subjects: True if the benchmark has several subsets, each in its own folder.

        Raises:
            MsrlError: A file is missing, or a row lacks a column.
        """
        files = self.files(subject, split, has_subjects=has_subjects)
        if not files:
            inside = f"{self.benchmark}/{subject}" if has_subjects else self.benchmark
            raise MsrlError(
                f"evaluate.benchmark_data={self.root}: {inside}/{split}.jsonl not found. "
                f"{self.benchmark} needs rows with the columns {', '.join(self.columns)}."
            )
        rows = list[dict[str, Any]]()
        for batch in read_batches(files):
            for offset, row in batch.values():
                rows.append(self._checked(row, batch.where(offset)))
        if not rows:
            raise MsrlError(f"{files[0]}: has no rows")
        return rows

    def files(self, subject: str, split: str, *, has_subjects: bool) -> list[Path]:
        """Return the files of a split: a file, or shards such as test-00000-of-00002.parquet."""
        base = self.root / self.benchmark
        folders = [base / subject] if has_subjects else [base, base / subject]
        for folder in (*folders, *(folder / "data" for folder in folders)):
            files = sorted(file for file in folder.glob(f"{split}*") if is_data_file(file))
            named = [file for file in files if file.name.removeprefix(split)[0] in ".-"]
            if named:
                return named
        return []

    def _checked(self, row: Any, where: str) -> dict[str, Any]:
        missing = [name for name in self.columns if not isinstance(row, dict) or name not in row]
        if missing:
            raise MsrlError(
                f"{where}: has no column {missing[0]}. Rows of {self.benchmark} have the columns "
                f"{', '.join(self.columns)}."
            )
        return row


def digest(files: Sequence[Path]) -> str:
    """Return a digest of files of rows."""
    return digest_of_ends((file.name, file) for file in sorted(files))
