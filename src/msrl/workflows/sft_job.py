"""What supervised fine-tuning is made of before any rank starts: the job that every rank is told, and the rows it reads. Light to import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msrl.algorithms.packing import Sequences, bins, sft_sequences
from msrl.config.schema import Config
from msrl.data.dataset import SftDataset
from msrl.trainer.resume import SavedTraining
from msrl.trainer.schedule import Schedule
from msrl.trainer.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class SftJob:
    """What every rank is told. `start_step` counts the steps done before; `hf_dir` has config and tokenizer."""

    config: Config
    settings: WorkerSettings
    schedule: Schedule
    num_steps: int
    start_step: int
    resume: SavedTraining | None
    checkpoint_dir: Path
    hf_dir: Path


@dataclass(frozen=True, slots=True)
class Rows:
    """A dataset as rows of sequences: as it was preprocessed, or packed anew into rows of `capacity` tokens."""

    dataset: SftDataset
    packed: tuple[tuple[int, ...], ...] | None

    def __len__(self) -> int:
        return len(self.packed) if self.packed is not None else len(self.dataset)

    def sequences(self, rows: Sequence[int]) -> list[Sequences]:
        """The sequences of each row."""
        members = [self.packed[row] if self.packed is not None else (row,) for row in rows]
        return [sft_sequences([example for index in row for example in self.dataset[index]]) for row in members]


def open_rows(config: Config, prefix: str) -> Rows:
    """The rows of a preprocessed dataset."""
    dataset = SftDataset(prefix)
    if not config.data.pack or (dataset.manifest is not None and dataset.manifest.pack):
        return Rows(dataset, None)
    lengths = [sum(len(example.token_ids) for example in dataset[index]) for index in range(len(dataset))]
    return Rows(dataset, bins(lengths, config.data.seq_length or max(lengths)))
