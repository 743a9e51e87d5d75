"""What supervised fine-tuning is made of before any rank starts: the job that ranks are told. Light
to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msrl.config.schema import Config
from msrl.data.dataset import SftDataset
from msrl.data.order import BlendOrder, RowOrder
from msrl.errors import MsrlError
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.trainer.schedule import Schedule
from msrl.trainer.settings import RankSettings
from msrl.workflows.sft.rows import Rows, open_rows, split
from msrl.workflows.sft.text_rows import TextRows, blend_of, open_text


@dataclass(frozen=True, slots=True)
class SftSetup:
    """What every rank is told. `start_step` counts the steps done before; `hf_dir` has config and
    tokenizer; `state` is what every checkpoint holds of the training.
    """

    config: Config
    settings: RankSettings
    schedule: Schedule
    order: RowOrder | BlendOrder
    state: Mapping[str, Any]
    num_steps: int
    start_step: int
    resume: SavedTraining | None
    checkpoint_dir: Path
    hf_dir: Path
    longest_row: int  # tokens


@dataclass(frozen=True, slots=True)
class Started:
    """What rank 0 reports first: all ranks are there, and the first step begins."""


def training_rows(config: Config) -> tuple[Rows, Rows | None] | tuple[TextRows, TextRows | None]:
    """The rows to train on and those held out. Raises MsrlError."""
    if config.data.handler == "pretrain":
        return open_text(config)
    dataset = SftDataset(str(config.data.train))
    learnt, held_out = split(len(dataset), config.data.eval_fraction, config.run.seed)
    if held_out and not learnt:
        asked = f"data.eval_fraction={config.data.eval_fraction}"
        raise MsrlError(
            f"{asked}: holds out all {len(held_out)} rows of {config.data.train}; lower it, or set data.eval instead"
        )
    train = open_rows(config, dataset, learnt)
    if config.data.eval is not None:
        return train, open_rows(config, SftDataset(config.data.eval))
    return train, open_rows(config, dataset, held_out) if held_out else None


def row_order(config: Config, rows: Rows | TextRows) -> RowOrder | BlendOrder:
    """Which rows a step reads."""
    batch, seed, shuffle = config.train.global_batch, config.run.seed, config.data.shuffle
    if isinstance(rows, TextRows):
        return BlendOrder(rows.num_rows, tuple(blend_of(config).values()), batch, seed, shuffle)
    return RowOrder(len(rows), batch, seed, shuffle)


def check_lengths(config: Config, prefix: str, rows: Rows | TextRows) -> None:
    """Every row fits into a micro-batch. Raises MsrlError."""
    longest, limit = rows.longest, config.train.max_tokens_per_micro_batch
    if limit is not None and limit < longest:
        raise MsrlError(
            f"train.max_tokens_per_micro_batch={limit}: the longest row of {prefix} has {longest} tokens; raise it"
        )
