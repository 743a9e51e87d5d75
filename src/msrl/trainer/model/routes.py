"""Routing replay: passes reuse the experts that an earlier pass chose for each token.

The earlier pass is the trainer's for old log-probabilities, which is recorded here, or those of the
engine that sampled the tokens, which `msrl.rollout` records. The routes of an engine lack the last
token of a sequence, which keeps the router's own choice: it predicts nothing, and no token attends
to it, so no loss of a sampled token depends on it.

Only the choice is replayed. The weights of the experts are computed from the current logits, so
gradients still reach the router (arXiv:2507.18071, section 5.3).

Megatron has such a facility too (`RouterReplay` of megatron-core 0.16.1, in
transformer/moe/router_replay.py). It is not used here: it hooks into Megatron's own top-k, which
`experts.py` replaces, and it keeps the choices by the order of the passes. Here they belong to
sequences and travel with the packed micro-batch. Micro-batches may then differ between the passes,
pipeline stages may interleave them, and a recomputed layer gets the same choices.

Letters: T tokens of a sequence, N tokens of a micro-batch, n of them on this rank, L mixture layers
of the model, l of them on this rank, k experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from msrl.models.shape import Moe
from msrl.trainer import groups
from msrl.trainer.model.packed import PackedSequences, TokenRoutes
from msrl.types import MicroBatch, Routes, StageRoutes

_DTYPES = {1: torch.uint8, 2: torch.int16}  # of the numbers of experts, by their bytes


class RecordedRoutes:
    """Record of the experts that the routers choose."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.experts = dict[int, Tensor]()  # [n, k] by layer
        self._dtype = dtype

    def choose(self, layer: int, experts: Tensor) -> Tensor:
        """Return the router's own choice. See `TokenRoutes.choose`."""
        self.experts[layer] = experts.to(self._dtype)
        return experts

    def offload(self) -> None:
        """Move the recorded experts to the host."""
        self.experts = {layer: experts.cpu() for layer, experts in self.experts.items()}


class ReplayedRoutes:
    """Experts that replace the choice of the routers, where there are any."""

    def __init__(
        self,
        experts: Tensor,  # [n, L, k]
        is_token: Tensor,  # [n] bool, False for padding and for tokens without routes
        counts: Tensor,  # [2] int64: choices that differ, and all choices
    ) -> None:
        self._experts, self._is_token, self._counts = experts, is_token, counts

    def choose(self, layer: int, experts: Tensor) -> Tensor:
        """Return the replayed experts and count those that differ. See `TokenRoutes.choose`."""
        replayed = self._experts[:, layer].to(experts.dtype)
        replayed = torch.where(self._is_token[:, None], replayed, experts)
        # Only updates count. Without gradients this is another pass, or the first pass of a
        # recomputed layer, whose second pass counts.
        if torch.is_grad_enabled():
            num_different = differs(experts, replayed).sum()
            self._counts += torch.stack((num_different, self._is_token.sum()))
        return replayed


def differs(experts: Tensor, replayed: Tensor) -> Tensor:  # [n, k], [n, k] -> [n] bool
    """Return which tokens have different sets of experts."""
    return (experts.sort(-1).values != replayed.sort(-1).values).any(-1)


def token_positions(num_tokens: int, packed: PackedSequences, device: torch.device) -> Tensor:
    """Return the position in the micro-batch of each token that a router of this rank sees, [n].

    It is -1 for padding of context parallelism. Mixtures of experts train under sequence
    parallelism, so tensor-parallel ranks share the tokens, too.
    """
    context = packed.context
    rows = torch.arange(num_tokens, device=device) if context is None else context.rows
    group = groups.tp_group()
    return rows.chunk(group.size())[group.rank()]


