"""Values of tokens that the ranks compute before an update changes the policy.

The ranks also pack the sequences. The driver only sends them, joined into a few arrays.

T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from msrl.algorithms.packing import Sequences, balanced, row_lengths
from msrl.tracking.rollouts import TokenArrays
from msrl.trainer.objective.batches import BatchLimits, select
from msrl.types import Floats
from msrl.workflows.training.train_worker import JoinedValues, WorkerPosition


@dataclass(frozen=True, slots=True)
class Observation:
    """Sequences to observe.

    Attributes:
        shares: Numbers of the sequences of each data-parallel rank.
        sequences: Sequences of each data-parallel rank.
        limits: Limits of their micro-batches.
        temperature: Temperature of the distributions.
    """

    shares: Sequence[Sequence[int]]
    sequences: Sequence[Sequences]
    limits: BatchLimits
    temperature: float

    @classmethod
    def of(
        cls, sequences: Sequences, dp_size: int, limits: BatchLimits, temperature: float
    ) -> Observation:
        """Distribute sequences over the data-parallel ranks."""
        lengths = row_lengths(sequences.token_ids)
        if dp_size == 1:
            return cls([range(len(lengths))], [sequences], limits, temperature)
        shares = balanced(lengths, dp_size)
        parts = [select(sequences, share) for share in shares]
        return cls(shares, parts, limits, temperature)


@dataclass(frozen=True, slots=True)
class Observed:
    """Log-probabilities and entropies of an observation, and the seconds that they took."""

    observation: Observation
    positions: Sequence[WorkerPosition]
    results: Sequence[JoinedValues | None]  # by rank
    seconds: float

    def values(self) -> tuple[TokenArrays, TokenArrays]:
        """Return the log-probabilities and the entropies of every sequence, [T] each."""
        logprobs, entropies = list[TokenArrays](), list[TokenArrays]()
        for rank, sequences in enumerate(self.observation.sequences):
            lengths = np.array(row_lengths(sequences.token_ids), np.int64)
            for columns, joined in zip((logprobs, entropies), self._reported(rank), strict=True):
                columns.append(TokenArrays(joined, lengths))
        return self._in_order(logprobs), self._in_order(entropies)

    def _reported(self, dp_rank: int) -> JoinedValues:
        """Return the result of the data-parallel rank."""
        pairs = zip(self.positions, self.results, strict=True)
        (result,) = [r for p, r in pairs if p.is_reporter and p.dp_rank == dp_rank]
        assert result is not None
        return result

    def _in_order(self, columns: Sequence[TokenArrays]) -> TokenArrays:
        """Return the arrays of all data-parallel ranks in the order of the sequences."""
        if len(columns) == 1:
            return columns[0]
        rows = dict[int, Floats]()
        for share, column in zip(self.observation.shares, columns, strict=True):
            rows.update(zip(share, column.split(), strict=True))
        return TokenArrays.of([rows[number] for number in range(len(rows))], np.float32)
