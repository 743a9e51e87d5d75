"""Model replica of a rank: weights, optimizer, adapters, host memory and passes over micro-batches.

Import this after `platform.prepare()`. Letters: N tokens of a packed micro-batch, M of them
selected by the loss mask (`device_batch.py`).
"""

from __future__ import annotations

import contextlib
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

from msrl.checkpoint.random_weights import RandomSource
from msrl.checkpoint.source import open_mcore, open_weights
from msrl.checkpoint.weights import WeightSource
from msrl.config.sections.train import OptimizerConfig
from msrl.models.shape import Shape
from msrl.models.vision.tower import Vision
from msrl.trainer import groups
from msrl.trainer.groups import RankPosition
from msrl.trainer.guard import GradientGuard
from msrl.trainer.model import build as megatron
from msrl.trainer.model import pipeline
from msrl.trainer.model.balance import ExpertBalance, balances_experts
from msrl.trainer.model.indexer_loss import IndexerLoss
from msrl.trainer.model.lora import Adapters
from msrl.trainer.model.outputs import HiddenStates
from msrl.trainer.model.padding import token_multiple
from msrl.trainer.model.rope import RotaryTables
from msrl.trainer.model.routes import RoutingReplay
from msrl.trainer.model.vision.features import ImageLoader, feature_cache
from msrl.trainer.model.vision.pixels import Pixels
from msrl.trainer.objective.batches import filler
from msrl.trainer.objective.device_batch import DeviceBatch, spread, to_device
from msrl.trainer.objective.logprobs import DistributionComparison
from msrl.trainer.objective.requests import UpdateRequest
from msrl.trainer.offload import HostMemory
from msrl.trainer.optimizer import (
    LR_FACTOR,
    build_optimizer,
    clip_gradients,
    state_tensors,
)
from msrl.trainer.settings import ReplicaSettings, sequence_multiple
from msrl.trainer.widened import in_float32
from msrl.types import Floats, MicroBatch

Output = Tensor | HiddenStates
Values = dict[str, Any]
Finish = Callable[[Output, DeviceBatch], "Values | tuple[Tensor, Values]"]
"""Function of a micro-batch's output on the last stage: values by name, with the loss if training.
"""


