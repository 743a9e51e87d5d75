"""What supervised fine-tuning is made of before any rank starts: the job that ranks are told, and the rows they read. Light to import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msrl.algorithms.packing import Sequences, bins, sft_sequences
from msrl.config.schema import Config
from msrl.data.dataset import SftDataset
from msrl.data.order import RowOrder
from msrl.errors import MsrlError
from msrl.trainer.resume import SavedTraining
from msrl.trainer.schedule import Schedule
from msrl.trainer.settings import WorkerSettings


@dataclass(frozen=True, slots=True)
class SftJob:
    """What every rank is told. `start_step` counts the steps done before; `hf_dir` has config and tokenizer."""

    config: Config
    settings: WorkerSettings
    schedule: Schedule
    order: RowOrder
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


def open_rows(config: Config, dataset: SftDataset) -> Rows:
    """The rows of a preprocessed dataset."""
    if not config.data.pack or (dataset.manifest is not None and dataset.manifest.pack):
        return Rows(dataset, None)
    lengths = [sum(len(example.token_ids) for example in dataset[index]) for index in range(len(dataset))]
    return Rows(dataset, bins(lengths, config.data.seq_length or max(lengths)))


def check_lengths(config: Config, dataset: SftDataset) -> None:
    """Every row fits into data.seq_length and into a micro-batch. Raises MsrlError."""
    longest, length = dataset.max_tokens, config.data.seq_length
    if length is not None and longest > length:
        raise MsrlError(
            f"data.seq_length={length}: the longest row of {dataset.prefix} has {longest} tokens; raise it,"
            " or preprocess with that seq_length"
        )
    limit = config.train.max_tokens_per_micro_batch
    if limit is not None and limit < longest:
        raise MsrlError(f"train.max_tokens_per_micro_batch={limit}: the longest row of {dataset.prefix} has {longest} tokens; raise it")
