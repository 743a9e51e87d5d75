"""Replica of a language model, policy or reference: log-probabilities, logits and training.

Letters: N tokens of a packed micro-batch, M of them selected by the loss mask (m on this rank under
context parallelism), P = m + padding, V columns of the vocabulary on this rank, K comparisons.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from msrl.trainer import groups
from msrl.trainer.model.outputs import HiddenStates
from msrl.trainer.objective.chunked import chunked_logprobs
from msrl.trainer.objective.device_batch import DeviceBatch
from msrl.trainer.objective.divergence import reference_distribution
from msrl.trainer.objective.logprobs import (
    Distribution,
    DistributionComparison,
    VocabColumns,
    make_columns,
    vocab_parallel_logprobs,
)
from msrl.trainer.objective.losses import Loss, Outputs
from msrl.trainer.objective.requests import RankValues, TokenRequest, UpdateRequest
from msrl.trainer.objective.steps import StepLoss
from msrl.trainer.objective.token_logits import token_logits
from msrl.trainer.replica import ModelReplica, Output
from msrl.types import MicroBatch

Logprobs = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probabilities [M] of the labels; entropies [M] and divergences [M, K] if they are needed."""


class LanguageModelReplica(ModelReplica):
    """A replica whose output layer gives logits over the vocabulary."""

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        request: UpdateRequest,
        comparisons: Sequence[tuple[DistributionComparison, ...]] = (),
    ) -> dict[str, float]:
        """Run one optimizer step over this data-parallel rank's micro-batches.

        See `ModelReplica.minimize`.
        """
        return self.minimize(
            micro_batches,
            functools.partial(self._loss_and_sums, request),
            request,
            gives_hidden=self._is_chunked or isinstance(request.loss, StepLoss),
            comparisons=comparisons,
        )

    def forward(self, micro_batches: Sequence[MicroBatch], request: TokenRequest) -> RankValues:
        """Return the requested values of every label, and the routes of this stage."""
        measure = functools.partial(self._measure, request)
        if request.in_float32:
            with self.widened():
                rows = self.run(micro_batches, measure, gives_hidden=self._is_chunked)
            return RankValues(self.by_label(micro_batches, rows))
        if not request.records_routes:
            rows = self.run(micro_batches, measure, gives_hidden=self._is_chunked)
            return RankValues(self.by_label(micro_batches, rows))
        assert self.replay is not None, "built without routing replay"
        with self.replay.record() as recording:
            rows = self.run(micro_batches, measure, gives_hidden=self._is_chunked)
        return RankValues(self.by_label(micro_batches, rows), recording.gather(micro_batches))

    def _measure(
        self, request: TokenRequest, output: Output, batch: DeviceBatch
    ) -> dict[str, Tensor]:  # [M] each
        """Return the requested values of the labels of a micro-batch."""
        measured = dict[str, Tensor]()
        if "squared_probabilities" in request.values:
            squares = self._squared_probability(output, batch, request.temperature)
            measured["squared_probabilities"] = squares
        if "logprobs" in request.values or "entropies" in request.values:
            logprobs, entropies, _ = self.label_logprobs(
                output, batch, request.temperature, with_entropy="entropies" in request.values
            )
            measured["logprobs"] = logprobs
            if entropies is not None:
                measured["entropies"] = entropies
        return {name: measured[name] for name in request.values}

    def _squared_probability(
        self, output: Output, batch: DeviceBatch, temperature: float
    ) -> Tensor:  # [M]
        """Return the sum of squared probabilities over the vocabulary.

        It is Z(T / 2) / Z(T)^2 with Z(T) the sum of exp(logits / T).
        """
        once, twice = (self._normalizer(output, t) for t in (temperature, temperature / 2))
        return batch.gather((twice - 2.0 * once).exp()[: len(batch.labels)])

    def _normalizer(self, output: Output, temperature: float) -> Tensor:  # [P]
        if isinstance(output, HiddenStates):
            columns = self._columns(len(output.output_weight), temperature)
            return reference_distribution(output, columns).normalizer
        return self._columns(output.shape[-1], temperature).normalizer(output)

    def distributions(
        self, micro_batches: Sequence[MicroBatch], temperature: float
    ) -> list[Distribution | None]:
        """Return the distribution over the vocabulary for each micro-batch.

        None except on the last stage.
        """

        def finish(output: Output, batch: DeviceBatch) -> dict[str, Any]:
            assert isinstance(output, HiddenStates)
            columns = self._columns(len(output.output_weight), temperature)
            return {"distribution": reference_distribution(output, columns)}

        rows = self.run(micro_batches, finish, gives_hidden=True)
        return (
            [row["distribution"] for row in rows]
            if self.position.is_last_stage
            else [None] * len(micro_batches)
        )

    def logits(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor] | None:
        """Return the logits over the unpadded vocabulary, [N, vocabulary] float32 per micro-batch.

        None except on the last stage.
        """
        unmasked = [
            MicroBatch(
                b.token_ids, b.labels, np.ones_like(b.loss_mask), b.cu_seqlens, images=b.images
            )
            for b in micro_batches
        ]

        def finish(output: Output, batch: DeviceBatch) -> dict[str, Tensor]:
            assert isinstance(output, Tensor)
            return {"logits": batch.gather(output[: len(batch.labels)])}

        rows = self.run(unmasked, finish)
        return (
            [self._join_vocabulary(row["logits"].float()) for row in rows]
            if self.position.is_last_stage
            else None
        )

    def label_logprobs(
        self, output: Output, batch: DeviceBatch, temperature: float, *, with_entropy: bool = False
    ) -> Logprobs:
        """Return the log-probabilities of the labels.

        Logits that need a gradient are overwritten.
        """
        count = len(batch.labels)
        if isinstance(output, HiddenStates):
            assert self.settings.logit_chunk is not None
            # `pad_tokens` has added rows to the output. Their results are dropped below.
            labels = F.pad(batch.labels, (0, len(output.values) - count))
            columns = self._columns(
                len(output.output_weight), temperature, with_entropy=with_entropy
            )
            results = chunked_logprobs(
                output.values,
                output.output_weight,
                labels,
                columns,
                num_rows=self.settings.logit_chunk,
                softcap=output.softcap,
                comparisons=batch.comparisons,
            )
        else:
            labels = F.pad(batch.labels, (0, len(output) - count))
            columns = self._columns(output.shape[-1], temperature, with_entropy=with_entropy)
            results = vocab_parallel_logprobs(output, labels, columns, batch.comparisons)
        entropy, divergences = (
            None if values is None else batch.gather(values[:count]) for values in results[1:]
        )
        return batch.gather(results[0][:count]), entropy, divergences

    @property
    def _is_chunked(self) -> bool:
        """True if logits are computed from hidden states, `logit_chunk` positions at a time."""
        return self.settings.logit_chunk is not None

    def _loss_and_sums(
        self, request: UpdateRequest, output: Output, batch: DeviceBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch and its sums for the metrics."""
        loss, divisor = cast("Loss | StepLoss", request.loss), cast("float", request.divisor)
        if isinstance(loss, StepLoss):
            return loss(self._token_logits(output, batch, loss), batch.fields, divisor)
        logprobs, entropy, divergences = self.label_logprobs(
            output, batch, loss.temperature, with_entropy=loss.needs_entropy
        )
        outputs = Outputs(logprobs, batch.sequences, entropy, divergences)
        return loss(outputs, batch.fields, divisor)

    def _token_logits(self, output: Output, batch: DeviceBatch, loss: StepLoss) -> Tensor:
        """Return the logits of the reward tokens, [M, K]."""
        assert isinstance(output, HiddenStates)
        first = self.position.tp_rank * len(output.output_weight)
        logits = token_logits(output, loss.token_ids, first=first)
        return batch.gather(logits[: len(batch.labels)])

    def _columns(
        self, width: int, temperature: float, *, with_entropy: bool = False
    ) -> VocabColumns:
        """Return this rank's columns of the vocabulary, `width` of them with padding."""
        return make_columns(
            width,
            vocab_size=self.shape.vocab_size,
            tp_rank=self.position.tp_rank,
            temperature=temperature,
            with_entropy=with_entropy,
            elements_at_once=self.position.platform.elements_at_once,
            group=groups.tp_group(),
        )

    def _join_vocabulary(self, logits: Tensor) -> Tensor:
        shards = [torch.empty_like(logits) for _ in range(self.position.layout.tp)]
        dist.all_gather(shards, logits.contiguous(), group=groups.tp_group())
        return torch.cat(shards, -1)[:, : self.shape.num_outputs]
