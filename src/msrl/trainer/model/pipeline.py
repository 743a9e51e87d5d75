"""Pipelines of virtual stages: module of a rank's stages, and communication between ranks.

Megatron's communicator sends activations and gradients through one process group. With two pipeline
stages both directions connect the same pair of ranks, and messages are matched by their order
alone: shapes and tensors of the two directions are confused, and gradients are silently wrong. Here
each direction has its own group.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from msrl.types import MicroBatch

_NUM_DIMENSIONS = 3  # [tokens, 1, hidden]


class VirtualStages(torch.nn.Module):
    """Virtual stages of a rank as one module.

    The names of their parameters begin with `model0.`, `model1.`, ...
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        super().__init__()
        for number, model in enumerate(models):
            self.add_module(f"model{number}", model)


def virtual_stages(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the virtual stages of a rank's model; a list of the model itself if it has none."""
    return list(model.children()) if isinstance(model, VirtualStages) else [model]


class EmptyLayer(torch.nn.Module):
    """Empty position of the pipeline, which returns its input."""

    def __init__(self, config: TransformerConfig, layer_number: int = 1, **_: object) -> None:
        super().__init__()
        self.config, self.layer_number = config, layer_number

    def forward(
        self, hidden_states: Tensor, context: Tensor | None = None, **_: object
    ) -> tuple[Tensor, Tensor | None]:
        # A copy: the schedule frees the output of a stage once it is sent, and stores the input
        # for the backward pass.
        return hidden_states.clone(), context


@dataclass(frozen=True, slots=True)
class _Lane:
    """Direction of a pipeline: process group, target rank and source rank of this rank."""

    group: dist.ProcessGroup
    target: int
    source: int


class Links(P2PCommunicator):
    """Communication of a rank with its neighbors in a pipeline of virtual stages, which is a ring.

    All ranks must create it together.

    A rank waits for what it receives and never for what it sent: after its last forward pass it
    sends without receiving, while its neighbor has begun the backward passes.
    """

    def __init__(self, config: TransformerConfig, device: torch.device, timeout_s: float) -> None:
        super().__init__(
            cast("dist.ProcessGroup", parallel_state.get_pipeline_model_parallel_group()), config
        )
        self._device = device
        next_rank, previous = cast("int", self.next_rank), cast("int", self.prev_rank)
        forward, backward = _groups(self.pp_group, datetime.timedelta(seconds=timeout_s))
        self._lanes = (_Lane(forward, next_rank, previous), _Lane(backward, previous, next_rank))
        self._sent: list[tuple[Any, Tensor]] = []  # in flight; keeps the tensors alive

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        **_: object,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Send to and receive from both neighbors.

        Shapes are exchanged first, since micro-batches differ in length.

        Overrides P2PCommunicator._communicate of megatron-core.
        """
        self._sent = [
            (request, tensor) for request, tensor in self._sent if not request.is_completed()
        ]
        sent = [
            None if tensor is None else tensor.detach().contiguous()
            for tensor in (tensor_send_next, tensor_send_prev)
        ]
        shapes = [
            self._shape(torch.empty(_NUM_DIMENSIONS)) if must_receive else None
            for must_receive in (recv_prev, recv_next)
        ]
        pending: list[list[Any]] = []
        for lane, tensor, shape in zip(self._lanes, sent, shapes, strict=True):
            sent_shape = None if tensor is None else self._shape(torch.tensor(tensor.shape))
            pending.append(self._post(lane, sent_shape, shape))
        received: list[Tensor | None] = []
        for i, (lane, shape) in enumerate(zip(self._lanes, shapes, strict=True)):
            _wait(pending[i])
            buffer = None
            if shape is not None:
                buffer = torch.empty(
                    shape.tolist(), device=self._device, dtype=self.config.pipeline_dtype
                )
            pending[i] = self._post(lane, sent[i], buffer)
            received.append(buffer)
        for requests in pending:
            _wait(requests)
        return _require_grad(received[0]), _require_grad(received[1]), None

    def _shape(self, sizes: Tensor) -> Tensor:
        return sizes.to(self._device, torch.int64)

    def _post(self, lane: _Lane, out: Tensor | None, buffer: Tensor | None) -> list[Any]:
        """Begin to send `out` and to receive into `buffer`; return the requests of the latter."""
        operations: list[dist.P2POp] = []
        if out is not None:
            operations.append(dist.P2POp(dist.isend, out, lane.target, lane.group))
        if buffer is not None:
            operations.append(dist.P2POp(dist.irecv, buffer, lane.source, lane.group))
        requests: list[Any] = dist.batch_isend_irecv(operations) if operations else []
        if out is not None:
            self._sent.append((requests[0], out))
        return requests[-1:] if buffer is not None else []

    def flush(self) -> None:
        """Wait until everything that was sent has arrived."""
        _wait([request for request, _ in self._sent])
        self._sent.clear()


def _wait(requests: Sequence[Any]) -> None:
    for request in requests:
        request.wait()


def _require_grad(tensor: Tensor | None) -> Tensor | None:
    """Make a received tensor require a gradient, as the schedules expect."""
    return None if tensor is None else tensor.requires_grad_()


def _groups(
    pipeline: dist.ProcessGroup, timeout: datetime.timedelta
) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Create two more groups of the ranks of each pipeline; return this rank's."""
    own_ranks = dist.get_process_group_ranks(pipeline)
    pipelines: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pipelines, own_ranks)
    own: list[dist.ProcessGroup] = []
    for ranks in sorted({tuple(ranks) for ranks in pipelines}):
        for _ in range(2):
            group = dist.new_group(list(ranks), timeout=timeout)
            if list(ranks) == own_ranks:
                own.append(cast("dist.ProcessGroup", group))
    return own[0], own[1]


def _schedule_groups() -> ProcessGroupCollection:
    """Return the process groups that a schedule with a custom communicator needs.

    They are those that Megatron looks up by default.
    """
    collection: Any = ProcessGroupCollection()
    collection.tp = parallel_state.get_tensor_model_parallel_group()
    collection.cp = parallel_state.get_context_parallel_group()
    collection.pp = parallel_state.get_pipeline_model_parallel_group()
    collection.embd = parallel_state.get_embedding_group(check_initialized=False)
    collection.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    collection.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    return collection


def run(
    forward_step: Callable[[Iterator[Any], torch.nn.Module], tuple[Any, Any]],
    models: Sequence[torch.nn.Module],
    batches: Sequence[MicroBatch],
    *,
    pp_size: int,
    links: Links | None,
    forward_only: bool,
) -> list[Any]:
    """Run Megatron's schedule over the numbered micro-batches.

    Returns the values of each on the last stage.
    """
    numbered = list(enumerate(batches))
    own = {"p2p_communicator": links, "pg_collection": _schedule_groups()} if links else {}
    schedule: Any = get_forward_backward_func(pp_size, len(models) if len(models) > 1 else None)
    values = schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(numbered) for _ in models] if len(models) > 1 else iter(numbered),
        model=list(models),
        num_microbatches=len(numbered),
        seq_length=max(len(batch.token_ids) for batch in batches),
        micro_batch_size=1,
        forward_only=forward_only,
        **own,
    )
    if links:
        links.flush()
    return values