class ModelReplica:
    """A model on this rank, trainable if its settings have an optimizer.

    The rank has joined its process groups before.
    """

    def __init__(self, settings: ReplicaSettings, position: RankPosition) -> None:
        self.settings, self.position = settings, position
        self.image_loader: ImageLoader | None = None
        self.model, self.shape = self.load_model()
        self.num_chunks = position.layout.num_chunks(self.shape.num_layers)
        self.links = self._build_links()
        self.rotary = RotaryTables(self.shape, position.dtype, position.device)
        self.guard = GradientGuard(settings.max_skipped, settings.bad_batch_dir, position.rank)
        self.wrapped: list[DistributedDataParallel] | None = None
        self.adapters: Adapters | None = None
        self.balance: ExpertBalance | None = None
        self.indexer_loss: IndexerLoss | None = None
        self.replay: RoutingReplay | None = None
        if settings.optimizer is not None:
            self._prepare_training(settings.optimizer)
        self.host = HostMemory(self._offloadable(), discarded=frozenset({"grads"}))

    # Construction

    def load_model(self) -> tuple[torch.nn.Module, Shape]:
        """Return this rank's shard of the model with its weights, and the model's shape."""
        position, source = self.position, self._open_weights()
        shape = self.trained_shape(source)
        padded = shape.padded_vocab_size(position.layout.tp)
        model = megatron.build_model(
            shape,
            position.layout,
            position.dtype,
            position.device,
            padded,
            self.settings.recompute,
            position.logits_dtype,
        )
        self.fill_weights(megatron.named_weights(model), source)
        if shape.vision is not None:
            self.image_loader = self._make_image_loader(shape.vision, source.hf_dir)
        return model, shape

    def _make_image_loader(self, vision: Vision, folder: Path) -> ImageLoader:
        pixels, settings = Pixels(folder, self.position.device), self.settings
        trained = settings.vision.trained
        is_frozen = settings.optimizer is None or not (trained.tower or trained.projector)
        cache = feature_cache(settings.vision.cache_gb * 1e9) if is_frozen else None
        return ImageLoader(vision, pixels.patches, lambda: pixels.settings, cache)

    @property
    def tower(self) -> torch.nn.Module | None:
        """The vision tower, if this rank has one."""
        return getattr(pipeline.virtual_stages(self.model)[0], "vision_model", None)

    def _open_weights(self) -> WeightSource:
        settings = self.settings
        if settings.is_random:
            return RandomSource(settings.model, self.position.seed)
        if settings.iteration is None:
            return open_weights(settings.model, settings.hf_dir)
        return open_mcore(settings.model, iteration=settings.iteration)

    def trained_shape(self, source: WeightSource) -> Shape:
        """Return the shape of the model that the weights of `source` are loaded into."""
        return source.shape

    def fill_weights(self, weights: dict[str, Tensor], source: WeightSource) -> None:
        """Copy this rank's tensors of `source` into the model's `weights`."""
        with torch.no_grad():
            for name, tensor in source.local_tensors(
                self.position.layout, self.position.coords, dtype=self.position.dtype
            ):
                weights.pop(name).copy_(tensor)
        assert not weights, f"weights that no rule fills: {sorted(weights)}"

    def _build_links(self) -> pipeline.Links | None:
        if self.num_chunks == 1:
            return None
        config: Any = pipeline.virtual_stages(self.model)[0].config
        return pipeline.Links(config, self.position.device, self.position.timeout_s)

    def _prepare_training(self, optimizer: OptimizerConfig) -> None:
        settings, position = self.settings, self.position
        if settings.indexer_loss_coef:
            self.indexer_loss = IndexerLoss(
                settings.indexer_loss_coef,
                self.shape,
                self.model,
                position.device,
                is_split=sequence_multiple(position.layout, self.shape) > 1,
            )
        megatron.freeze(self.model, self.shape, position.layout, settings)
        if settings.lora.rank is not None:
            self.adapters = Adapters(
                self.model,
                self.shape,
                position.layout,
                position.coords,
                settings.lora,
                position.seed,
            )
            if settings.start_adapters is not None:
                self.adapters.start_from(settings.start_adapters)
        if self.shape.moe is not None and balances_experts(settings.router, self.shape.moe):
            self.balance = ExpertBalance(
                settings.router,
                self.shape.moe,
                sum(self.shape.mixture_layers),
                self.model,
                position.device,
            )
        if self.shape.moe is not None and settings.router.replay != "none":
            self.replay = RoutingReplay(self.shape.moe, position.device)
        self.wrapped = megatron.wrap(self.model, position.platform)
        self.optimizer = build_optimizer(
            self.wrapped, optimizer, settings.vision, is_bf16=self._is_bf16
        )

    def _offloadable(self) -> dict[str, Callable[[], Iterable[Tensor]]]:
        """Return the kinds of tensors that the settings offload."""
        kinds: dict[str, Callable[[], Iterable[Tensor]]] = {
            "params": lambda: list(self.model.parameters())
        }
        if self.wrapped is not None:
            buffers = [
                buffer
                for chunk in self.wrapped
                for buffer in [*cast("list[Any]", chunk.buffers), *chunk.expert_parallel_buffers]
            ]
            kinds["grads"] = lambda: [buffer.grad_data for buffer in buffers]
            kinds["optimizer"] = lambda: state_tensors(self.optimizer, is_bf16=self._is_bf16)
        return {
            kind: tensors for kind, tensors in kinds.items() if getattr(self.settings.offload, kind)
        }

    @property
    def _is_bf16(self) -> bool:
        return self.position.dtype == torch.bfloat16

    @property
    def sequence_multiple(self) -> int:
        """Divisor of every micro-batch's token count.

        Sequence parallelism and kernels that are compiled by size need it.
        """
        multiple = token_multiple(self.position.device.type, self.position.dtype)
        return math.lcm(sequence_multiple(self.position.layout, self.shape), multiple)

    @property
    def _shares_prefixes(self) -> bool:
        """True if the layers may compute common prefixes once.

        Not with experts, whose load counts every token, nor with dropout, which is drawn for every
        token, nor with rotary embeddings that depend on the length of the sequence.
        """
        return (
            self.shape.moe is None
            and (self.adapters is None or not self.settings.lora.dropout)
            and all(rotary.constant_length is None for rotary in self.shape.rotaries)
        )

    def close(self) -> None:
        """Release the model, so that the process groups and their threads can go."""
        if self.wrapped is not None:
            megatron.unwrap(self.wrapped)

    # Passes

    def minimize(
        self,
        micro_batches: Sequence[MicroBatch],
        finish: Finish,
        request: UpdateRequest,
        *,
        gives_hidden: bool = False,
        comparisons: Sequence[tuple[DistributionComparison, ...]] = (),
    ) -> dict[str, float]:
        """Run one optimizer step over this data-parallel rank's micro-batches.

        Args:
            micro_batches: Micro-batches of this data-parallel rank.
            finish: Function that computes the loss and the sums of a micro-batch.
            request: Learning rate, without which there is no step, and divisor of the metrics.
            gives_hidden: See `run`.
            comparisons: See `run`.

        Returns:
            Metrics per loss token, equal on every rank. `skipped` is 1 if the update was skipped
            because its gradient was not finite.

        Raises:
            MsrlError: Too many consecutive updates were skipped.
        """
        assert request.divisor is not None
        if request.lr is None:
            rows = self.run(
                micro_batches, finish, gives_hidden=gives_hidden, comparisons=comparisons
            )
            return self.mean_metrics(rows, request.divisor)
        assert self.settings.optimizer is not None, "built without an optimizer"
        self._begin_update(micro_batches)
        rows = self.run(
            micro_batches,
            finish,
            is_training=True,
            gives_hidden=gives_hidden,
            comparisons=comparisons,
        )
        grad_norm, is_skipped = self._step(
            micro_batches, request.lr, self.settings.optimizer.grad_clip
        )
        balance = self.balance.end(is_skipped=is_skipped) if self.balance is not None else {}
        indexers = self.indexer_loss.end() if self.indexer_loss is not None else {}
        replay = self.replay.end() if self.replay is not None else {}
        metrics = self.mean_metrics(rows, request.divisor)
        return {
            **metrics,
            **balance,
            **indexers,
            **replay,
            "grad_norm": grad_norm,
            "lr": request.lr,
            "skipped": float(is_skipped),
        }

    def _begin_update(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Set the gradients to zero, and start counting experts and replaying routes."""
        assert self.wrapped is not None
        self.host.onload("params", "grads")
        self.host.offload("optimizer")  # loading or saving a checkpoint has onloaded it
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.balance is not None:
            self.balance.begin(micro_batches)
        if self.indexer_loss is not None:
            self.indexer_loss.begin(micro_batches)
        if self.replay is not None:
            self.replay.begin()

    def _step(
        self, micro_batches: Sequence[MicroBatch], lr: float, grad_clip: float | None
    ) -> tuple[float, bool]:
        """Clip the gradients and apply them, unless they are not finite.

        Returns their norm, and True if they were skipped.
        """
        # In place of Megatron's scheduler: the driver computes the rate of every update.
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group[LR_FACTOR]
        self._check_gradients()
        # The parts of MegatronOptimizer.step (0.16.1), with the guard between norm and update.
        self.optimizer.prepare_grads()
        # Without a limit too: the norm is a metric, and shows whether the gradient is finite.
        grad_norm = clip_gradients(self.optimizer, grad_clip or float("inf"))
        is_skipped = self.guard.must_skip(grad_norm, micro_batches)
        if not is_skipped:
            self.host.onload("optimizer")
            self.optimizer.step_with_ready_grads()
            self.host.offload("optimizer")
        return grad_norm, is_skipped

    def _check_gradients(self) -> None:
        """Stop if a gradient did not get from its parameter to Megatron's buffer.

        Megatron moves each gradient in a hook of torch's accumulator, which torch replaces if a
        parameter's `data` gets another dtype or device. The parameter would then stay as it is.
        """
        lost = [
            name
            for chunk in self.wrapped or ()
            for name, parameter in chunk.named_parameters()
            if parameter.grad is not None
        ]
        assert not lost, f"{len(lost)} gradients did not reach the optimizer, {lost[0]} first"

    def run(
        self,
        micro_batches: Sequence[MicroBatch],
        finish: Finish,
        *,
        is_training: bool = False,
        gives_hidden: bool = False,
        comparisons: Sequence[tuple[DistributionComparison, ...]] = (),
    ) -> list[Values]:
        """Run Megatron's schedule over the micro-batches, with a backward pass if `is_training`.

        Args:
            micro_batches: Micro-batches of this data-parallel rank.
            finish: Function that receives the model's output on the last stage.
            is_training: Run backward passes, too.
            gives_hidden: The output is `HiddenStates` in place of logits.
            comparisons: Comparisons with other models for each micro-batch, or empty if the loss
                needs none.

        Returns:
            The values of `finish` for each micro-batch on the last stage, nothing on other stages.
        """
        self.model.train(is_training)
        fillers = self._fillers(micro_batches)
        self.host.onload("params")
        by_number = dict(enumerate(comparisons))

        def forward_step(
            numbered: Iterator[tuple[int, MicroBatch]], chunk: torch.nn.Module
        ) -> tuple[Output, Any]:
            number, micro_batch = next(numbered)
            batch = self._to_device(micro_batch, by_number.get(number, ()), is_training=is_training)
            is_filler = number >= len(micro_batches)
            if self.replay is not None and not is_filler:
                batch = self._with_routes(batch, number, micro_batch)
            output = chunk(batch.tokens, batch.packed, batch.mask, gives_hidden=gives_hidden)
            return output, functools.partial(self._loss, _ignore if is_filler else finish, batch)

        # Megatron's wrapper collects gradients, which only training passes have.
        chunks = (
            self.wrapped
            if is_training and self.wrapped is not None
            else pipeline.virtual_stages(self.model)
        )
        with torch.set_grad_enabled(is_training):
            values = pipeline.run(
                forward_step,
                chunks,
                [*micro_batches, *fillers],
                pp_size=self.position.layout.pp,
                links=self.links,
                forward_only=not is_training,
            )
        # Without the values of fillers, which follow the micro-batches.
        return values[: len(micro_batches)]

    @contextlib.contextmanager
    def widened(self) -> Iterator[None]:
        """Compute passes without gradients in float32, with the weights as they are."""
        rotary, self.rotary = (
            self.rotary,
            RotaryTables(self.shape, torch.float32, self.position.device),
        )
        try:
            with in_float32(self.model):
                yield
        finally:
            self.rotary = rotary

    def _to_device(
        self,
        micro_batch: MicroBatch,
        comparisons: tuple[DistributionComparison, ...],
        *,
        is_training: bool,
    ) -> DeviceBatch:
        position = self.position
        batch = to_device(
            micro_batch,
            self.rotary,
            position.device,
            context_groups=position.context,
            multiple=self.sequence_multiple,
            shares_prefixes=self._shares_prefixes,
            comparisons=comparisons,
            image_loader=self.image_loader,
        )
        packed = batch.packed
        if self.balance is not None and is_training:
            expert_groups = self.balance.expert_groups(micro_batch, packed)
            packed = replace(packed, expert_groups=expert_groups)
        if self.indexer_loss is not None and is_training:
            trained_tokens = self.indexer_loss.trained_tokens(micro_batch)
            packed = replace(packed, trained_tokens=trained_tokens)
        return replace(batch, packed=packed)

    def _with_routes(self, batch: DeviceBatch, number: int, micro_batch: MicroBatch) -> DeviceBatch:
        """Return the batch with the routes to record or to replay."""
        assert self.replay is not None
        routes = self.replay.routes(number, micro_batch, batch.packed)
        return replace(batch, packed=replace(batch.packed, routes=routes))

    def _fillers(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches without loss tokens that make the counts of all ranks fit.

        Ranks that share experts must run equally many micro-batches, since they communicate in
        each. Virtual pipeline stages take turns in groups of as many micro-batches as there are
        stages.
        """
        count, pp = len(micro_batches), self.position.layout.pp
        if self.shape.moe is not None and self.position.dp_size > 1:
            most = torch.tensor(count, device=self.position.device)
            dist.all_reduce(most, op=dist.ReduceOp.MAX, group=groups.dp_group())
            count = int(most.item())
        if self.num_chunks > 1:
            count = -(-count // pp) * pp
        token = int(micro_batches[0].token_ids[0]) if micro_batches else 0
        return [filler(self.sequence_multiple, token)] * (count - len(micro_batches))

    def _loss(
        self, finish: Finish, batch: DeviceBatch, output: Output
    ) -> tuple[Tensor, Tensor, Values]:
        """Return (loss, token count, values), as Megatron's schedules require.

        They do not use the count.
        """
        no_count = torch.zeros((), dtype=torch.int, device=self.position.device)
        result = finish(output, batch)
        if isinstance(result, tuple):
            return result[0], no_count, result[1]
        return torch.zeros((), device=self.position.device), no_count, result

    def by_label(
        self,
        micro_batches: Sequence[MicroBatch],
        rows: Sequence[Mapping[str, Tensor]],  # [M] by name
    ) -> dict[str, list[Floats]] | None:
        """Return the results of `run` for every label by name, 0 where the mask is not set.

        [N] per micro-batch; None except on the last stage.
        """
        if not self.position.is_last_stage:
            return None
        return {
            name: [
                spread(batch, row[name]).numpy()
                for batch, row in zip(micro_batches, rows, strict=True)
            ]
            for name in rows[0]
        }

    def mean_metrics(
        self, rows: Sequence[Mapping[str, Tensor]], num_tokens: float
    ) -> dict[str, float]:
        """Return sums over micro-batches and data-parallel ranks divided by `num_tokens`.

        All pipeline stages get them.
        """
        means: list[dict[str, float]] = [{}]
        if self.position.is_last_stage:
            names = sorted(rows[0])
            dtype = getattr(torch, self.position.platform.reduction_dtype)
            sums: list[Tensor] = []
            for name in names:
                sums.append(_sum_scalars([row[name] for row in rows], dtype))
            totals = torch.stack(sums)
            dist.all_reduce(totals, group=parallel_state.get_data_parallel_group())
            means = [dict(zip(names, (totals / num_tokens).tolist(), strict=True))]
        if self.position.layout.pp > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(means, src=last, group=groups.pp_group())
        return means[0]


def _sum_scalars(values: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack([value.float() for value in values]).to(dtype).sum()


def _ignore(output: Output, batch: DeviceBatch) -> tuple[Tensor, Values]:
    """Finish a filler: its loss and gradients are zero."""
    values = output.values if isinstance(output, HiddenStates) else output
    return values.sum() * 0.0, {}
