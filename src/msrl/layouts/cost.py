"""Predicted seconds of an optimizer update, from the sizes of a model and the profile of a device.

- A product with weights takes its FLOPs at the reached peak plus the time to read its weights.
- Causal attention takes its FLOPs at the peak that its kernels reach; 2.5 times as long backward,
  since the kernels compute scores again (arXiv:2307.08691, section 3.1).
- All other operations move the bytes that layers save: 2 times forward and 3 times backward.
- A pass of a layer takes at least the time in which the host starts its kernels, or takes it in
  addition where the host computes itself.
- With a measured profile, speeds of products, attention and collectives depend on their sizes.
- A collective takes the bytes that a rank receives over the bandwidth of its links or of the
  network, whichever takes longer. Ranks are ordered as Megatron orders them: tensor, context and
  data parallel ranks, then pipeline stages; or ranks of an expert, expert parallel ranks, copies.
- Hidden behind computation are: in the backward pass, what Megatron's linear layers overlap with
  gradients; keys and values that travel around a ring; and, where the platform overlaps them, the
  reduction of gradients and the last backward pass.
- Stages work as in Megatron's schedules (arXiv:2104.04473, section 2): m micro-batches take m times
  the slowest stage, and the others once, divided by the number of virtual stages.

Embeddings, norms of gradients across ranks, images and stragglers are not counted. Experts get
equal numbers of tokens, and all sequences have the mean length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import add
from typing import NamedTuple

from msrl.config.sections.train import TrainConfig
from msrl.layouts.profile import Profile, Rows, interpolate, interpolate_rows
from msrl.memory.activations import LayerBytes, Pass, Spread, layer_bytes, saved_bytes
from msrl.memory.communication import sent_bytes
from msrl.memory.estimate import gradient_bytes, passes_in_flight
from msrl.memory.flops import attention_flops, head_weights, layer_weights
from msrl.models.parallel_layout import ParallelLayout
from msrl.models.shape import DeltaNet, Layer, Moe, Shape
from msrl.plan.derived import layout_from

_FP32_BYTES = 4
# Kernels of a pass of a layer (`trainer/model`): norms, rotary embedding, products, experts.
KERNELS, _MIXTURE_KERNELS = 40, 100
BACKWARD_KERNELS = 1.5
_MOVED_FORWARD, _MOVED_BACKWARD = 2, 3  # times the saved bytes
_ATTENTION_BACKWARD = 2.5
_BYTES_PER_LOGIT = 12  # written once, and read and written in float32 by the softmax
# Bytes per parameter that AdamW moves: gradient, moments and master weight, and the new weight.
_OPTIMIZER_BYTES = 4 + 2 * 12 + 2


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean lengths in tokens.

    A row is what a micro-batch is made of, a sequence what attends to itself: rows of packed data
    have several. `note` says where the lengths are from.
    """

    row: float
    sequence: float
    trained_share: float  # of the tokens that have a loss
    note: str


class Times(NamedTuple):
    """Seconds of a pass by part."""

    products: float = 0.0
    attention: float = 0.0
    other: float = 0.0  # operations that move memory
    host: float = 0.0
    tensor: float = 0.0  # communication by group
    context: float = 0.0
    expert: float = 0.0

    def plus(self, other: Times) -> Times:
        return Times(*map(add, self, other))

    def scaled(self, factor: float) -> Times:
        return Times(*(x * factor for x in self))


class LayerTimes(NamedTuple):
    """Times of a layer: forward pass by block, and backward pass; and the bytes that it saves."""

    mixer: Times
    feed_forward: Times
    backward: Times
    saved: LayerBytes  # for the backward pass, without recomputation


class StageTimes(NamedTuple):
    """Times of a micro-batch in a stage; `again` is what the backward pass computes again."""

    forward: Times
    backward: Times
    again: Times

    def plus(self, other: StageTimes) -> StageTimes:
        return StageTimes(*(x.plus(y) for x, y in zip(self, other, strict=True)))


Stage = tuple[tuple[int, ...], ...]  # numbers of the kinds of layers, by virtual stage


class Group(NamedTuple):
    """Ranks that communicate: their number, and the distance between two of them."""

    size: int
    stride: int