class RouteRecording:
    """Recording of one pass over the micro-batches of a data-parallel rank."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype, self._device = dtype, device
        # For each micro-batch: positions [n] of the tokens, and one record per virtual stage.
        self._positions = dict[int, Tensor]()
        self._records = dict[int, list[RecordedRoutes]]()
        self._last: RecordedRoutes | None = None

    def add(self, number: int, batch: MicroBatch, packed: PackedSequences) -> RecordedRoutes:
        """Return the record of a micro-batch that a virtual stage is about to run."""
        if self._last is not None:
            self._last.offload()
        self._last = RecordedRoutes(self._dtype)
        self._positions[number] = token_positions(len(batch.token_ids), packed, self._device)
        self._records.setdefault(number, []).append(self._last)
        return self._last

    def gather(self, batches: Sequence[MicroBatch]) -> StageRoutes | None:
        """Return the routes of all tokens. All ranks that share the micro-batches must call it.

        None on ranks whose routes another rank returns, and on stages without mixture layers.
        """
        if self._last is not None:  # virtual stages of one micro-batch are joined on the host
            self._last.offload()
        rows = [self._experts(number) for number in range(len(batches))]
        layers = tuple(sorted(rows[0])) if rows else ()
        if not layers:
            return None
        gathered: list[Routes] = []
        for number, (batch, experts) in enumerate(zip(batches, rows, strict=True)):
            own = torch.stack([experts[layer] for layer in layers], 1)  # [n, l, k]
            gathered.append(self._gather(own, self._positions[number], len(batch.token_ids)))
        is_first = dist.get_rank(_token_group()) == 0
        return StageRoutes(layers, tuple(gathered)) if is_first else None

    def _experts(self, number: int) -> dict[int, Tensor]:
        """Return the experts of a micro-batch by layer."""
        experts = dict[int, Tensor]()
        for record in self._records[number]:
            experts |= record.experts
        return experts

    def _gather(self, own: Tensor, positions: Tensor, num_tokens: int) -> Routes:  # [N, l, k]
        """Return the experts of all tokens of a micro-batch on the host."""
        is_token = positions >= 0
        if dist.get_world_size(_token_group()) == 1:
            return own.cpu().numpy()
        # Every token is on one rank. Backends sum int32, but not every smaller type.
        everywhere = torch.zeros(
            (num_tokens, *own.shape[1:]), dtype=torch.int32, device=self._device
        )
        everywhere[positions[is_token]] = own.to(self._device)[is_token].int()
        dist.all_reduce(everywhere, group=_token_group())
        return everywhere.to(self._dtype).cpu().numpy()


class RoutingReplay:
    """Recording and replay of the routes of a model on this rank."""

    def __init__(self, moe: Moe, device: torch.device) -> None:
        self._dtype, self._device = _DTYPES[moe.expert_number_bytes], device
        self._recording: RouteRecording | None = None
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)

    @contextmanager
    def record(self) -> Iterator[RouteRecording]:
        """Record the routes of the pass in this context."""
        self._recording = RouteRecording(self._dtype, self._device)
        try:
            yield self._recording
        finally:
            self._recording = None

    def routes(self, number: int, batch: MicroBatch, packed: PackedSequences) -> TokenRoutes | None:
        """Return the routes for the routers of a micro-batch; None lets them choose.

        All passes over a micro-batch with routes replay them.
        """
        if self._recording is not None:
            return self._recording.add(number, batch, packed)
        if batch.routes is None:
            return None
        positions = token_positions(len(batch.token_ids), packed, self._device)
        num_real = len(batch.token_ids) - batch.num_padding
        is_token = (positions >= 0) & (positions < num_real)
        rows = positions.clamp(min=0).cpu().numpy()
        if batch.is_routed is not None:
            is_token &= torch.from_numpy(batch.is_routed[rows]).to(self._device)
        experts = torch.from_numpy(batch.routes[rows]).to(self._device)
        return ReplayedRoutes(experts, is_token, self._counts)

    def begin(self) -> None:
        """Begin an update."""
        self._counts.zero_()

    def end(self) -> dict[str, float]:
        """Return the metrics of the update. All ranks must call it and get the same.

        `router_disagreement` is the share of the choices, one per token and mixture layer, in which
        the router's own differs from the replayed one.
        """
        dist.all_reduce(self._counts)
        num_different, num_choices = self._counts.tolist()
        return {"router_disagreement": num_different / max(num_choices, 1)}


def _token_group() -> dist.ProcessGroup:
    """Return the ranks that share the tokens of a micro-batch."""
    return cast("dist.ProcessGroup", parallel_state.get_tensor_and_context_parallel_group())
