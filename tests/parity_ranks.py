"""Ranks of the parity tests: four processes compute the logits of every model and layout.

Rank processes import this module by name (`parity_ranks:main`) after `platform.prepare()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from msrl.algorithms.packing import micro_batch
from msrl.trainer.launch import RankContext
from msrl.trainer.settings import Layout, WorkerSettings

LENGTHS = (23, 5, 40, 40)


@dataclass(frozen=True)
class Case:
    """Model folder and the layout that computes its logits."""

    name: str
    model: Path
    layout: Layout


def sequences(vocab_size: int) -> list[np.ndarray]:
    """Return random token ids of several lengths."""
    random = np.random.default_rng(11)
    return [random.integers(0, vocab_size, length).astype(np.int64) for length in LENGTHS]


def compute_logits(cases: list[Case]) -> dict[str, np.ndarray]:
    """Start the ranks and return the logits of every case by name, [tokens, vocabulary]."""
    from msrl.platforms import get
    from msrl.trainer.launch import run_ranks
    from support import python_path

    return dict(
        run_ranks(
            "parity_ranks:main",
            cases,
            num_ranks=4,
            platform=get("cpu"),
            env={"PYTHONPATH": python_path()},
        )
    )


def main(context: RankContext, cases: list[Case]) -> None:
    """Run the cases whose layout includes this rank.

    TP rank 0 of the last stage reports (name, logits of the packed sequences).
    """
    from msrl.trainer.rank import TrainWorker

    for number, case in enumerate(cases):
        if context.rank >= case.layout.ranks_per_model:
            continue
        settings = WorkerSettings("cpu", case.model, case.layout, "float32", seed=0, timeout_s=120)
        worker = TrainWorker(
            settings, context.rank, case.layout.ranks_per_model, f"{context.init_method}-{number}"
        )
        ids = sequences(worker.shape.vocab_size)
        logits = worker.logits([micro_batch(ids, [np.ones(len(row), bool) for row in ids], {})])
        if logits is not None and worker.tp_rank == 0:
            context.report((case.name, logits[0].numpy()))
        worker.close()
