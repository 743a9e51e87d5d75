"""Transfer of new weights from the training ranks to the rollout engines.

Ranks send the shards that they hold, in buckets of bounded size. Engines assemble them, tensor by
tensor, so no process holds the whole model for the transfer. Receiving and applying are separate
calls: an engine can hold received weights and apply them later.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from msrl.config.sections.rollout import COLOCATED_WAYS, DEVICE_WAYS, WeightsConfig
from msrl.errors import MsrlError
from msrl.rollout.weights.digest import Digests
from msrl.rollout.weights.verification import check_digests
from msrl.workflows.rl.engine_group import EngineGroup
from msrl.workflows.rl.weight_offer import WeightOffer
from msrl.workflows.training.train_worker import DeviceGroup, SenderAddress
from msrl.workflows.training.trainer_group import TrainerGroup
from msrl.workflows.training.transport.base import Calls
from msrl.workflows.training.transport.ray_actors import RayWorkers, wait_together


class WeightTransfer(ABC):
    """Way of weights from all training ranks to all engines.

    Args:
        trainers: Ranks that hold the weights.
        engines: Engines that load them.
        config: Settings of the transfer.
    """

    def __init__(self, trainers: TrainerGroup, engines: EngineGroup, config: WeightsConfig) -> None:
        self._trainers, self._engines, self._config = trainers, engines, config
        self._must_verify = config.verify != "never"

    @abstractmethod
    def update(self, version: int) -> None:
        """Load the ranks' weights into all engines and leave the devices to the engines.

        Raises:
            VerificationError: A tensor is missing, of another version or different.
        """

    def _verify(self, sent: Sequence[Digests], received: Sequence[Sequence[Digests]]) -> None:
        if self._must_verify:
            check_digests(sent, received)
            self._must_verify = self._config.verify == "every"

    @property
    def _ranks(self) -> RayWorkers:
        ranks = self._trainers.workers
        assert isinstance(ranks, RayWorkers)
        return ranks


class HostTransfer(WeightTransfer):
    """Way through main memory.

    Args:
        trainers: Ranks that hold the weights.
        engines: Engines that load them.
        config: Settings of the transfer.
        senders: Address of each sender by rank.
        timeout_s: Longest time to wait for a sender, in seconds.
        is_staged: Hold the weights in main memory until the ranks have released the devices.
    """

    def __init__(
        self,
        trainers: TrainerGroup,
        engines: EngineGroup,
        config: WeightsConfig,
        senders: Mapping[int, SenderAddress],
        timeout_s: float,
        *,
        is_staged: bool,
    ) -> None:
        super().__init__(trainers, engines, config)
        self._senders, self._timeout_s, self._is_staged = senders, timeout_s, is_staged
        self._sent_digests: list[Digests] = []

    def update(self, version: int) -> None:
        """Load the ranks' weights into all engines and leave the devices to the engines."""
        if self._is_staged:
            self.receive(version)
            self._trainers.offload()
            self._engines.onload()
            self.apply()
        else:
            self._engines.onload()
            received = self._run("load_weights", version)
            self._verify(self._sent_digests, received)
            self._trainers.offload()

    def receive(self, version: int) -> None:
        """Let all engines receive the ranks' weights and hold them until `apply`."""
        self._run("receive_weights", version)

    def apply(self) -> None:
        """Load the weights that the engines hold."""
        self._verify(self._sent_digests, self._engines.workers.call("apply_weights"))

    def _run(self, method: str, version: int) -> list[Any]:
        """Send a version and call this method of all engines at the same time."""
        sending, stages = self._send(version)
        offer = WeightOffer(version, stages, self._must_verify, self._timeout_s)
        receiving = self._engines.workers.begin(method, offer)
        sent, received = wait_together([(self._ranks, sending), (self._engines.workers, receiving)])
        self._sent_digests = self._digests(sent)
        return received

    @abstractmethod
    def _send(self, version: int) -> tuple[Calls, tuple[tuple[Any, ...], ...]]:
        """Begin to send a version; return the calls and what engines receive it from, by stage."""

    @abstractmethod
    def _digests(self, sent: Sequence[Any]) -> list[Digests]:
        """Return the digests in the results of the calls that sent a version."""

    def _by_stage(self, values: Mapping[int, Any]) -> tuple[tuple[Any, ...], ...]:
        """Group values of senders by pipeline stage."""
        stages: dict[int, list[Any]] = {}
        for rank, sender in self._senders.items():
            stages.setdefault(sender.stage, []).append(values[rank])
        return tuple(tuple(stages[stage]) for stage in sorted(stages))


