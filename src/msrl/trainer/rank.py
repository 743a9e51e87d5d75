"""One training rank: a policy (and, for reinforcement, a reference, a critic, reward models), its optimizer, and what can be asked of it.

Import this after `platform.prepare()`. Letters: N tokens of a packed micro-batch, M of them selected by the loss mask (`device_batch.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from msrl.platforms import resolve
from msrl.trainer import groups
from msrl.trainer.critic import Critic
from msrl.trainer.model import build as megatron
from msrl.trainer.model import pipeline
from msrl.trainer.objective.chunked import chunked_logprobs
from msrl.trainer.objective.device_batch import DeviceBatch, spread
from msrl.trainer.objective.divergence import KeepDistribution
from msrl.trainer.objective.logprobs import Distribution, VocabColumns, columns_of, vocab_parallel_logprobs
from msrl.trainer.objective.losses import Loss, Outputs
from msrl.trainer.replica import Learner, last_chunk
from msrl.trainer.settings import WorkerSettings
from msrl.types import Floats, MicroBatch


class TrainWorker(Learner):
    """The policy of a rank, which joins the process groups when it is made."""

    def __init__(self, settings: WorkerSettings, rank: int, world_size: int, init_method: str) -> None:
        torch.use_deterministic_algorithms(settings.deterministic)
        groups.initialize(
            resolve(settings.platform), rank=rank, world_size=world_size, init_method=init_method, layout=settings.layout,
            seed=settings.seed, timeout_s=settings.timeout_s,
        )  # fmt: skip
        super().__init__(settings, rank, world_size)
        self.reference = self.load_model(settings.reference)[0].eval() if settings.reference and not settings.lora else None
        self.critic = Critic(settings.of_critic(settings.critic), rank, world_size) if settings.critic else None
        self.reward_models = {name: Critic(settings.of_reward_model(name), rank, world_size) for name in settings.reward_models}

    def held(self) -> list[torch.nn.Module]:
        return super().held() if self.reference is None else [self.model, self.reference]

    def train_step(self, micro_batches: Sequence[MicroBatch], loss: Loss, *, num_tokens: int, lr: float) -> dict[str, float]:
        """One optimizer step over this data-parallel rank's micro-batches, as `Learner.update` says."""
        references = self._reference_distributions(micro_batches, loss.temperature) if loss.needs_divergence else {}
        finish = functools.partial(self._minimise, loss, num_tokens)
        return self.update(
            micro_batches, finish, num_tokens=num_tokens, lr=lr, gives_hidden=self._is_chunked, references=references
        )  # fmt: skip

    def evaluate(self, micro_batches: Sequence[MicroBatch], loss: Loss, *, num_tokens: int) -> dict[str, float]:
        """The report of a training step, without the step."""
        finish = functools.partial(self._minimise, loss, num_tokens)
        sums = self.run(self.model.eval(), micro_batches, finish, forward_only=True, gives_hidden=self._is_chunked)
        return self.reduce(sums, num_tokens)

    def logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float, *, of_reference: bool = False) -> list[Floats] | None:
        """Log-probability of every label, [N] per micro-batch, 0 where the mask is not set. None except on the last stage."""

        def keep(output: Tensor, batch: DeviceBatch) -> dict[str, Tensor]:
            return {"logprobs": self.label_logprobs(output, batch, temperature)[0]}

        with self._as_reference() if of_reference else nullcontext(self.model) as model:
            found = self.run(model.eval(), micro_batches, keep, forward_only=True, gives_hidden=self._is_chunked)
        if not self.is_last_stage:
            return None
        return [spread(batch, row["logprobs"]).numpy() for batch, row in zip(micro_batches, found, strict=True)]

    def logits(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor] | None:
        """Logits over the true vocabulary, [N, vocabulary] float32 per micro-batch. None except on the last stage."""
        everywhere = [MicroBatch(b.token_ids, b.labels, np.ones_like(b.loss_mask), b.cu_seqlens) for b in micro_batches]

        def keep(logits: Tensor, batch: DeviceBatch) -> dict[str, Tensor]:
            return {"logits": batch.whole(logits[: len(batch.labels)])}

        found = self.run(self.model.eval(), everywhere, keep, forward_only=True)
        return [self._join_vocabulary(row["logits"].float()) for row in found] if self.is_last_stage else None

    @property
    def _is_chunked(self) -> bool:
        """Whether logits are made of hidden states a few positions at a time."""
        return self.settings.chunk is not None

    @contextmanager
    def _as_reference(self) -> Iterator[torch.nn.Module]:
        """The model that the policy is compared with: the reference, or the policy without its adapters."""
        if self.adapters is not None:
            with self.adapters.off():
                yield self.model
        else:
            assert self.reference is not None, "made without a reference"
            yield self.reference

    def _reference_distributions(self, micro_batches: Sequence[MicroBatch], temperature: float) -> dict[int, Distribution]:
        """What the reference says over the whole vocabulary, by the identity of the micro-batch; empty except on the last stage."""
        with self._as_reference() as model:
            keep = KeepDistribution(self, last_chunk(pipeline.chunks_of(model)), temperature)
            found = self.run(model.eval(), micro_batches, keep, forward_only=True, gives_hidden=True)
        pairs = zip(micro_batches, found, strict=True) if self.is_last_stage else ()
        return {id(batch): row["distribution"] for batch, row in pairs}

    def _join_vocabulary(self, logits: Tensor) -> Tensor:
        parts = [torch.empty_like(logits) for _ in range(self.layout.tp)]
        dist.all_gather(parts, logits.contiguous(), group=groups.tp_group())
        return torch.cat(parts, -1)[:, : self.shape.num_outputs]

    def _minimise(self, loss: Loss, num_tokens: int, output: Tensor, batch: DeviceBatch) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, entropy, divergence = self.label_logprobs(output, batch, loss.temperature, with_entropy=loss.needs_entropy)
        return loss(Outputs(logprobs, batch.sequences, entropy, divergence), batch.fields, num_tokens)

    def label_logprobs(
        self, output: Tensor, batch: DeviceBatch, temperature: float, *, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities of the labels and, if asked for, entropies and divergences from the reference, [M] each, from the model's
        output: logits, which a backward pass uses up, or hidden states where `chunk` is set.
        """
        head = self.running.head() if self.running.gives_hidden else output.new_empty((0, 0))
        columns = self.columns(len(head) or output.shape[-1], temperature, with_entropy=with_entropy)
        count = len(batch.labels)
        labels = F.pad(batch.labels, (0, len(output) - count))
        if self.settings.chunk is not None and self.running.gives_hidden:
            cap = self.shape.logit_softcap
            found = chunked_logprobs(
                output, head, labels, columns, num_rows=self.settings.chunk, softcap=cap, other=batch.reference
            )  # fmt: skip
        else:
            found = vocab_parallel_logprobs(output, labels, columns, batch.reference)
        entropy, divergence = (None if values is None else batch.whole(values[:count]) for values in found[1:])
        return batch.whole(found[0][:count]), entropy, divergence

    def columns(self, width: int, temperature: float, *, with_entropy: bool = False) -> VocabColumns:
        """This rank's columns of the vocabulary, `width` of them with padding."""
        return columns_of(
            width, vocab_size=self.shape.vocab_size, tp_rank=self.tp_rank, temperature=temperature,
            with_entropy=with_entropy, elements_at_once=self.platform.elements_at_once, group=groups.tp_group(),
        )  # fmt: skip

    def learners(self) -> list[Learner]:
        """All models of this rank but the reference: the policy, the critic, and the reward models."""
        return [self, *([self.critic] if self.critic is not None else []), *self.reward_models.values()]

    def rest(self) -> None:
        """Have everything wait on the host that may, until it is needed."""
        for learner in self.learners():
            learner.host.rest()

    def scores(self, name: str, micro_batches: Sequence[MicroBatch]) -> list[Floats] | None:
        """What a reward model gives for what precedes each label, [N] per micro-batch, 0 where the mask is not set. None except on the
        last stage."""
        model = self.reward_models[name]
        found = model.values(micro_batches)
        model.host.rest()
        return found

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank says yes; all ranks must ask."""
        said = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        return bool(said.item())

    def close(self) -> None:
        """Leave the process groups; their threads and sockets go with the last model that knows them."""
        for learner in (self, self.critic):
            if learner is not None and learner.wrapped is not None:
                megatron.unwrap(learner.wrapped)
        groups.shutdown()
