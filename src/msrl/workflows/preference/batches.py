"""Batches of preference data. P examples of one or two sides, S sequences of T tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from msrl.algorithms.packing import Sequences, images_of, sft_sequences
from msrl.config.schema import Config
from msrl.trainer.objective.batches import BatchLimits, num_loss_tokens
from msrl.trainer.objective.requests import TokenRequest
from msrl.types import Floats, Ints, RenderedExample, RenderedPreference
from msrl.workflows.preference.rows import PreferenceRows
from msrl.workflows.training.supervised import num_evaluated
from msrl.workflows.training.trainer_group import TrainerGroup

Sums = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PreferenceBatch:
    """Examples of a step, or of an evaluation, as sequences.

    Examples that only fill up the last row have weight 0.
    """

    numbers: tuple[int, ...]  # rows of the dataset, one per example
    examples: tuple[RenderedPreference, ...]
    rows: tuple[range, ...]  # the indices of each row's sequences
    total_weight: float
    num_real: int  # examples before those that fill up

    @property
    def sides(self) -> tuple[RenderedExample, ...]:
        """All sides in the order of the sequences."""
        return tuple(side for example in self.examples for side in example.sides)

    def sequences(self, reference: Sums | None = None) -> Sequences:
        """Return the sides as sequences with the fields that the losses read.

        `reference` [S] are log-probabilities of the answers.
        """
        per_side = [
            (example.value, example.weight) for example in self.examples for _ in example.sides
        ]
        fields = {
            "values": self._field([value for value, _ in per_side]),
            "weights": self._field([weight for _, weight in per_side]),
        }
        if reference is not None:
            fields["reference_logprobs"] = self._field(reference)
        sides = self.sides
        ids, masks = tuple(s.token_ids for s in sides), tuple(s.loss_mask for s in sides)
        return Sequences(ids, masks, fields, None, images_of(sides))

    @property
    def num_loss_tokens(self) -> int:
        return num_loss_tokens(self.sequences())

    def _field(self, values: Sequence[float] | Sums) -> tuple[Floats, ...]:
        """Return one value per side, repeated at its tokens."""
        return tuple(
            np.full(len(side.token_ids), value, np.float32)
            for side, value in zip(self.sides, values, strict=True)
        )


def make_batch(rows: PreferenceRows, indices: Sequence[int], num_filled: int) -> PreferenceBatch:
    """Return the batch of these rows, filled up to `num_filled` rows without weight."""
    numbers = [rows.members[index] for index in indices]
    fillers = [numbers[0]] * (num_filled - len(numbers))
    examples = [[rows.examples(number) for number in row] for row in numbers]
    unweighted = [[RenderedPreference(e.sides, e.value, 0.0) for e in examples[0]] for _ in fillers]
    sizes = [sum(len(e.sides) for e in row) for row in (*examples, *unweighted)]
    ends = list(itertools.accumulate(sizes, initial=0))
    real = [example for row in examples for example in row]
    return PreferenceBatch(
        numbers=tuple(number for row in (*numbers, *fillers) for number in row),
        examples=(*real, *(example for row in unweighted for example in row)),
        rows=tuple(range(start, end) for start, end in itertools.pairwise(ends)),
        total_weight=sum(example.weight for example in real),
        num_real=len(real),
    )


def evaluated_batch(config: Config, held_out: PreferenceRows, dp_size: int) -> PreferenceBatch:
    """Return the batch of an evaluation, filled up for the data-parallel ranks."""
    count = num_evaluated(config, held_out)
    return make_batch(held_out, range(count), count + -count % dp_size)


def answer_logprobs(
    trainers: TrainerGroup,
    sides: Sequence[RenderedExample],
    limits: BatchLimits,
    *,
    reference: bool,
) -> Sums:  # [S]
    """Return the log-probability of each answer under the reference or the policy."""
    sequences = sft_sequences(sides)
    request = TokenRequest(model="reference" if reference else "policy")
    logprobs = trainers.forward(request, sequences, limits)["logprobs"]
    return np.array([float(values.astype(np.float64).sum()) for values in logprobs])


def unrelated_sides(
    examples: Sequence[RenderedPreference], limit: int
) -> tuple[RenderedExample, ...]:
    """Return each prompt with the answer of the example before it, for the baseline of kto.

    Sequences are truncated to `limit` tokens, but keep at least one token of the answer.
    """
    sides = [example.sides[0] for example in examples]
    starts = [int(np.argmax(side.loss_mask)) for side in sides]
    rotated: list[RenderedExample] = []
    for number, side in enumerate(sides):
        start, before = starts[number], sides[number - 1]
        answer = before.token_ids[starts[number - 1] :]
        ids: Ints = np.concatenate((side.token_ids[:start], answer))[: max(limit, start + 1)]
        mask = np.zeros(len(ids), np.bool_)
        mask[start:] = before.loss_mask[starts[number - 1] :][: len(ids) - start]
        rotated.append(RenderedExample(ids, mask, images=side.images))
    return tuple(rotated)