class SharedMemoryTransfer(HostTransfer):
    """Through memory that the processes of one machine share: two buckets per sender."""

    def _send(self, version: int) -> tuple[Calls, tuple[tuple[Any, ...], ...]]:
        arguments = (version, self._engines.workers.size, self._must_verify)
        calls = self._ranks.begin_each("send_weights", dict.fromkeys(self._senders, arguments))
        channels = {rank: sender.channel for rank, sender in self._senders.items()}
        return calls, self._by_stage(channels)

    def _digests(self, sent: Sequence[Any]) -> list[Digests]:
        return list(sent)


class RayTransfer(HostTransfer):
    """Through Ray's object store, which holds one copy of the model in buckets."""

    def _send(self, version: int) -> tuple[Calls, tuple[tuple[Any, ...], ...]]:
        arguments = (version, self._must_verify)
        calls = self._ranks.begin_each("store_weights", dict.fromkeys(self._senders, arguments))
        stored = [references for references, _ in self._ranks.wait(calls)]
        return calls, self._by_stage(dict(zip(self._senders, stored, strict=True)))

    def _digests(self, sent: Sequence[Any]) -> list[Digests]:
        return [digests for _, digests in sent]


class DeviceTransfer(WeightTransfer):
    """From device to device with vLLM's weight transfer engines. Not run on a device yet."""

    def update(self, version: int) -> None:
        """Load the ranks' weights into all engines, while both hold their devices' memory."""
        engines = self._engines.workers
        self._engines.onload()
        if self._must_verify:
            engines.call("begin_digests")
        sent = self._ranks.call("send_to_devices", self._must_verify)
        self._engines.forget_prompts()
        if self._must_verify:
            self._verify(sent, engines.call("end_digests"))
        self._trainers.offload()


def connect(
    trainers: TrainerGroup,
    engines: EngineGroup,
    config: WeightsConfig,
    timeout_s: float,
    *,
    processes_per_engine: int,
    shares_main_memory: bool,
    shares_devices: bool,
) -> WeightTransfer:
    """Return the configured way from the ranks to the engines, which have started.

    Args:
        trainers: Ranks that hold the weights.
        engines: Engines that load them.
        config: Settings of the transfer.
        timeout_s: Longest time of a call in seconds.
        processes_per_engine: Number of processes of an engine.
        shares_main_memory: Whether the platform's devices use main memory.
        shares_devices: Whether engines use devices of the ranks.

    Raises:
        MsrlError: The workers are not where the configured way needs them.
    """
    if config.transfer in DEVICE_WAYS:
        if shares_main_memory:
            raise MsrlError(
                f"rollout.weights.transfer={config.transfer}: needs an accelerator. Set it to auto."
            )
        if shares_devices != (config.transfer in COLOCATED_WAYS):
            relation = "share devices" if shares_devices else "are on separate devices"
            raise MsrlError(
                f"rollout.weights.transfer={config.transfer}: ranks and engines {relation}. Set it "
                "to auto."
            )
        return _connect_devices(trainers, engines, config, processes_per_engine)
    return _connect_host(trainers, engines, config, timeout_s, is_staged=not shares_main_memory)


def _connect_devices(
    trainers: TrainerGroup, engines: EngineGroup, config: WeightsConfig, processes_per_engine: int
) -> DeviceTransfer:
    (address,) = trainers.workers.call_each("free_address", {0: ()})
    group = DeviceGroup(
        config.transfer,
        address,
        engines.workers.actors,
        processes_per_engine,
        config.bucket_bytes,
        is_colocated=config.transfer in COLOCATED_WAYS,
    )
    trainers.workers.call("connect_devices", group)
    return DeviceTransfer(trainers, engines, config)


def _connect_host(
    trainers: TrainerGroup,
    engines: EngineGroup,
    config: WeightsConfig,
    timeout_s: float,
    *,
    is_staged: bool,
) -> HostTransfer:
    addresses = trainers.workers.call("connect_weights", config.bucket_bytes, timeout_s)
    senders = {rank: address for rank, address in enumerate(addresses) if address is not None}
    machines = {sender.channel.machine for sender in senders.values()}
    machines |= set(engines.workers.call("machine"))
    if config.transfer == "shared_memory" and len(machines) > 1:
        raise MsrlError(
            f"rollout.weights.transfer=shared_memory: ranks and engines are on {len(machines)} "
            "machines. Set it to ray or auto."
        )
    uses_memory = config.transfer != "ray" and len(machines) == 1
    way = SharedMemoryTransfer if uses_memory else RayTransfer
    return way(trainers, engines, config, senders, timeout_s, is_staged=is_staged)
