"""A model in training on one rank: its weights, its optimizer, and Megatron's passes over micro-batches.

The policy (`worker.py`) is one, its critic (`critic.py`) another, in the same processes and process groups. Import this after
`platform.prepare()`. Letters: N tokens of a packed micro-batch, M of them selected by the loss mask (`device_batch.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from msrl.checkpoint.source import open_mcore, open_weights
from msrl.checkpoint.weights import WeightSource
from msrl.models.shape import Shape
from msrl.platforms import resolve
from msrl.trainer import groups, optimizer_state
from msrl.trainer.guard import GradientGuard
from msrl.trainer.model import build as megatron
from msrl.trainer.model import pipeline
from msrl.trainer.model.balance import ExpertBalance
from msrl.trainer.model.gpt import PolicyModel
from msrl.trainer.model.lora import Adapters
from msrl.trainer.model.padding import token_multiple
from msrl.trainer.model.rope import RotaryTable
from msrl.trainer.objective.batches import filler
from msrl.trainer.objective.device_batch import DeviceBatch, to_device
from msrl.trainer.objective.logprobs import Distribution
from msrl.trainer.offload import HostMemory
from msrl.trainer.optimizer import build_optimizer, clip_gradients
from msrl.trainer.settings import WorkerSettings, sequence_multiple
from msrl.types import MicroBatch

Sums = dict[str, Any]
Finish = Callable[[Tensor, DeviceBatch], "Sums | tuple[Tensor, Sums]"]
"""The last stage's end of a micro-batch: from the model's output [M, ...] to what is kept of it, after the scalar to minimise, if any."""
_NO_REFERENCES: Mapping[int, Distribution] = {}


class Learner:
    """The model of `settings` on rank `rank` of `world_size`, which have joined their process groups."""

    def __init__(self, settings: WorkerSettings, rank: int, world_size: int) -> None:
        self.settings, self.layout = settings, settings.layout
        self.platform = resolve(settings.platform)
        self.device = self.platform.device(rank)
        self.dtype = getattr(torch, settings.dtype)
        self.tp_rank, self.pp_rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        self.dp_rank, self.dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        self.stage_rank = rank % (world_size // self.layout.pp)
        self.coords = self.layout.coords(self.pp_rank, self.stage_rank)
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        self.model, self.shape = self.load_model(settings.model, settings.iteration)
        self.num_chunks = self.layout.num_chunks(self.shape.num_layers)
        config: Any = pipeline.chunks_of(self.model)[0].config
        self.links = pipeline.Links(config, self.device, settings.timeout_s) if self.num_chunks > 1 else None
        self.rotary = RotaryTable(self.shape, self.dtype, self.device)
        self.running = last_chunk(pipeline.chunks_of(self.model))  # of the model whose pass is under way
        self.wrapped: list[DistributedDataParallel] | None = None
        self.adapters: Adapters | None = None
        self.balance: ExpertBalance | None = None
        self.guard = GradientGuard(settings.max_skipped, settings.bad_batch_dir, rank)
        if settings.optimizer:
            megatron.freeze(self.model, self.shape, self.layout, settings.freeze)
            if settings.lora:
                self.adapters = Adapters(self.model, self.shape, self.layout, self.coords, settings.lora, settings.seed)
            if settings.balance and self.shape.moe:
                self.balance = ExpertBalance(settings.balance, self.shape.moe, self.model, self.device)
            self.wrapped = megatron.wrap(self.model, self.platform)
            self.optimizer = build_optimizer(self.wrapped, settings.optimizer, is_bf16=self.dtype == torch.bfloat16)
        self.host = HostMemory(self._restful(), forgotten=frozenset({"grads"}))

    @property
    def sequence_multiple(self) -> int:
        """What the tokens of a micro-batch must be a multiple of: sequence parallelism cuts them over the tensor-parallel ranks, and some
        platforms want shapes that come again."""
        return math.lcm(sequence_multiple(self.layout, self.shape), token_multiple(self.device.type, self.dtype))

    @property
    def is_writer(self) -> bool:
        """Whether this rank is the first that holds its part of the model."""
        return self.stage_rank < self.layout.ranks_per_stage

    def held(self) -> list[torch.nn.Module]:
        """The models whose parameters may wait on the host."""
        return [self.model]

    def _restful(self) -> dict[str, Callable[[], Iterable[Tensor]]]:
        """What waits on the host while it is not needed, by the settings' names."""
        kinds: dict[str, Callable[[], Iterable[Tensor]]] = {"params": lambda: list(torch.nn.ModuleList(self.held()).parameters())}
        if self.wrapped is not None:
            buffers = [buffer for chunk in self.wrapped for buffer in [*cast("list[Any]", chunk.buffers), *chunk.expert_parallel_buffers]]
            kinds["grads"] = lambda: [buffer.grad_data for buffer in buffers]
            kinds["optimizer"] = lambda: optimizer_state.tensors(self.optimizer, is_bf16=self.dtype == torch.bfloat16)
        return {kind: tensors for kind, tensors in kinds.items() if kind in self.settings.offload}

    def load_model(self, path: Path, iteration: int | None = None) -> tuple[torch.nn.Module, Shape]:
        """This rank's part of the model in `path`."""
        source = open_weights(path, self.settings.hf_dir) if iteration is None else open_mcore(path, iteration=iteration)
        shape = self.shape_of(source)
        padded = shape.padded_vocab_size(self.layout.tp)
        model = megatron.build_model(shape, self.layout, self.dtype, self.device, padded, self.settings.recompute)
        self.fill(megatron.named_weights(model), source)
        return model, shape

    def shape_of(self, source: WeightSource) -> Shape:
        """The shape that weights are trained in."""
        return source.shape

    def fill(self, weights: dict[str, Tensor], source: WeightSource) -> None:
        """Copy this rank's tensors of `source` into its `weights`."""
        with torch.no_grad():
            for name, tensor in source.local_tensors(self.layout, self.coords, dtype=self.dtype):
                weights.pop(name).copy_(tensor)
        assert not weights, f"weights that no rule fills: {sorted(weights)}"

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        finish: Finish,
        *,
        num_tokens: int,
        lr: float,
        gives_hidden: bool = False,
        references: Mapping[int, Distribution] = _NO_REFERENCES,
    ) -> dict[str, float]:
        """One optimizer step over this data-parallel rank's micro-batches.

        `num_tokens` counts the loss tokens of all of them on all ranks. Returns the report's means, the same on every rank; `skipped` is 1
        for an update that was left out, because its gradient was not finite. Raises MsrlError when too many of these follow one another.
        """
        assert self.wrapped is not None and self.settings.optimizer is not None, "made without an optimizer"
        self.host.need("params", "grads")
        self.host.rest("optimizer")  # it was needed for a checkpoint that was loaded or saved
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self.model.train()
        if self.balance is not None:
            self.balance.begin(micro_batches)
        sums = self.run(self.wrapped, micro_batches, finish, forward_only=False, gives_hidden=gives_hidden, references=references)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.prepare_grads()
        grad_norm = clip_gradients(self.optimizer, self.settings.optimizer.grad_clip or float("inf"))
        is_skipped = self.guard.must_skip(grad_norm, micro_batches)
        if not is_skipped:
            self.host.need("optimizer")
            self.optimizer.step_with_ready_grads()
            self.host.rest("optimizer")
        balance = self.balance.end(is_skipped=is_skipped) if self.balance is not None else {}
        return {**self.reduce(sums, num_tokens), **balance, "grad_norm": grad_norm, "lr": lr, "skipped": float(is_skipped)}

    def run(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        micro_batches: Sequence[MicroBatch],
        finish: Finish,
        *,
        forward_only: bool,
        gives_hidden: bool = False,
        references: Mapping[int, Distribution] = _NO_REFERENCES,
    ) -> list[Sums]:
        """Megatron's schedule over the micro-batches; what `finish` returned for each, on the last stage.

        With `gives_hidden` the model's output is its last hidden states in place of logits. `references` are distributions by the identity
        of their micro-batches.
        """
        token = int(micro_batches[0].token_ids[0]) if micro_batches else 0
        fillers = [filler(self.sequence_multiple, token)] * (self._rounds(len(micro_batches)) - len(micro_batches))
        self.host.need("params")
        models = pipeline.chunks_of(model) if isinstance(model, torch.nn.Module) else model
        self.running = last_chunk(models)
        self.running.gives_hidden = gives_hidden

        def forward_step(batches: Iterator[tuple[int, MicroBatch]], module: torch.nn.Module) -> tuple[Tensor, Any]:
            number, micro_batch = next(batches)
            batch = to_device(micro_batch, self.rotary, self.device, cp=self.layout.cp, multiple=self.sequence_multiple)
            batch = replace(batch, reference=references.get(id(micro_batch)))
            members = self.balance.members(micro_batch, batch.packed) if self.balance is not None and not forward_only else None
            output = module(batch.tokens, None, None, packed_seq_params=batch.packed, loss_mask=batch.mask, padding_mask=members)
            return output, functools.partial(self._finish, finish if number < len(micro_batches) else _nothing, batch)

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

    def _finish(self, finish: Finish, batch: DeviceBatch, output: Tensor) -> tuple[Tensor, Tensor, Sums]:
        """The last stage's end of a micro-batch, in the form that Megatron's schedules take (loss, token count, data)."""
        no_count = torch.zeros((), dtype=torch.int, device=self.device)
        outcome = finish(output, batch)
        if isinstance(outcome, tuple):
            return outcome[0], no_count, outcome[1]
        return torch.zeros((), device=self.device), no_count, outcome

    def reduce(self, rows: Sequence[Sums], num_tokens: int) -> dict[str, float]:
        """Sums over micro-batches and data-parallel ranks as means per token, told to every pipeline stage."""
        means: list[dict[str, float]] = [{}]
        if self.is_last_stage:
            names = sorted(rows[0])
            wide = getattr(torch, self.platform.reduction_dtype)
            totals = torch.stack([torch.stack([row[name].float() for row in rows]).to(wide).sum() for name in names])
            dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
            means = [dict(zip(names, (totals / num_tokens).tolist(), strict=True))]
        if self.layout.pp > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(means, src=last, group=groups.pp_group())
        return means[0]


def last_chunk(models: Sequence[torch.nn.Module]) -> PolicyModel:
    """The last virtual stage of a rank, without its wrapper."""
    last = models[-1].module if isinstance(models[-1], DistributedDataParallel) else models[-1]
    assert isinstance(last, PolicyModel)
    return last


def _nothing(output: Tensor, batch: DeviceBatch) -> tuple[Tensor, Sums]:
    """The end of a micro-batch that counts for nothing; its gradients are zero."""
    return output.sum() * 0.0, {}
