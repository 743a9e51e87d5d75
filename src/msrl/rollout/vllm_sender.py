"""Trainer's side of vLLM's weight transfer engines (`vllm.distributed.weight_transfer`).

They move weights from device to device: `ipc` on one device, `nccl` between devices, and `hccl`
between Ascend NPUs (vllm-ascend). The trainer's side of vLLM 0.28 to 0.32 is an object, and so is
that of vllm-ascend after its pull request 16960; the `nccl` of vLLM 0.23 and the `hccl` of
vllm-ascend 0.23 have static methods instead. Nothing here was run on a device.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msrl.errors import MsrlError
from msrl.platforms.base import WeightEngine

if TYPE_CHECKING:
    from torch import Tensor

Weights = Callable[[], Iterable[tuple[str, "Tensor"]]]
"""Function that returns all weights under their Hugging Face names, again for every version.

It communicates, so all ranks must call it. Iterating on ranks without the weights yields none."""


@dataclass(frozen=True, slots=True)
class TransferGroup:
    """Processes that take part in the transfer.

    Attributes:
        engine: vLLM's engine.
        rank: Number of the training rank. Rank 0 drives the transfer.
        address: Host and port of rank 0 for the rendezvous with engines.
        num_receivers: Number of the engines' processes.
        bucket_bytes: Size of a bucket; it is enlarged to the largest tensor.
    """

    engine: WeightEngine
    rank: int
    address: tuple[str, int]
    num_receivers: int
    bucket_bytes: int


class EngineClient:
    """Calls of methods of vLLM's workers in all engines (vLLM's `VLLMWeightSyncClient`).

    Args:
        call: Function of a method's name and the arguments for each engine; it waits for all.
        num_engines: Number of engines.
        processes_per_engine: Number of processes of an engine.
    """

    def __init__(
        self,
        call: Callable[[str, list[tuple[Any, ...]]], object],
        num_engines: int,
        processes_per_engine: int,
    ) -> None:
        self._call, self._num_engines = call, num_engines
        self._processes_per_engine = processes_per_engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Connect the engines, which follow each other in the communication group."""
        arguments: list[tuple[Any, ...]] = []
        for engine in range(self._num_engines):
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += engine * self._processes_per_engine
            arguments.append((info,))
        self._call("init_weight_transfer_engine", arguments)

    def start_weight_update(self) -> None:
        """Prepare the engines for new weights."""
        self._call("start_weight_update", [()] * self._num_engines)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Let the engines receive and load a bucket, or all weights."""
        self._call("update_weights", [(update_info,)] * self._num_engines)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Let the engines post-process the new weights."""
        self._call("finish_weight_update", [()] * self._num_engines)


class DeviceSender:
    """Sender of weights from devices to devices, on every training rank.

    Args:
        group: Processes that take part.
        client: Calls of the engines.
        weights: Weights of all ranks.

    Raises:
        MsrlError: The installed vLLM has no such engine for trainers.
    """

    def __init__(self, group: TransferGroup, client: EngineClient, weights: Weights) -> None:
        trainer = _class(group.engine, "TrainerWeightTransferEngine")
        self._sender: Any = (
            _StaticSender(group, client, weights)
            if trainer is None
            else trainer.trainer_init(
                _init_info(group, _largest(weights)), client=client, source=weight_source(weights)
            )
        )

    def send(self) -> None:
        """Send the current weights and wait until the engines have loaded them."""
        self._sender.send_weights()


def weight_source(weights: Weights) -> Any:
    """Return vLLM's `WeightSource` of weights."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    class CollectedWeights(WeightSource):
        """Weights that the ranks collect for every version."""

        def __init__(self) -> None:
            self._metadata: list[ParamMeta] | None = None

        def metadata(self) -> list[ParamMeta]:
            if self._metadata is None:
                self._metadata = [
                    ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights()
                ]
            return self._metadata

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(weights())

    return CollectedWeights()


def _largest(weights: Weights) -> int:
    """Return the size of the largest tensor in bytes. A tensor is never split by these engines."""
    return max((tensor.nbytes for _, tensor in weights()), default=0)


def _class(engine: WeightEngine, name: str) -> Any:
    """Return a class of an engine's module; None if the installed version has no such class."""
    return getattr(importlib.import_module(engine.module), f"{engine.prefix}{name}", None)


def _init_info(group: TransferGroup, largest: int) -> Any:
    """Return the settings of the trainer's side, as far as the engine has them."""
    settings = {
        "rank": group.rank,
        "master_address": group.address[0],
        "master_port": group.address[1],
        "world_size": 1 + group.num_receivers,
        "packed": True,
        "packed_buffer_size_bytes": max(group.bucket_bytes, largest),
    }
    settings_class = _class(group.engine, "TrainerInitInfo")
    known = {field.name for field in dataclasses.fields(settings_class)}
    return settings_class(**{name: value for name, value in settings.items() if name in known})


class _StaticSender:
    """Sender for engines of vLLM 0.23, whose trainer functions are static methods."""

    def __init__(self, group: TransferGroup, client: EngineClient, weights: Weights) -> None:
        self._engine: Any = _class(group.engine, "WeightTransferEngine")
        self._arguments: Any = _class(group.engine, "TrainerSendWeightsArgs")
        if not hasattr(self._engine, "trainer_init"):
            raise MsrlError(
                f"rollout.weights.transfer={group.engine.name}: needs vLLM 0.28 or later. Set it "
                "to auto."
            )
        self._group, self._client, self._weights = group, client, weights
        described = [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), tensor.nbytes)
            for name, tensor in weights()
        ]
        self._geometry = {
            "packed": True,
            "packed_buffer_size_bytes": max([group.bucket_bytes, *[row[3] for row in described]]),
            "packed_num_buffers": 2,
        }
        self._metadata = {
            "names": [row[0] for row in described],
            "dtype_names": [row[1] for row in described],
            "shapes": [row[2] for row in described],
        }
        self._communicator = self._connect() if group.rank == 0 else None

    def _connect(self) -> Any:
        host, port = self._group.address
        info = {
            "master_address": host,
            "master_port": port,
            "world_size": 1 + self._group.num_receivers,
        }
        # Engines and rank 0 wait for each other in the rendezvous, so neither call can come first.
        with ThreadPoolExecutor(max_workers=1) as executor:
            connecting = executor.submit(
                self._client.init_weight_transfer_engine, {**info, "rank_offset": 1}
            )
            communicator = self._engine.trainer_init(info)
            connecting.result()
        return communicator

    def send_weights(self) -> None:
        """Broadcast the weights while the engines receive them."""
        if self._communicator is None:
            # All ranks collect the weights together, though only rank 0 sends them.
            for _ in self._weights():
                pass
            return
        arguments = self._arguments(group=self._communicator, **self._geometry)
        update = {**self._metadata, **self._geometry}
        self._client.start_weight_update()
        with ThreadPoolExecutor(max_workers=1) as executor:
            # It returns once the engines have received what the broadcast below sends.
            receiving = executor.submit(self._client.update_weights, update)
            self._engine.trainer_send_weights(
                iterator=iter(self._weights()), trainer_args=arguments
            )
            receiving.result()
        self._client.finish_weight_update()