class Sizes(NamedTuple):
    """Values that determine the time of a layer: a micro-batch, and the ranks that share it."""

    batch: Pass
    spread: Spread
    ep: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of an update by part, of the slowest stage, with what reasons refer to."""

    parts: Mapping[str, float]
    num_micro_batches: int
    tokens: float  # of an update

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Job:
    """What all layouts of a search have in common.

    `world_size` ranks are on machines with `devices_per_node` devices.
    """

    shape: Shape
    profile: Profile
    lengths: Lengths
    dtype: str
    logits_bytes: int
    world_size: int
    devices_per_node: int
    rows: int  # of an update
    overlaps: bool  # whether the reduction of gradients overlaps with the backward pass
    is_queued: bool  # whether the host starts kernels while the device computes
    num_frozen: int = 0  # models of the same shape that are not trained, on the same ranks

    @property
    def element_bytes(self) -> int:
        return 2 if self.dtype == "bfloat16" else _FP32_BYTES


class CostModel:
    """Predictions for the layouts of a job. Times of layers are computed once per size."""

    def __init__(self, job: Job) -> None:
        self._job, profile, self._speeds = job, job.profile, job.profile.speeds
        share, peak = profile.efficiency, profile.flops(job.dtype)
        self._products = peak * share.products.value
        self._experts = peak * share.experts.value
        self._attention = peak * share.attention.value
        self._memory = profile.memory_bytes_per_s.value * share.memory.value
        self._links, self._network = profile.reached_links, profile.reached_network
        # AdamW's moments, and master weights of bfloat16 ones (`memory/states.py`).
        self._state_bytes = 12 if job.dtype == "bfloat16" else 8
        linked = profile.linked_devices
        self._num_linked = job.devices_per_node if linked is None else int(linked.value)
        self._kinds = list(dict.fromkeys(job.shape.layers))
        numbers = {kind: number for number, kind in enumerate(self._kinds)}
        self._kind_numbers = [numbers[layer] for layer in job.shape.layers]
        self._layers: dict[Sizes, list[LayerTimes]] = {}
        self._stage_kinds: dict[ParallelLayout, list[Stage]] = {}
        self._held: dict[ParallelLayout, list[tuple[float, float]]] = {}

    # Communication

    def _near(self, group: Group) -> int:
        """Return the number of ranks of a group that have fast links to each other."""
        return min(group.size, max(self._num_linked // group.stride, 1))

    def _measured(self, rows: Rows | None, group: Group, size: float) -> float | None:
        """Return the measured seconds of a collective of linked ranks; None without them."""
        if rows is None or self._near(group) < group.size:
            return None
        seconds = size / interpolate_rows(rows, group.size, size)
        return max(seconds, self._job.profile.collective_s.value)

    def _gather(self, group: Group, size: float) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `size` bytes in total."""
        if group.size == 1 or not size:
            return 0.0
        measured = self._measured(self._speeds and self._speeds.gather, group, size)
        if measured is not None:
            return measured
        near = self._near(group)
        num_islands = group.size / near
        inside = size * (near - 1) / near / self._links
        across = size * (1 - 1 / num_islands) / near / self._network
        return self._job.profile.collective_s.value + max(inside, across)

    def _exchange(self, group: Group, size: float) -> float:
        """Return the seconds of an all-to-all in which every rank has `size` bytes."""
        if group.size == 1 or not size:
            return 0.0
        measured = self._measured(self._speeds and self._speeds.exchange, group, size)
        if measured is not None:
            return measured
        near = self._near(group)
        inside = size * (near - 1) / group.size / self._links
        across = size * (group.size - near) / group.size / self._network
        return self._job.profile.collective_s.value + max(inside, across)

    def _send(self, group: Group, size: float) -> float:
        """Return the seconds in which every rank sends `size` bytes to the next one."""
        if group.size == 1 or not size:
            return 0.0
        measured = self._measured(self._speeds and self._speeds.send, group, size)
        if measured is not None:
            return measured
        is_near = group.size * group.stride <= self._num_linked
        bandwidth = self._links if is_near else self._network
        return self._job.profile.collective_s.value + size / bandwidth

    # Layers

    def _layer_times(self, sizes: Sizes) -> list[LayerTimes]:
        """Return the times of every kind of layer."""
        if sizes not in self._layers:
            self._layers[sizes] = [self._layer(layer, sizes) for layer in self._kinds]
        return self._layers[sizes]

    def _layer(self, layer: Layer, sizes: Sizes) -> LayerTimes:
        shape, (batch, spread, _) = self._job.shape, sizes
        saved = layer_bytes(shape, layer, batch, spread)
        mixer, mixer_back = self._mixer(layer, sizes)
        block, block_back = self._feed_forward(layer, sizes)
        moved = saved.input + saved.attention + saved.core
        forward = [
            times.plus(Times(other=_MOVED_FORWARD * size / self._memory))
            for times, size in ((mixer, moved), (block, saved.feed_forward))
        ]
        other = _MOVED_BACKWARD * saved.total / self._memory
        backward = mixer_back.plus(block_back).plus(Times(other=other))
        is_mixture = isinstance(layer.feed_forward, Moe)
        start = (_MIXTURE_KERNELS if is_mixture else KERNELS) * self._job.profile.kernel_s.value
        waiting, waiting_back = start, BACKWARD_KERNELS * start
        if self._job.is_queued:
            waiting = max(waiting - sum(forward[0]) - sum(forward[1]), 0.0)
            waiting_back = max(waiting_back - sum(backward), 0.0)
        return LayerTimes(
            forward[0],
            forward[1].plus(Times(host=waiting)),
            backward.plus(Times(host=waiting_back)),
            saved,
        )

    def _product(
        self, tokens: float, weights: float, held: float, rate: float, matrices: float = 2
    ) -> float:
        """Return the seconds of products of `tokens` with `weights` elements of `held` ones.

        Measured speeds are those of square matrices with as many elements as one of `matrices`.
        """
        speeds = self._speeds and self._speeds.products_of(self._job.dtype)
        if speeds is not None:
            width = math.sqrt(held / matrices)
            rate = interpolate_rows(speeds, tokens * weights / held, width)
            return 2 * tokens * weights / rate
        return 2 * tokens * weights / rate + held * self._job.element_bytes / self._memory

    def _weight_gradient(self, held: float) -> float:
        """Return the seconds in which gradients of `held` weights are added in float32."""
        return held * (self._job.element_bytes + 2 * _FP32_BYTES) / self._memory

    def _mixer(self, layer: Layer, sizes: Sizes) -> tuple[Times, Times]:
        """Return the forward and backward times of attention with its projections."""
        job, (batch, spread, _) = self._job, sizes
        tokens = batch.num_tokens / spread.cp
        weights = layer_weights(job.shape, layer).mixer / spread.tp
        products = self._product(tokens, weights, weights, self._products)
        flops = attention_flops(layer.mixer, [batch.longest]) / batch.longest
        rate = self._attention
        if self._speeds is not None:
            rate = interpolate(self._speeds.attention, batch.longest)
        attention = flops * tokens / spread.tp / rate
        forward, backward = self._context(layer, sizes)
        if spread.ring_size > 1:
            forward = max(forward - attention, 0.0)
            backward = max(backward - _ATTENTION_BACKWARD * attention, 0.0)
        gather = self._activations(sizes)
        back = 2 * products + self._weight_gradient(weights)
        return (
            Times(products, attention, tensor=2 * gather, context=forward),
            Times(
                back,
                _ATTENTION_BACKWARD * attention,
                tensor=_exposed(gather, back, spread),
                context=backward,
            ),
        )

    def _activations(self, sizes: Sizes) -> float:
        """Return the seconds to gather the activations of tensor-parallel ranks."""
        batch, spread, _ = sizes
        size = batch.num_tokens / spread.cp * self._job.shape.hidden_size * batch.element_bytes
        return self._gather(Group(spread.tp, 1), size)

    def _context(self, layer: Layer, sizes: Sizes) -> tuple[float, float]:
        """Return the forward and backward seconds of communication of context parallelism."""
        batch, spread, _ = sizes
        if spread.cp == 1:
            return 0.0, 0.0
        group = Group(spread.cp, spread.tp)
        if isinstance(layer.mixer, DeltaNet):  # tokens for heads, and back
            channels = 2 * (layer.mixer.key_channels + layer.mixer.value_channels) / spread.tp
            size = batch.num_tokens / spread.cp * channels * batch.element_bytes
            return self._exchange(group, size), self._exchange(group, size)
        sent = sent_bytes(layer.mixer, batch, spread)
        return self._send(group, sent.forward), self._send(group, sent.backward)

    def _feed_forward(self, layer: Layer, sizes: Sizes) -> tuple[Times, Times]:
        """Return the forward and backward times of a feed-forward block."""
        job, (batch, spread, ep) = self._job, sizes
        tokens, weights = batch.num_tokens / spread.cp, layer_weights(job.shape, layer)
        held = weights.feed_forward / spread.tp
        products = self._product(tokens, held, held, self._products)
        back = 2 * products + self._weight_gradient(held)
        block = layer.feed_forward
        if not isinstance(block, Moe):
            gather = self._activations(sizes)
            return (
                Times(products, tensor=2 * gather),
                Times(back, tensor=_exposed(gather, back, spread)),
            )
        held = self._held_experts(block, spread.etp, ep)
        matrices = 2 * block.num_experts / ep
        experts = self._product(tokens, weights.experts / spread.tp, held, self._experts, matrices)
        routed = tokens / spread.tp * block.experts_per_token
        size = routed * job.shape.hidden_size * batch.element_bytes
        exchange = 2 * self._exchange(Group(ep, spread.etp), size)
        gather = 2 * self._gather(Group(spread.etp, 1), size * spread.etp)
        if block.shared_ffn_hidden_size:
            gather += 2 * self._activations(sizes)
        back += 2 * experts + self._weight_gradient(held)
        return (
            Times(products + experts, tensor=gather, expert=exchange),
            Times(back, tensor=gather, expert=exchange),
        )

    def _held_experts(self, block: Moe, etp: int, ep: int) -> float:
        """Return the number of weights of a rank's experts in a layer."""
        size = 3 * self._job.shape.hidden_size * block.ffn_hidden_size
        return block.num_experts * size / (ep * etp)

    # Stages

    def _stages(self, layout: ParallelLayout) -> list[Stage]:
        """Return the kinds of the layers of every virtual stage of every stage."""
        if layout not in self._stage_kinds:
            self._stage_kinds[layout] = [
                tuple(
                    tuple(self._kind_numbers[number] for number in chunk if number is not None)
                    for chunk in layout.chunks(self._job.shape.num_layers, stage)
                )
                for stage in range(layout.pp)
            ]
        return self._stage_kinds[layout]

    def _stage(self, chunks: Stage, layers: list[LayerTimes], train: TrainConfig) -> StageTimes:
        """Return the times of the layers of a stage."""
        forward, backward, again = Times(), Times(), Times()
        is_block = train.recompute.granularity == "full" and train.recompute.method == "block"
        for kinds in chunks:
            for kind in set(kinds):
                count, times = kinds.count(kind), layers[kind]
                both = times.mixer.plus(times.feed_forward)
                forward = forward.plus(both.scaled(count))
                backward = backward.plus(times.backward.scaled(count))
                repeated = kinds[: train.recompute.layers].count(kind) if is_block else count
                again = again.plus(self._recomputed(kind, times, train).scaled(repeated))
        return StageTimes(forward, backward, again)

    def _recomputed(self, kind: int, times: LayerTimes, train: TrainConfig) -> Times:
        """Return the times of what the backward pass computes again of a layer."""
        recompute, again = train.recompute, Times()
        if recompute.granularity == "full":
            return times.mixer.plus(times.feed_forward)
        if recompute.granularity == "selective":
            is_mixture = isinstance(self._kinds[kind].feed_forward, Moe)
            if "core_attn" in recompute.modules:
                again = Times(attention=times.mixer.attention)
            if ("moe" if is_mixture else "mlp") in recompute.modules:
                again = again.plus(times.feed_forward)
        return again

    def _head(self, sizes: Sizes, train: TrainConfig) -> StageTimes:
        """Return the times of the output layer."""
        job, (batch, spread, _) = self._job, sizes
        weights = head_weights(job.shape) / spread.tp
        trained = batch.num_trained / spread.cp
        rate = self._products * batch.element_bytes / batch.head_bytes
        products = self._product(trained, weights, weights, rate, matrices=1)
        logits = trained * job.shape.num_outputs / spread.tp
        forward = Times(products, other=_BYTES_PER_LOGIT * logits / self._memory)
        backward = Times(
            2 * products + self._weight_gradient(weights),
            other=_BYTES_PER_LOGIT * logits / self._memory,
        )
        return StageTimes(forward, backward, Times() if train.chunk is None else forward)

    # Updates

    def batches(self, train: TrainConfig) -> tuple[int, int]:
        """Return the micro-batches of an update on a rank, and the tokens of one."""
        job, parallel = self._job, train.parallel
        dp = job.world_size // (parallel.tp * parallel.pp * parallel.cp)
        rows = job.rows / dp
        limit, per_pass = train.max_tokens_per_micro_batch, float(train.micro_batch)
        if limit is not None:
            per_pass = max(limit // job.lengths.row, 1)
        count = max(math.ceil(rows / per_pass), 1)
        return count, max(round(rows * job.lengths.row / count), 1)

    def sizes(self, train: TrainConfig, tokens: int) -> Sizes:
        """Return the sizes of a micro-batch of `tokens` tokens."""
        job, parallel, layout = self._job, train.parallel, layout_from(train.parallel)
        longest = max(min(round(job.lengths.sequence), tokens), 1)
        batch = Pass(
            num_tokens=tokens,
            num_trained=math.ceil(tokens * job.lengths.trained_share),
            longest=longest,
            is_packed=tokens > longest,
            element_bytes=job.element_bytes,
            logits_bytes=job.logits_bytes,
        )
        spread = Spread(
            parallel.tp,
            layout.etp_size,
            parallel.cp,
            parallel.sp or job.shape.moe is not None,
            gathers_keys=parallel.cp > 1 and parallel.cp_algo == "allgather",
            head_ranks=parallel.num_head_ranks,
        )
        return Sizes(batch, spread, layout.num_expert_groups)

    def update(self, train: TrainConfig) -> Prediction:
        """Return the predicted seconds of an optimizer update."""
        job, layout = self._job, layout_from(train.parallel)
        count, tokens = self.batches(train)
        sizes = self.sizes(train, tokens)
        layers, kinds = self._layer_times(sizes), self._stages(layout)
        times = {own: self._stage(own, layers, train) for own in set(kinds)}
        stages = [times[own] for own in kinds]
        stages[-1] = stages[-1].plus(self._head(sizes, train))
        transfer = self._transfer(sizes, layout, len(kinds[0]))
        seconds = [sum(map(sum, stage)) + transfer for stage in stages]
        slowest = max(range(layout.pp), key=seconds.__getitem__)
        forward, backward, again = stages[slowest]
        once = forward.plus(backward).scaled(count)
        parts = {
            "matrix products": once.products,
            "attention": once.attention,
            "other operations": once.other,
            "host": once.host + self._fixed(count),
            "recomputation": sum(again) * count,
            "TP communication": once.tensor,
            "CP communication": once.context,
            "EP communication": once.expert,
            "PP communication": transfer * count,
            "pipeline bubbles": (sum(seconds) - seconds[slowest]) / len(kinds[0]),
        }
        parts |= self._after(train, layout, sum(backward))
        return Prediction(parts, count, job.rows * job.lengths.row)

    def forward_s(self, train: TrainConfig) -> float:
        """Return the predicted seconds of a pass without gradients over the rows of an update."""
        layout, (count, tokens) = layout_from(train.parallel), self.batches(train)
        sizes = self.sizes(train, tokens)
        layers, kinds = self._layer_times(sizes), self._stages(layout)
        transfer = self._transfer(sizes, layout, len(kinds[0])) / 2
        seconds = [sum(self._stage(own, layers, train).forward) + transfer for own in kinds]
        seconds[-1] += sum(self._head(sizes, train).forward)
        bubbles = (sum(seconds) - max(seconds)) / len(kinds[0])
        return count * max(seconds) + bubbles + self._fixed(count)

    def _fixed(self, num_micro_batches: int) -> float:
        """Return the measured seconds of an update beside layers, optimizer and communication."""
        per_pass, per_update = self._job.profile.pass_s, self._job.profile.update_s
        seconds = 0.0 if per_pass is None else num_micro_batches * per_pass.value
        return seconds + (0.0 if per_update is None else per_update.value)

    def _transfer(self, sizes: Sizes, layout: ParallelLayout, num_virtual: int) -> float:
        """Return the seconds in which a stage sends activations and gradients of a micro-batch."""
        batch, spread, _ = sizes
        rows = batch.num_tokens / spread.cp / (spread.tp if spread.sp else 1)
        size = rows * self._job.shape.hidden_size * batch.element_bytes
        group = Group(layout.pp, self._job.world_size // layout.pp)
        return 2 * num_virtual * self._send(group, size)

    def _held_weights(self, layout: ParallelLayout) -> list[tuple[float, float]]:
        """Return the weights of a rank of every stage: those without experts, those of experts."""
        if layout not in self._held:
            shape, etp, ep = self._job.shape, layout.etp_size, layout.num_expert_groups
            vocabulary, last = shape.vocab_size * shape.hidden_size, layout.pp - 1
            held = self._held[layout] = list[tuple[float, float]]()
            for stage, own in enumerate(self._stages(layout)):
                layers = [self._kinds[kind] for chunk in own for kind in chunk]
                dense = sum(sum(layer_weights(shape, layer)[:2]) for layer in layers)
                is_tied = shape.tie_word_embeddings and layout.pp == 1
                dense += vocabulary * ((stage == 0) + (stage == last and not is_tied))
                blocks = [x.feed_forward for x in layers if isinstance(x.feed_forward, Moe)]
                experts = sum(self._held_experts(block, etp, ep) for block in blocks)
                held.append((dense / layout.tp, experts))
        return self._held[layout]

    def _copies(self, layout: ParallelLayout) -> tuple[Group, Group]:
        """Return the ranks with equal weights, and those with equal experts."""
        ranks, shard = self._job.world_size // layout.pp, layout.etp_size * layout.num_expert_groups
        copies = Group(ranks // layout.tp, layout.tp)
        return copies, Group(max(ranks // shard, 1), shard)

    def least_bytes(self, train: TrainConfig, *, saved: bool = True) -> float:
        """Return a lower bound of the memory of the fullest rank, which takes no time to compute.

        It covers states and, with `saved`, activations, of the first two stages: the first one
        holds most micro-batches, but may have layers without experts.
        """
        layout = layout_from(train.parallel)
        return max(
            self._least_states(train, layout, stage)
            + (self._least_activations(train, layout, stage) if saved else 0.0)
            for stage in range(min(layout.pp, 2))
        )

    def _least_states(self, train: TrainConfig, layout: ParallelLayout, stage: int) -> float:
        states, held = 0.0, self._held_weights(layout)[stage]
        for group, size in zip(self._copies(layout), held, strict=True):
            states += size * self._job.element_bytes * (1 + self._job.num_frozen)
            if train.lora.rank is None and not train.freeze:
                optimizer = 0 if train.offload.optimizer else self._state_bytes / group.size
                states += size * (_FP32_BYTES + optimizer)
        return states

    def _least_activations(self, train: TrainConfig, layout: ParallelLayout, stage: int) -> float:
        num_batches, tokens = self.batches(train)
        layers, saved, working = self._layer_times(self.sizes(train, tokens)), 0.0, 0
        kinds = [kind for chunk in self._stages(layout)[stage] for kind in chunk]
        for kind in set(kinds):
            is_mixture, layer = isinstance(self._kinds[kind].feed_forward, Moe), layers[kind].saved
            size, again = saved_bytes([layer], train.recompute, (is_mixture,))
            working = max(working, again + gradient_bytes([layer]))
            if train.recompute.granularity == "full":  # at most so many layers share an input
                size /= train.recompute.layers
            saved += kinds.count(kind) * size
        counts = passes_in_flight(layout, self._job.shape, stage, num_batches)
        return saved * counts[0] / counts[1] + working

    def _after(
        self, train: TrainConfig, layout: ParallelLayout, backward: float
    ) -> dict[str, float]:
        """Return the seconds after the passes: gradients and weights of copies, optimizer."""
        if train.lora.rank is not None:
            return {"DP communication": 0.0, "optimizer": 0.0}  # of adapters: little
        job = self._job
        sizes = zip(*self._held_weights(layout), strict=True)
        held = list(zip(self._copies(layout), map(max, sizes), strict=True))
        reduced = sum(self._gather(group, size * _FP32_BYTES) for group, size in held)
        gathered = sum(self._gather(group, size * job.element_bytes) for group, size in held)
        if job.overlaps:
            reduced = max(reduced - backward, 0.0)
        sharded = sum(size / group.size for group, size in held)
        read = _FP32_BYTES * sum(size for _, size in held)  # for the norm of the gradients
        optimizer = (_OPTIMIZER_BYTES * sharded + read) / self._memory
        if train.offload.optimizer:
            host = job.profile.host_bytes_per_s.value
            optimizer += 2 * self._state_bytes * sharded / host
        return {"DP communication": reduced + gathered, "optimizer": optimizer}


def _exposed(gather: float, products: float, spread: Spread) -> float:
    """Return the seconds of tensor-parallel communication that a backward pass waits for.

    A column-parallel layer gathers its input and scatters the gradient of it while it computes. A
    row-parallel layer gathers its gradient first, which only sequence parallelism needs.
    """
    return max(2 * gather - products, 0.0) + (gather if spread.sp else 0.0)
