"""All training ranks as one trainer, whichever transport reaches them.

S sequences of T tokens; R rows, which are groups of sequences that share a micro-batch; L mixture
layers of the model, l of them on a pipeline stage, k experts per token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from msrl.algorithms.packing import Sequences, balanced
from msrl.trainer.checkpointing.resume import Retention, SavedTraining
from msrl.trainer.objective.batches import (
    BatchLimits,
    by_sequence,
    micro_batches,
    num_loss_tokens,
    pad_sequences,
)
from msrl.trainer.objective.requests import RankValues, TokenRequest, TokenValue, UpdateRequest
from msrl.types import Floats, Image, Ints, MicroBatch, Routes, StageRoutes
from msrl.workflows.training.shared_images import SharedImages, without_files
from msrl.workflows.training.train_worker import SavePlan, WorkerPosition
from msrl.workflows.training.transport.base import Calls, Workers

Rows = Sequence[Sequence[int]]  # the indices of each row's sequences


class TrainerGroup:
    """All training ranks.

    The group packs sequences and distributes them over the data-parallel ranks.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers, self._images = workers, SharedImages(workers)

    @property
    def workers(self) -> Workers:
        """The workers of the ranks."""
        return self._workers

    def start(self, resume: SavedTraining | None, saves: SavePlan) -> dict[str, Any]:
        """Load the models on all ranks and return the workflow's state in the checkpoint."""
        if resume is not None:  # the workers may have another working directory
            resume = replace(resume, root=resume.root.absolute())
        started = self._workers.call("start", self._workers.rendezvous(), resume, saves)
        self._positions = [position for position, _ in started]
        self.dp_size = 1 + max(position.dp_rank for position in self._positions)
        return started[0][1]

    def end(self) -> None:
        """End all ranks immediately, even hung ones. Only `restart` may follow."""
        self._workers.end()

    def restart(self, resume: SavedTraining | None, saves: SavePlan) -> dict[str, Any]:
        """Replace all ranks by new ones and load the models as `start` does."""
        self._workers.restart()
        return self.start(resume, saves)

    def close(self) -> None:
        """Release the models and leave the process groups on all ranks."""
        self._workers.call("close")

    # Requests

    def update(
        self,
        request: UpdateRequest,
        sequences: Sequences,
        limits: BatchLimits,
        *,
        rows: Rows | None = None,
    ) -> dict[str, float]:
        """Update a model once on these sequences; return the mean metrics.

        The sequences of a row stay in one micro-batch. By default, each is a row, and sequences
        without a loss are added until the data-parallel ranks have equally many.
        """
        if request.divisor is None:
            request = replace(request, divisor=num_loss_tokens(sequences))
        group, limits = self.ranks_of(request.model, limits)
        batches = group._split(sequences, limits, rows)
        return group._workers.call_each("update", group._arguments(batches, request))[0]

    def forward(
        self, request: TokenRequest, sequences: Sequences, limits: BatchLimits
    ) -> ForwardResult:
        """Return values of every token from one pass of a model."""
        return self.begin_forward(request, sequences, limits).wait()

    def begin_forward(
        self, request: TokenRequest, sequences: Sequences, limits: BatchLimits
    ) -> PendingForward:
        """Begin `forward` without waiting for the result.

        The policy replays the routes of the sequences. Other models choose their own. As many
        sequences are added as for an update.
        """
        count = len(sequences.token_ids)
        if request.model != "policy":
            sequences = sequences._replace(routes=None)
        group, limits = self.ranks_of(request.role, limits)
        batches = group._split(sequences, limits)
        calls = group._workers.begin_each("forward", group._arguments(batches, request))
        return PendingForward(group._workers, calls, group._positions, batches, count)

    def ranks_of(self, role: str, limits: BatchLimits) -> tuple[TrainerGroup, BatchLimits]:
        """Return the ranks of a model, and the limits of its micro-batches."""
        return self, limits

    def scores(self, name: str, token_ids: Sequence[Ints], batch: int) -> list[float]:
        """Return the score of a reward model at the last token of each sequence.

        A micro-batch holds at most `batch` sequences. A rank returns the value at the position
        before each label, so every sequence gets one more token as the label, which is not read.
        """
        with_label = tuple(np.append(ids, ids[-1]) for ids in token_ids)
        last_token = tuple(np.arange(len(ids)) == len(ids) - 1 for ids in with_label)
        sequences = Sequences(with_label, last_token, {})
        request = TokenRequest(("values",), model=f"reward:{name}")
        rows = self.forward(request, sequences, BatchLimits(batch))["values"]
        return [float(values[-1]) for values in rows]

    # Weights and memory

    def offload(self) -> None:
        """Release the devices' memory of what `train.offload` names."""
        self._workers.call("offload")

    def onload(self) -> None:
        """Take the devices' memory of the parameters again.

        Gradients and optimizer states follow within an update.
        """
        self._workers.call("onload")

    # Profiles

    def begin_profile(self, folder: Path, ranks: Sequence[int]) -> None:
        """Begin traces of these ranks, to be written to files in `folder`."""
        self._workers.call("begin_profile", folder.absolute(), ranks)

    def end_profile(self) -> None:
        """Write the traces."""
        self._workers.call("end_profile")

    # Checkpoints

    def save(
        self, step: int, extra: Mapping[str, Any], retention: Retention
    ) -> list[SavedTraining]:
        """Save a checkpoint, or begin to; return the checkpoints completed since the last call."""
        return self._workers.call("save", step, extra, retention)[0]

    def finished_saves(self) -> list[SavedTraining]:
        """Return the checkpoints completed since the last call."""
        return self._workers.call("finished_saves")[0]

    def finish_saves(self) -> list[SavedTraining]:
        """Wait for a pending save; return the checkpoints completed since the last call."""
        return self._workers.call("finish_saves")[0]

    # Distribution over ranks

    def _split(
        self, sequences: Sequences, limits: BatchLimits, rows: Rows | None = None
    ) -> list[_RankBatches]:
        """Return the micro-batches of each data-parallel rank."""
        # The parallel layout needs the padding.
        limits = replace(limits, pad_to_multiple=self._positions[0].sequence_multiple)
        if rows is None:
            sequences = pad_sequences(sequences, self.dp_size)
            rows = [[index] for index in range(len(sequences.token_ids))]
        lengths = [len(ids) for ids in sequences.token_ids]
        row_lengths = [sum(lengths[index] for index in row) for row in rows]
        return [
            _rank_batches(sequences, [rows[number] for number in share], limits)
            for share in balanced(row_lengths, self.dp_size)
        ]

    def _arguments(
        self, batches: Sequence[_RankBatches], request: object
    ) -> dict[int, tuple[Any, ...]]:
        """Return the arguments of each rank: its micro-batches, the request, files of images."""
        contents = [own.micro_batches for own in batches]
        files = self._images.share(chain.from_iterable(contents))
        if files is not None:
            contents = [without_files(own) for own in contents]
        shared = [self._workers.share(own) for own in contents]
        further = () if files is None else (files,)
        return {
            rank: (shared[position.dp_rank], request, *further)
            for rank, position in enumerate(self._positions)
        }


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Values of every token, by name: [T] of each sequence.

    `routes` cover all tokens, [T, L, k] of each sequence, if they were recorded.
    """

    by_name: Mapping[TokenValue, tuple[Floats, ...]]
    routes: tuple[Routes, ...] | None = None

    def __getitem__(self, name: TokenValue) -> tuple[Floats, ...]:
        return self.by_name[name]


@dataclass(frozen=True, slots=True)
class PendingForward:
    """Values of every token that ranks compute."""

    workers: Workers
    calls: Calls
    positions: Sequence[WorkerPosition]
    batches: Sequence[_RankBatches]  # by data-parallel rank
    count: int  # of the sequences; those after them are padding

    def wait(self) -> ForwardResult:
        """Return the values of every sequence."""
        results: list[RankValues] = self.workers.wait(self.calls)
        by_name: dict[str, dict[int, Floats]] = defaultdict(dict)
        by_layer: list[dict[int, Routes]] = [{} for _ in range(self._num_padded)]
        for position, result in zip(self.positions, results, strict=True):
            own = self.batches[position.dp_rank]
            if position.is_reporter:
                assert result.by_name is not None
                for name, rows in result.by_name.items():
                    by_name[name].update(by_sequence(own.micro_batches, own.groups, rows))
            if result.routes is not None:
                _split_routes(result.routes, own, by_layer)
        values: Any = {
            name: tuple(rows[number] for number in range(self.count))
            for name, rows in by_name.items()
        }
        return ForwardResult(values, self._routes(by_layer) if any(by_layer) else None)

    @property
    def _num_padded(self) -> int:
        return sum(len(group) for own in self.batches for group in own.groups)

    def _routes(self, by_layer: Sequence[Mapping[int, Routes]]) -> tuple[Routes, ...]:
        """Return the routes of every sequence from the routes of each layer."""
        return tuple(
            np.stack([layers[number] for number in sorted(layers)], 1)
            for layers in by_layer[: self.count]
        )


@dataclass(frozen=True, slots=True)
class _RankBatches:
    """Micro-batches of one data-parallel rank."""

    micro_batches: list[MicroBatch]
    groups: list[list[int]]  # the indices of the sequences in each micro-batch


def _rank_batches(sequences: Sequences, rows: Rows, limits: BatchLimits) -> _RankBatches:
    """Return the micro-batches of these rows."""
    lengths = [sum(len(sequences.token_ids[index]) for index in row) for row in rows]
    groups = [
        [index for number in group for index in rows[number]]
        for group in limits.group(lengths, _different_images(sequences, rows))
    ]
    return _RankBatches(micro_batches(sequences, groups, limits), groups)


def _different_images(sequences: Sequences, rows: Rows) -> list[frozenset[Image]] | None:
    """Return the different images of each row, or None if there are none."""
    if sequences.images is None:
        return None
    by_row = ((sequences.images[index] for index in row) for row in rows)
    return [frozenset(placed.image for placed in chain.from_iterable(own)) for own in by_row]


def _split_routes(
    routes: StageRoutes, own: _RankBatches, by_layer: Sequence[dict[int, Routes]]
) -> None:
    """Add the routes of a stage, [T, k] per layer, to the sequences in its batches."""
    for batch, group, experts in zip(
        own.micro_batches, own.groups, routes.micro_batches, strict=True
    ):
        # The last rows may be of padding, which belongs to no sequence.
        for index, (start, end) in zip(group, pairwise(batch.cu_seqlens), strict=False):
            for column, layer in enumerate(routes.layers):
                by_layer[index][layer] = experts[start:end, column]
