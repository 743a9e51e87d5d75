"""Rank code of the parity tests: four processes compute the logits of all models and layouts.

Rank processes import it by name (`parity_ranks:main`) after `platform.prepare()`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from msrl.algorithms.packing import micro_batch
from msrl.trainer.launch import RankContext
from msrl.trainer.settings import Layout, RankSettings, ReplicaSettings
from support import HANG_S

LENGTHS = (23, 5, 40, 40)


@dataclass(frozen=True)
class Case:
    """A model folder and the layout that computes its logits."""

    name: str
    model: Path
    layout: Layout


def sequences(vocab_size: int) -> list[np.ndarray]:
    """Return random token ids of several lengths."""
    random = np.random.default_rng(11)
    return [random.integers(0, vocab_size, length).astype(np.int64) for length in LENGTHS]


def rank_logits(cases: list[Case]) -> dict[str, np.ndarray]:
    """Start the ranks and return the logits of all cases by name, [tokens, vocabulary]."""
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
    """Run every case whose layout includes this rank.

    Tensor-parallel rank 0 of the last stage reports (name, logits of the packed sequences).
    """
    from msrl.trainer.rank import TrainingRank

    for number, case in enumerate(cases):
        if context.rank >= case.layout.ranks_per_model:
            continue
        settings = RankSettings(
            "cpu",
            case.layout,
            "float32",
            seed=0,
            timeout_s=HANG_S,
            policy=ReplicaSettings(case.model),
        )
        worker = TrainingRank(
            settings, context.rank, case.layout.ranks_per_model, f"{context.init_method}-{number}"
        )
        ids = sequences(worker.policy.shape.vocab_size)
        logits = worker.policy.logits(
            [micro_batch(ids, [np.ones(len(row), bool) for row in ids], {})]
        )
        if logits is not None and worker.position.tp_rank == 0:
            context.report((case.name, logits[0].numpy()))
        worker.close()
