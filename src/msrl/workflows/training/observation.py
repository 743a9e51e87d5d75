"""Values of tokens that the ranks compute before an update changes the policy.

The ranks also pack the sequences. The driver only sends them, joined into a few arrays.

T tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msrl.algorithms.packing import JoinedRows, Sequences, balanced, row_lengths
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

    def values(self) -> tuple[Sequence[Floats], Sequence[Floats]]:
        """Return the log-probabilities and the entropies of every sequence, [T] each."""
        logprobs, entropies = dict[int, Floats](), dict[int, Floats]()
        for position, result in zip(self.positions, self.results, strict=True):
            if position.is_reporter:
                assert result is not None
                lengths = row_lengths(self.observation.sequences[position.dp_rank].token_ids)
                share = self.observation.shares[position.dp_rank]
                for values, joined in zip((logprobs, entropies), result, strict=True):
                    values.update(zip(share, JoinedRows.split(joined, lengths), strict=True))
        numbers = range(len(logprobs))
        return [logprobs[number] for number in numbers], [entropies[number] for number in numbers]
