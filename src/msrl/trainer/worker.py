"""One training rank: a policy (and, for GRPO, a reference), its optimizer, and what can be asked of them.

Import this after `platform.prepare()`. Letters: N tokens of a packed micro-batch, M of them selected by the loss mask (`device_batch.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from msrl.checkpoint.source import open_mcore, open_weights
from msrl.models.shape import Shape
from msrl.platforms import resolve
from msrl.trainer import groups, megatron, optimizer_state, pipeline
from msrl.trainer.batches import filler
from msrl.trainer.chunked import chunked_logprobs
from msrl.trainer.device_batch import DeviceBatch, spread, to_device
from msrl.trainer.divergence import KeepDistribution
from msrl.trainer.guard import GradientGuard
from msrl.trainer.logprobs import Columns, Distribution, columns_of, vocab_parallel_logprobs
from msrl.trainer.lora import Adapters
from msrl.trainer.losses import Loss, Outputs
from msrl.trainer.offload import HostMemory
from msrl.trainer.optimizer import build_optimizer, clip_gradients
from msrl.trainer.policy import PolicyModel
from msrl.trainer.rope import RotaryTable
from msrl.trainer.settings import WorkerSettings, sequence_multiple
from msrl.types import Floats, MicroBatch


class TrainWorker:
    """Rank `rank` of `world_size`; joins the process groups when it is made."""

    def __init__(self, settings: WorkerSettings, rank: int, world_size: int, init_method: str) -> None:
        self.settings, self.layout = settings, settings.layout
        self.platform = resolve(settings.platform)
        self.device = self.platform.device(rank)
        self.dtype = getattr(torch, settings.dtype)
        torch.use_deterministic_algorithms(settings.deterministic)
        groups.initialize(
            self.platform, rank=rank, world_size=world_size, init_method=init_method, layout=settings.layout, seed=settings.seed,
            timeout_s=settings.timeout_s,
        )  # fmt: skip
        self.tp_rank, self.pp_rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        self.dp_rank, self.dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        self.stage_rank = rank % (world_size // self.layout.pp)
        self.coords = self.layout.coords(self.pp_rank, self.stage_rank)
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        self.policy, self.shape = self._load_model(settings.model, settings.iteration)
        self.num_chunks = self.layout.num_chunks(self.shape.num_layers)
        config: Any = pipeline.chunks_of(self.policy)[0].config
        self.links = pipeline.Links(config, self.device, settings.timeout_s) if self.num_chunks > 1 else None
        self.rotary = RotaryTable(self.shape, self.dtype, self.device)
        self._running = self._last_chunk(pipeline.chunks_of(self.policy))  # of the model whose pass is under way
        self.reference = self._load_model(settings.reference)[0].eval() if settings.reference and not settings.lora else None
        self._references: dict[int, Distribution] = {}  # by the identity of the micro-batch in work
        self.wrapped: list[DistributedDataParallel] | None = None
        self.adapters: Adapters | None = None
        self.guard = GradientGuard(settings.max_skipped, settings.bad_batch_dir, rank)
        if settings.optimizer:
            megatron.freeze(self.policy, self.shape, self.layout, settings.freeze)
            if settings.lora:
                self.adapters = Adapters(self.policy, self.shape, self.layout, self.coords, settings.lora, settings.seed)
            self.wrapped = megatron.wrap(self.policy, self.platform)
            self.optimizer = build_optimizer(self.wrapped, settings.optimizer, is_bf16=self.dtype == torch.bfloat16)
        self.host = HostMemory(self._restful(), forgotten=frozenset({"grads"}))

    @property
    def sequence_multiple(self) -> int:
        """What the tokens of a micro-batch must be a multiple of: sequence parallelism cuts them over the tensor-parallel ranks."""
        return sequence_multiple(self.layout, self.shape)

    def _restful(self) -> dict[str, Callable[[], Iterable[Tensor]]]:
        """What waits on the host while it is not needed, by the settings' names."""
        models = torch.nn.ModuleList([self.policy] if self.reference is None else [self.policy, self.reference])
        kinds: dict[str, Callable[[], Iterable[Tensor]]] = {"params": lambda: list(models.parameters())}
        if self.wrapped is not None:
            buffers = [buffer for chunk in self.wrapped for buffer in [*cast("list[Any]", chunk.buffers), *chunk.expert_parallel_buffers]]
            kinds["grads"] = lambda: [buffer.grad_data for buffer in buffers]
            kinds["optimizer"] = lambda: optimizer_state.tensors(self.optimizer, is_bf16=self.dtype == torch.bfloat16)
        return {kind: tensors for kind, tensors in kinds.items() if kind in self.settings.offload}

    def _load_model(self, path: Path, iteration: int | None = None) -> tuple[torch.nn.Module, Shape]:
        source = open_weights(path, self.settings.hf_dir) if iteration is None else open_mcore(path, iteration=iteration)
        padded = source.shape.padded_vocab_size(self.layout.tp)
        model = megatron.build_model(source.shape, self.layout, self.dtype, self.device, padded, self.settings.recompute)
        tensors = source.local_tensors(self.layout, self.coords, dtype=self.dtype)
        missing = megatron.named_weights(model)
        with torch.no_grad():
            for name, tensor in tensors:
                missing.pop(name).copy_(tensor)
        assert not missing, f"weights that no rule fills: {sorted(missing)}"
        return model, source.shape

    # Passes over micro-batches

    def train_step(self, micro_batches: Sequence[MicroBatch], loss: Loss, *, num_tokens: int, lr: float) -> dict[str, float]:
        """One optimizer step over this data-parallel rank's micro-batches.

        `num_tokens` counts the loss tokens of all of them on all ranks. Returns the report's means, the same on every rank; `skipped` is 1
        for an update that was left out, because its gradient was not finite. Raises MsrlError when too many of these follow one another.
        """
        assert self.wrapped is not None and self.settings.optimizer is not None, "made without an optimizer"
        self.host.need("params", "grads")
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if loss.needs_divergence:
            self._references = self._reference_distributions(micro_batches, loss.temperature)
        self.policy.train()  # after the reference, which may be the same model
        sums = self._run(self.wrapped, micro_batches, functools.partial(_minimise, loss, num_tokens), loss, forward_only=False)
        self._references = {}
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.prepare_grads()
        grad_norm = clip_gradients(self.optimizer, self.settings.optimizer.grad_clip or float("inf"))
        is_skipped = self.guard.must_skip(grad_norm, micro_batches)
        if not is_skipped:
            self.host.need("optimizer")
            self.optimizer.step_with_ready_grads()
            self.host.rest("optimizer")
        return {**self._reduce(sums, num_tokens), "grad_norm": grad_norm, "lr": lr, "skipped": float(is_skipped)}

    def evaluate(self, micro_batches: Sequence[MicroBatch], loss: Loss, *, num_tokens: int) -> dict[str, float]:
        """The report of a training step, without the step."""
        self.policy.eval()
        sums = self._run(self.policy, micro_batches, functools.partial(_minimise, loss, num_tokens), loss, forward_only=True)
        return self._reduce(sums, num_tokens)

    def logprobs(self, micro_batches: Sequence[MicroBatch], temperature: float, *, of_reference: bool = False) -> list[Floats] | None:
        """Log-probability of every label, [N] per micro-batch, 0 where the mask is not set. None except on the last stage."""
        collect = _Collect(temperature)
        with self._as_reference() if of_reference else nullcontext(self.policy) as model:
            found = self._run(model.eval(), micro_batches, collect, collect, forward_only=True)
        if not self.is_last_stage:
            return None
        return [spread(batch, row["logprobs"]).numpy() for batch, row in zip(micro_batches, found, strict=True)]

    @contextmanager
    def _as_reference(self) -> Iterator[torch.nn.Module]:
        """The model that the policy is compared with: the reference, or the policy without its adapters."""
        if self.adapters is not None:
            with self.adapters.off():
                yield self.policy
        else:
            assert self.reference is not None, "made without a reference"
            yield self.reference

    def _reference_distributions(self, micro_batches: Sequence[MicroBatch], temperature: float) -> dict[int, Distribution]:
        """What the reference says over the whole vocabulary, by the identity of the micro-batch; empty except on the last stage."""
        with self._as_reference() as model:
            keep = KeepDistribution(self._last_chunk(pipeline.chunks_of(model)), temperature)
            found: list[Any] = [*self._run(model.eval(), micro_batches, keep, keep, forward_only=True, is_chunked=True)]
        pairs = zip(micro_batches, found, strict=True) if self.is_last_stage else ()
        return {id(batch): row["distribution"] for batch, row in pairs}

    def logits(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor] | None:
        """Logits over the true vocabulary, [N, vocabulary] float32 per micro-batch. None except on the last stage."""
        self.policy.eval()
        everywhere = [MicroBatch(b.token_ids, b.labels, np.ones_like(b.loss_mask), b.cu_seqlens) for b in micro_batches]

        def keep(logits: Tensor, batch: DeviceBatch, worker: TrainWorker) -> dict[str, Tensor]:
            return {"logits": batch.whole(logits)}

        found = self._run(self.policy, everywhere, keep, _Collect(1.0), forward_only=True, is_chunked=False)
        return [self._join_vocabulary(row["logits"].float()) for row in found] if self.is_last_stage else None

    def _join_vocabulary(self, logits: Tensor) -> Tensor:
        parts = [torch.empty_like(logits) for _ in range(self.layout.tp)]
        dist.all_gather(parts, logits.contiguous(), group=groups.tp_group())
        return torch.cat(parts, -1)[:, : self.shape.num_outputs]

    def _run(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        micro_batches: Sequence[MicroBatch],
        finish: Any,
        loss: Any,
        *,
        forward_only: bool,
        is_chunked: bool | None = None,
    ) -> list[dict[str, Tensor]]:
        """Megatron's schedule over the micro-batches; what `finish` returned for each, on the last stage."""
        fillers = [filler(self.sequence_multiple)] * (self._rounds(len(micro_batches)) - len(micro_batches))

        self.host.need("params")
        models = pipeline.chunks_of(model) if isinstance(model, torch.nn.Module) else model
        self._running = self._last_chunk(models)
        self._running.gives_hidden = self.settings.chunk is not None if is_chunked is None else is_chunked

        def forward_step(batches: Iterator[tuple[int, MicroBatch]], module: torch.nn.Module) -> tuple[Tensor, Any]:
            number, micro_batch = next(batches)
            batch = to_device(micro_batch, self.rotary, self.device, cp=self.layout.cp, multiple=self.sequence_multiple)
            batch = replace(batch, reference=self._references.get(id(micro_batch)))
            output = module(batch.tokens, None, None, packed_seq_params=batch.packed, loss_mask=batch.mask)
            return output, functools.partial(self._finish, finish if number < len(micro_batches) else _nothing, loss, batch)

        with torch.set_grad_enabled(not forward_only):
            batches = [*micro_batches, *fillers]
            found = pipeline.run(forward_step, models, batches, pp_size=self.layout.pp, links=self.links, forward_only=forward_only)
        return found[: len(micro_batches)]

    def _rounds(self, num_micro_batches: int) -> int:
        """How many micro-batches this rank runs.

        Ranks that share experts run as many as the one that has most, for they meet in each. Virtual stages take turns in groups of as many
        micro-batches as there are stages.
        """
        if self.shape.moe is not None and self.dp_size > 1:
            most = torch.tensor(num_micro_batches, device=self.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.dp_group())
            num_micro_batches = int(most.item())
        return -(-num_micro_batches // self.layout.pp) * self.layout.pp if self.num_chunks > 1 else num_micro_batches

    @staticmethod
    def _last_chunk(models: Sequence[torch.nn.Module]) -> PolicyModel:
        last = models[-1].module if isinstance(models[-1], DistributedDataParallel) else models[-1]
        assert isinstance(last, PolicyModel)
        return last

    def _finish(self, finish: Any, loss: Any, batch: DeviceBatch, logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """The last stage's end of a micro-batch, in the form that Megatron's schedules take (loss, token count, data)."""
        no_count = torch.zeros((), dtype=torch.int, device=self.device)
        outcome = finish(logits, batch, self)
        if isinstance(outcome, tuple):
            return outcome[0], no_count, outcome[1]
        return torch.zeros((), device=self.device), no_count, outcome

    def label_logprobs(
        self, output: Tensor, batch: DeviceBatch, temperature: float, *, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities of the labels and, if asked for, entropies and divergences from the reference, [M] each, from the model's
        output: logits, which a backward pass uses up, or hidden states where `chunk` is set.
        """
        head = self._running.head() if self._running.gives_hidden else output.new_empty((0, 0))
        columns = self.columns(len(head) or output.shape[-1], temperature, with_entropy=with_entropy)
        if self.settings.chunk is not None and self._running.gives_hidden:
            cap = self.shape.logit_softcap
            found = chunked_logprobs(
                output, head, batch.labels, columns, num_rows=self.settings.chunk, softcap=cap, other=batch.reference
            )  # fmt: skip
        else:
            found = vocab_parallel_logprobs(output, batch.labels, columns, batch.reference)
        entropy, divergence = (None if values is None else batch.whole(values) for values in found[1:])
        return batch.whole(found[0]), entropy, divergence

    def columns(self, width: int, temperature: float, *, with_entropy: bool = False) -> Columns:
        """This rank's columns of the vocabulary, `width` of them with padding."""
        return columns_of(
            width, vocab_size=self.shape.vocab_size, tp_rank=self.tp_rank, temperature=temperature,
            with_entropy=with_entropy, elements_at_once=self.platform.elements_at_once, group=groups.tp_group(),
        )  # fmt: skip

    def _reduce(self, rows: Sequence[dict[str, Tensor]], num_tokens: int) -> dict[str, float]:
        """Sums over micro-batches and data-parallel ranks as means per token, told to every pipeline stage."""
        means: list[dict[str, float]] = [{}]
        if self.is_last_stage:
            names = sorted(rows[0])
            totals = torch.stack([torch.stack([row[name].float() for row in rows]).double().sum() for name in names])
            dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
            means = [dict(zip(names, (totals / num_tokens).tolist(), strict=True))]
        if self.layout.pp > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(means, src=last, group=groups.pp_group())
        return means[0]

    @property
    def is_writer(self) -> bool:
        """Whether this rank is the first that holds its part of the model."""
        return self.stage_rank < self.layout.ranks_per_stage

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank says yes; all ranks must ask."""
        said = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(said, op=dist.ReduceOp.MAX)
        return bool(said.item())

    def close(self) -> None:
        groups.shutdown()


def _minimise(loss: Loss, num_tokens: int, logits: Tensor, batch: DeviceBatch, worker: TrainWorker) -> tuple[Tensor, dict[str, Tensor]]:
    logprobs, entropy, divergence = worker.label_logprobs(logits, batch, loss.temperature, with_entropy=loss.needs_entropy)
    return loss(Outputs(logprobs, batch.sequences, entropy, divergence), batch.fields, num_tokens)


@dataclass(frozen=True, slots=True)
class _Collect:
    """Keeps the log-probabilities of the labels."""

    temperature: float

    def __call__(self, logits: Tensor, batch: DeviceBatch, worker: TrainWorker) -> dict[str, Tensor]:
        return {"logprobs": worker.label_logprobs(logits, batch, self.temperature)[0]}


def _nothing(logits: Tensor, batch: DeviceBatch, worker: TrainWorker) -> tuple[Tensor, dict[str, Tensor]]:
    """The end of a micro-batch that counts for nothing; its gradients are zero."""
    return logits.sum() * 0.0, {}
