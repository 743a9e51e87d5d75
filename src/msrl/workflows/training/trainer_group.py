"""All training ranks as one trainer, whichever transport reaches them.

S sequences of T tokens; R rows, which are groups of sequences that share a micro-batch; L mixture
layers of the model, l of them on a pipeline stage, k experts per token.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from msrl.algorithms.packing import Sequences, balanced
from msrl.trainer.checkpointing.resume import Retention, SavedTraining
from msrl.trainer.objective.batches import (
    BatchLimits,
    by_sequence,
    micro_batches,
    num_loss_tokens,
)
from msrl.types import Floats, Ints, MicroBatch, Routes, StageRoutes, TokenStatistic
from msrl.workflows.training.observation import Observation, Observed
from msrl.workflows.training.train_worker import SavePlan, WorkerPosition
from msrl.workflows.training.transport.base import Calls, Workers

if TYPE_CHECKING:
    from msrl.trainer.objective.losses import Loss, ValuesLoss
    from msrl.trainer.objective.steps import StepLoss

Rows = Sequence[Sequence[int]]  # the indices of each row's sequences


class TrainerGroup:
    """All training ranks.

    The group packs sequences and distributes them over the data-parallel ranks.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

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

    # Policy and reference

    def update(
        self,
        sequences: Sequences,
        limits: BatchLimits,
        loss: Loss | StepLoss,
        lr: float,
        *,
        rows: Rows | None = None,
        total_weight: float | None = None,
    ) -> dict[str, float]:
        """Update the policy once on these sequences; return the mean metrics.

        The sequences of a row stay in one micro-batch. By default, each is a row. The divisor of
        loss and metrics is `total_weight`, by default the number of loss tokens.
        """
        batches = self._split(sequences, limits, rows)
        divisor = num_loss_tokens(sequences) if total_weight is None else total_weight
        return self._call("update", batches, loss, divisor, lr)[0]

    def observation(
        self, sequences: Sequences, limits: BatchLimits, temperature: float
    ) -> Observation:
        """Return an observation of these sequences."""
        return Observation.of(sequences, self.dp_size, self._padded(limits), temperature)

    def observed_update(
        self,
        observation: Observation,
        sequences: Sequences,
        limits: BatchLimits,
        loss: Loss | StepLoss,
        lr: float,
    ) -> tuple[dict[str, float], Observed]:
        """Observe the policy, then update it once, in a single call of all ranks.

        Returns:
            The mean metrics of `update`, and the values of the observation.
        """
        batches = self._split(sequences, limits)
        pairs = [
            (observed, own.micro_batches)
            for observed, own in zip(observation.sequences, batches, strict=True)
        ]
        divisor = num_loss_tokens(sequences)
        arguments = observation.limits, observation.temperature, loss, divisor, lr
        results = self._workers.wait(self._begin_shared("observed_update", pairs, *arguments))
        values, seconds, metrics = zip(*results, strict=True)
        return metrics[0], Observed(observation, self._positions, values, seconds[0])

    def observe(self, observation: Observation) -> Observed:
        """Observe the policy without an update."""
        start = time.perf_counter()
        arguments = observation.limits, observation.temperature
        calls = self._begin_shared("observe", observation.sequences, *arguments)
        values = self._workers.wait(calls)
        return Observed(observation, self._positions, values, time.perf_counter() - start)

    def evaluate(
        self,
        sequences: Sequences,
        limits: BatchLimits,
        loss: Loss | StepLoss,
        *,
        rows: Rows | None = None,
        total_weight: float | None = None,
    ) -> dict[str, float]:
        """Return the metrics of `update` without an update."""
        batches = self._split(sequences, limits, rows)
        divisor = num_loss_tokens(sequences) if total_weight is None else total_weight
        return self._call("evaluate", batches, loss, divisor)[0]

    def logprobs(
        self,
        sequences: Sequences,
        limits: BatchLimits,
        temperature: float,
        *,
        of_reference: bool = False,
    ) -> tuple[Floats, ...]:
        """Return log-probabilities of the tokens of every sequence, [T] each; 0 if masked."""
        begun = self.begin_logprobs(sequences, limits, temperature, of_reference=of_reference)
        return begun.wait()

    def begin_logprobs(
        self,
        sequences: Sequences,
        limits: BatchLimits,
        temperature: float,
        *,
        of_reference: bool = False,
    ) -> PendingValues:
        """Begin `logprobs` without waiting for the result.

        The policy replays the routes of the sequences. The reference chooses its own.
        """
        if of_reference:
            sequences = sequences._replace(routes=None)
        return self._begin_per_token("logprobs", sequences, limits, temperature, of_reference)

    def begin_routed_logprobs(
        self, sequences: Sequences, limits: BatchLimits, temperature: float
    ) -> PendingLogprobs:
        """Begin `logprobs` of the policy, which also records the routes of all tokens."""
        begun = self._begin_per_token("routed_logprobs", sequences, limits, temperature)
        return PendingLogprobs(begun)

    def token_statistic(
        self, sequences: Sequences, limits: BatchLimits, temperature: float, name: TokenStatistic
    ) -> tuple[Floats, ...]:
        """Return a statistic of the policy's distribution at every token, [T] each; 0 if masked."""
        return self._per_token("token_statistic", sequences, limits, temperature, name)

    # Critic and reward models

    def values(self, sequences: Sequences, limits: BatchLimits) -> tuple[Floats, ...]:
        """Return the critic's values before each token of every sequence, [T] each; 0 if masked."""
        return self._per_token("values", sequences, limits)

    def update_critic(
        self,
        sequences: Sequences,
        limits: BatchLimits,
        loss: ValuesLoss,
        lr: float,
        *,
        rows: Rows | None = None,
        total_weight: float | None = None,
    ) -> dict[str, float]:
        """Update the critic once on these sequences; return the mean metrics. See `update`."""
        batches = self._split(sequences, limits, rows)
        divisor = num_loss_tokens(sequences) if total_weight is None else total_weight
        return self._call("update_critic", batches, loss, divisor, lr)[0]

    def evaluate_critic(
        self,
        sequences: Sequences,
        limits: BatchLimits,
        loss: ValuesLoss,
        *,
        rows: Rows | None = None,
        total_weight: float | None = None,
    ) -> dict[str, float]:
        """Return the metrics of `update_critic` without an update."""
        batches = self._split(sequences, limits, rows)
        divisor = num_loss_tokens(sequences) if total_weight is None else total_weight
        return self._call("evaluate_critic", batches, loss, divisor)[0]

    def scores(self, name: str, token_ids: Sequence[Ints], batch: int) -> list[float]:
        """Return the score of a reward model at the last token of each sequence.

        A micro-batch holds at most `batch` sequences. A rank returns the value at the position
        before each label, so every sequence gets one more token as the label, which is not read.
        The first sequence is repeated until their number is divisible by the number of
        data-parallel ranks.
        """
        padded = [*token_ids, *[token_ids[0]] * (-len(token_ids) % self.dp_size)]
        with_label = tuple(np.append(ids, ids[-1]) for ids in padded)
        last_token = tuple(np.arange(len(ids)) == len(ids) - 1 for ids in with_label)
        scores = self._per_token(
            "scores", Sequences(with_label, last_token, {}), BatchLimits(batch), name
        )
        return [float(values[-1]) for values in scores[: len(token_ids)]]

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
        limits = self._padded(limits)
        lengths = [len(ids) for ids in sequences.token_ids]
        rows = [[index] for index in range(len(lengths))] if rows is None else rows
        row_lengths = [sum(lengths[index] for index in row) for row in rows]
        return [
            _rank_batches(sequences, [rows[number] for number in share], limits)
            for share in balanced(row_lengths, self.dp_size)
        ]

    def _padded(self, limits: BatchLimits) -> BatchLimits:
        """Return the limits with the padding that the parallel layout needs."""
        return replace(limits, pad_to_multiple=self._positions[0].sequence_multiple)

    def _call(self, method: str, batches: Sequence[_RankBatches], *arguments: Any) -> list[Any]:
        """Call a method of all ranks with their micro-batches and further arguments."""
        return self._workers.wait(self._begin(method, batches, *arguments))

    def _begin(self, method: str, batches: Sequence[_RankBatches], *arguments: Any) -> Calls:
        """Begin calls of all ranks with their micro-batches and further arguments."""
        return self._begin_shared(method, [own.micro_batches for own in batches], *arguments)

    def _begin_shared(self, method: str, values: Sequence[object], *arguments: Any) -> Calls:
        """Begin calls of all ranks with the value of their data-parallel rank, and arguments."""
        shared = [self._workers.share(value) for value in values]
        return self._workers.begin_each(
            method,
            {
                rank: (shared[position.dp_rank], *arguments)
                for rank, position in enumerate(self._positions)
            },
        )

    def _per_token(
        self, method: str, sequences: Sequences, limits: BatchLimits, *arguments: Any
    ) -> tuple[Floats, ...]:
        """Call a method of all ranks and return its values of every token, by sequence."""
        return self._begin_per_token(method, sequences, limits, *arguments).wait()

    def _begin_per_token(
        self, method: str, sequences: Sequences, limits: BatchLimits, *arguments: Any
    ) -> PendingValues:
        """Begin calls of all ranks that return a value of every token."""
        batches = self._split(sequences, limits)
        calls = self._begin(method, batches, *arguments)
        return PendingValues(self._workers, calls, self._positions, batches)


