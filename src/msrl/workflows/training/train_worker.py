"""Training rank as a worker: the methods that a `TrainerGroup` calls.

Torch and Megatron are imported in methods, so that the driver can import this module without them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msrl.platforms import get
from msrl.processes.interpreter import no_collections
from msrl.rollout.weights.channel import ChannelAddress
from msrl.rollout.weights.digest import Digests
from msrl.trainer.checkpointing.resume import Retention, SavedTraining
from msrl.trainer.launch import quiet_megatron, skip_wandb
from msrl.trainer.objective.requests import RankValues, TokenRequest, UpdateRequest
from msrl.trainer.settings import RankSettings, resumed_settings
from msrl.types import MicroBatch
from msrl.workflows.training.shared_images import Files, with_files

if TYPE_CHECKING:
    from torch import Tensor

    from msrl.cluster.rendezvous import Rendezvous
    from msrl.models.stages import StageTensor
    from msrl.rollout.vllm_sender import DeviceSender
    from msrl.rollout.weights.sender import Factor, WeightSender

WeightContent = Literal["merged", "separate", "adapters"]
"""Weights with their adapters, weights and adapters, or adapters alone."""


@dataclass(frozen=True, slots=True)
class WorkerPosition:
    """Position of a rank in the parallel layout.

    The reporter of a data-parallel rank is the first tensor-parallel rank of the last pipeline
    stage. The number of tokens of every micro-batch must be a multiple of `sequence_multiple`, for
    all models of the rank.
    """

    dp_rank: int
    is_reporter: bool
    sequence_multiple: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Settings for saving checkpoints."""

    root: Path  # folder of the checkpoints
    hf_dir: Path  # folder with config and tokenizer
    in_background: bool  # write checkpoints while training continues