@dataclass(frozen=True, slots=True)
class PendingValues:
    """Values of every token that ranks compute."""

    workers: Workers
    calls: Calls
    positions: Sequence[WorkerPosition]
    batches: Sequence[_RankBatches]  # by data-parallel rank

    def wait(self) -> tuple[Floats, ...]:
        """Return the values, by sequence."""
        return self.collect(self.workers.wait(self.calls))

    def collect(self, results: Sequence[Any]) -> tuple[Floats, ...]:
        """Return the values that ranks have computed, by sequence."""
        return _by_sequence(self.positions, self.batches, results)


def _by_sequence(
    positions: Sequence[WorkerPosition], batches: Sequence[_RankBatches], results: Sequence[Any]
) -> tuple[Floats, ...]:
    """Return the values of every token, [T] each, from those of all ranks' micro-batches."""
    values = dict[int, Floats]()
    for position, rows in zip(positions, results, strict=True):
        if position.is_reporter:
            own = batches[position.dp_rank]
            values.update(by_sequence(own.micro_batches, own.groups, rows))
    return tuple(values[index] for index in range(len(values)))


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities of every token that ranks compute while they record routes."""

    begun: PendingValues

    def wait(self) -> tuple[tuple[Floats, ...], tuple[Routes, ...]]:
        """Return the log-probabilities, [T] each, and the routes, [T, L, k] each, by sequence."""
        begun = self.begun
        results = begun.workers.wait(begun.calls)
        logprobs = begun.collect([values for values, _ in results])
        by_layer: list[dict[int, Routes]] = [{} for _ in logprobs]
        for position, (_, routes) in zip(begun.positions, results, strict=True):
            if routes is not None:
                _split_routes(routes, begun.batches[position.dp_rank], by_layer)
        return logprobs, tuple(
            np.stack([layers[number] for number in sorted(layers)], 1) for layers in by_layer
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
        [index for number in group for index in rows[number]] for group in limits.group(lengths)
    ]
    return _RankBatches(micro_batches(sequences, groups, limits), groups)


def _split_routes(
    routes: StageRoutes, own: _RankBatches, by_layer: Sequence[dict[int, Routes]]
) -> None:
    """Add the routes of a stage, [T, k] per layer, to those of the sequences in its batches."""
    for batch, group, experts in zip(
        own.micro_batches, own.groups, routes.micro_batches, strict=True
    ):
        # The last rows may be of padding, which belongs to no sequence.
        for index, (start, end) in zip(group, pairwise(batch.cu_seqlens), strict=False):
            for column, layer in enumerate(routes.layers):
                by_layer[index][layer] = experts[start:end, column]