@dataclass(frozen=True, slots=True)
class SenderAddress:
    """Pipeline stage of a rank that sends weights, and the address of its channel."""

    stage: int
    channel: ChannelAddress


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Engines that receive weights on their devices.

    Attributes:
        backend: Name of vLLM's weight transfer engine.
        address: Host and port for the rendezvous of rank 0 with the engines.
        engines: Ray actors of the engines.
        processes_per_engine: Number of processes of an engine.
        bucket_bytes: Size of a bucket.
        is_colocated: Whether the engines use the devices of the ranks.
    """

    backend: str
    address: str
    engines: tuple[Any, ...]
    processes_per_engine: int
    bucket_bytes: int
    is_colocated: bool


class TrainWorker:
    """Worker of one training rank."""

    _sender: WeightSender
    _device_sender: DeviceSender
    _profiler: AbstractContextManager[Any] | None = None

    def __init__(self, settings: RankSettings, rank: int, world_size: int) -> None:
        self._settings, self._rank, self._world_size = settings, rank, world_size

    def start(
        self, init_method: str, resume: SavedTraining | None, saves: SavePlan
    ) -> tuple[WorkerPosition, dict[str, Any]]:
        """Join the other ranks and load the models.

        Returns:
            The rank's position, and the workflow's state in the checkpoint.
        """
        with no_collections():
            from msrl.trainer.checkpointing import state as checkpoints
            from msrl.trainer.checkpointing.saver import Saver
            from msrl.trainer.rank import TrainingRank

        settings = self._settings
        if resume is not None:
            settings = resumed_settings(settings, resume.root, resume.step)
        self._training_rank = TrainingRank(settings, self._rank, self._world_size, init_method)
        extra = checkpoints.load_training_state(self._training_rank, resume) if resume else {}
        self._saver = Saver(
            self._training_rank, saves.root, saves.hf_dir, in_background=saves.in_background
        )
        position = self._training_rank.position
        is_reporter = position.is_last_stage and position.tp_rank == 0
        multiple = self._training_rank.sequence_multiple
        return WorkerPosition(position.dp_rank, is_reporter, multiple), extra

    # Requests

    def forward(
        self,
        micro_batches: Sequence[MicroBatch],
        request: TokenRequest,
        files: Files | None = None,
    ) -> RankValues:
        """Return values of every label from one pass of a model.

        `files` are those of images, if the micro-batches do not have them.
        """
        with self._training_rank.model(request.model) as model:
            return model.forward(with_files(micro_batches, files), request)

    def update(
        self,
        micro_batches: Sequence[MicroBatch],
        request: UpdateRequest,
        files: Files | None = None,
    ) -> dict[str, float]:
        """Update a model once; return the mean metrics. Pending saves are completed if it fails."""
        from msrl.trainer.guard import GradientError

        try:
            return self._training_rank.update(with_files(micro_batches, files), request)
        except GradientError:
            self._saver.end()
            raise

    # Weights and memory

    def connect_weights(self, bucket_bytes: int, timeout_s: float) -> SenderAddress | None:
        """Prepare the transfer of weights to the engines; return the address of this sender.

        None if another rank sends all weights of this rank.
        """
        from msrl.rollout.weights.sender import WeightSender
        from msrl.trainer.weights import sends_weights

        if not sends_weights(self._training_rank.policy):
            return None
        self._sender = WeightSender(bucket_bytes, timeout_s)
        return SenderAddress(self._training_rank.position.pp_rank, self._sender.address)

    def send_weights(
        self, version: int, num_receivers: int, verify: bool, content: WeightContent = "merged"
    ) -> Digests:
        """Send the weights of this rank through shared memory.

        Returns:
            The parts of the weights' digests that they contribute, if requested.
        """
        shards, factors = self._sent_weights(content)
        return self._sender.send(shards, version, num_receivers, verify=verify, factors=factors)

    def _sent_weights(
        self, content: WeightContent
    ) -> tuple[Iterator[tuple[StageTensor, Tensor]], Iterator[Factor]]:
        """Return the shards of weights and of adapters that this rank sends."""
        from msrl.trainer.weights import adapter_factors, base_shards, local_shards

        policy = self._training_rank.policy
        if content == "merged":
            return local_shards(policy), iter(())
        shards = base_shards(policy) if content == "separate" else iter(())
        return shards, adapter_factors(policy)

    def store_weights(
        self, version: int, verify: bool, content: WeightContent = "merged"
    ) -> tuple[list[Any], Digests]:
        """Copy the weights of this rank to Ray's object store.

        Returns:
            References to the buckets, and the parts of the weights' digests.
        """
        import ray

        shards, factors = self._sent_weights(content)
        return self._sender.store(shards, version, ray.put, verify=verify, factors=factors)

    def connect_devices(self, group: DeviceGroup) -> None:
        """Connect vLLM's weight transfer engines with this rank; all ranks must call it."""
        from msrl.rollout.vllm_sender import DeviceSender, EngineClient, TransferGroup

        host = group.address.rpartition(":")
        platform = self._training_rank.policy.position.platform
        self._device_sender = DeviceSender(
            TransferGroup(
                platform.weight_engine(group.backend),
                self._rank,
                (host[0], int(host[2])),
                len(group.engines) * group.processes_per_engine,
                group.bucket_bytes,
            ),
            EngineClient(
                partial(_call_engines, group.engines),
                len(group.engines),
                group.processes_per_engine,
            ),
            partial(self._collect, everywhere=group.is_colocated),
        )

    def send_to_devices(self, verify: bool) -> Digests:
        """Send the weights with vLLM's engines; return this rank's part of the digests."""
        from msrl.rollout.weights.sender import digest_parts
        from msrl.trainer.weights import local_shards

        self._device_sender.send()
        return digest_parts(local_shards(self._training_rank.policy)) if verify else {}

    def _collect(self, *, everywhere: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights on rank 0 or everywhere; all ranks must call it."""
        from msrl.rollout.weights.collection import ShardedModel, collect
        from msrl.trainer.weights import local_shards

        policy = self._training_rank.policy
        position = policy.position
        model = ShardedModel(policy.shape, position.layout, position.dtype, position.device)
        return collect(model, local_shards(policy), everywhere=everywhere)

    def offload(self) -> None:
        """Release the device's memory of what `train.offload` names."""
        self._training_rank.offload()

    def onload(self) -> None:
        """Take the device's memory of the parameters again."""
        self._training_rank.onload()

    # Profiles

    def begin_profile(self, folder: Path, ranks: Sequence[int]) -> None:
        """Begin a trace if this rank is one of `ranks`, or if `ranks` is empty."""
        if ranks and self._rank not in ranks:
            return
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"rank_{self._rank:05d}"
        self._profiler = get(self._settings.platform).profiler(trace)
        self._profiler.__enter__()

    def end_profile(self) -> None:
        """Write the trace, if there is one."""
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            get(self._settings.platform).synchronize()
            profiler.__exit__(None, None, None)

    # Checkpoints

    def save(
        self, step: int, extra: Mapping[str, Any], retention: Retention
    ) -> list[SavedTraining]:
        """Save a checkpoint, or begin to; return the saves completed since the last call."""
        self._saver.save(step, extra, retention)
        return self._saver.finished_saves()

    def finished_saves(self) -> list[SavedTraining]:
        """Return the saves that were completed since the last call."""
        return self._saver.finished_saves()

    def finish_saves(self) -> list[SavedTraining]:
        """Wait for a pending save and return the saves that were completed since the last call."""
        return self._saver.finished_saves(must_wait=True)

    def close(self) -> None:
        """Release the models and leave the process groups."""
        self._training_rank.close()


def _call_engines(
    engines: Sequence[Any], method: str, arguments: Sequence[tuple[Any, ...]]
) -> None:
    """Call a method of vLLM's workers in all engines and wait."""
    import ray

    ray.get(
        [
            engine.call_vllm.remote(method, *own_arguments)
            for engine, own_arguments in zip(engines, arguments, strict=True)
        ]
    )


class TrainActor(TrainWorker):
    """Ray actor of one training rank."""

    _rendezvous: Rendezvous | None = None

    def rendezvous(self, ports: Sequence[int], on_one_machine: bool) -> str:
        """Return the rendezvous of the ranks: a file on one machine, else one of these ports.

        Rank 0 reserves the port until all ranks have joined.
        """
        from msrl.cluster.rendezvous import Rendezvous, file_rendezvous

        self._ports = ports
        if on_one_machine:
            return file_rendezvous()
        self._rendezvous = Rendezvous(ports)
        return self._rendezvous.init_method

    def free_address(self) -> str:
        """Return host and port for the rendezvous of rank 0 with the engines."""
        from msrl.cluster.rendezvous import Rendezvous

        rendezvous = Rendezvous(self._ports)
        rendezvous.close()
        return rendezvous.init_method.removeprefix("tcp://")

    def start(
        self, init_method: str, resume: SavedTraining | None, saves: SavePlan
    ) -> tuple[WorkerPosition, dict[str, Any]]:
        """Prepare the process, then join the other ranks and load the models."""
        # A job manager may signal all processes of a job. Only the driver decides when ranks stop.
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        skip_wandb()
        with no_collections():
            get(self._settings.platform).prepare()
        quiet_megatron()
        started = super().start(init_method, resume, saves)
        if self._rendezvous is not None:
            self._rendezvous.close()
        return started
