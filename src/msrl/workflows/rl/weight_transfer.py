"""Transfer of new weights from the training ranks to the rollout engines.

Ranks send the shards that they hold, in buckets of bounded size. Engines assemble them, tensor by
tensor, so no process holds the whole model for the transfer. Receiving and applying are separate
calls: an engine can hold received weights and apply them later.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from msrl.cluster.waiting import WorkerError
from msrl.config.sections.rollout import COLOCATED_WAYS, DEVICE_WAYS, WeightsConfig
from msrl.errors import MsrlError
from msrl.rollout.weights.channel import ChannelError, hang_up
from msrl.rollout.weights.digest import Digests
from msrl.rollout.weights.verification import check_digests
from msrl.workflows.rl.engine_group import EngineGroup
from msrl.workflows.rl.weight_offer import WeightOffer
from msrl.workflows.training.train_worker import DeviceGroup, SenderAddress, WeightContent
from msrl.workflows.training.trainer_group import TrainerGroup
from msrl.workflows.training.transport.base import Calls
from msrl.workflows.training.transport.ray_actors import RayWorkers, wait_together

_END_SENDING_S = 10.0  # for ranks to notice that an engine is lost
_MAX_UNVERIFIED = 8  # versions whose digests are kept until all engines have loaded them


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
        self._version = 0

    def update(self, version: int) -> None:
        """Load the ranks' weights into all engines and leave the devices to the engines.

        Raises:
            VerificationError: A tensor is missing, of another version or different.
        """
        self._version = version
        self._engines.load_with(self._transfer)

    def reload(self) -> None:
        """Load the ranks' present weights again, after engines were restarted."""
        self._engines.offload(discard_weights=True)
        self._trainers.onload()
        self._transfer()

    @abstractmethod
    def reconnect(self) -> None:
        """Prepare the transfer again, after ranks were restarted."""

    @abstractmethod
    def publish(self, version: int) -> None:
        """Let all engines receive a version while they generate. Their loops load it between steps.

        Raises:
            VerificationError: A tensor of an earlier version is missing or different.
        """

    @abstractmethod
    def verify_published(self) -> None:
        """Verify the published versions that engines have loaded since the last call.

        Raises:
            VerificationError: A tensor is missing or different.
        """

    @abstractmethod
    def _transfer(self) -> None:
        """Load the present version into all engines and leave the devices to them."""

    def _verify(self, sent: Sequence[Digests], received: Sequence[Sequence[Digests]]) -> None:
        if self._must_verify:
            check_digests(sent, dict(enumerate(received)))
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
        senders: Address of each sender by rank.
        config: Settings of the transfer.
        timeout_s: Longest time of a call in seconds.
        is_staged: Hold the weights in main memory until the ranks have released the devices.
        adapter_scale: Factor of adapters, if engines add them to the base weights; else None.
    """

    def __init__(
        self,
        trainers: TrainerGroup,
        engines: EngineGroup,
        senders: Mapping[int, SenderAddress],
        config: WeightsConfig,
        timeout_s: float,
        *,
        is_staged: bool,
        adapter_scale: float | None,
    ) -> None:
        super().__init__(trainers, engines, config)
        self._senders, self._timeout_s, self._is_staged = senders, timeout_s, is_staged
        self._adapter_scale = adapter_scale
        self._unverified: dict[int, Sequence[Digests]] = {}  # digests of published versions

    def reconnect(self) -> None:
        """Prepare the transfer again, after ranks were restarted."""
        self._senders = _senders(self._trainers, self._config, self._timeout_s)

    def _transfer(self) -> None:
        """Load the present version into all engines and leave the devices to them."""
        if self._is_staged:
            self.receive(self._version)
            self._trainers.offload()
            self._engines.onload(before_loading=True)
            self.apply()
        else:
            self._engines.onload(before_loading=True)
            self._run("load_weights", self._version)
            self._trainers.offload()

    def publish(self, version: int) -> None:
        """Let all engines receive a version while they generate. Their loops load it between steps.

        Raises:
            VerificationError: A tensor of an earlier version is missing or different.
        """
        self.verify_published()
        self._run("update_weights", version)
        if self._must_verify:
            self._unverified[version] = self._sent_digests

    def verify_published(self) -> None:
        """Verify the published versions that engines have loaded since the last call.

        Raises:
            VerificationError: A tensor is missing or different.
        """
        if not self._unverified:
            return
        for engine, loaded in enumerate(self._engines.workers.call("loaded_digests")):
            for version, digests in loaded.items():
                # A version that did not reach all engines is published and verified again.
                if version in self._unverified:
                    check_digests(self._unverified[version], {engine: digests})
        newest = sorted(self._unverified)[-_MAX_UNVERIFIED:]  # a loop may skip versions
        self._unverified = {version: self._unverified[version] for version in newest}

    def receive(self, version: int) -> None:
        """Let all engines receive the ranks' weights and hold them until `apply`."""
        self._run("receive_weights", version)

    def apply(self) -> None:
        """Load the weights that the engines hold."""
        received = self._engines.workers.call("apply_weights")
        self._verify(self._sent_digests, received)

    def _run(self, method: str, version: int) -> None:
        """Send a version and call this method of all engines at the same time."""
        sending, stages = self._send(version, self._content())
        offer = WeightOffer(
            version, stages, self._must_verify, self._timeout_s, self._adapter_scale
        )
        receiving = self._engines.workers.begin(method, offer)
        # The watch of the engines also sees the deaths of ranks.
        calls = [(self._engines.workers, receiving), (self._ranks, sending)]
        try:
            received, sent = wait_together(calls)
        except WorkerError:
            self._end_sending(sending, version)
            raise
        self._sent_digests = self._digests(sent)
        if method == "load_weights":
            self._verify(self._sent_digests, received)

    @abstractmethod
    def _end_sending(self, sending: Calls, version: int) -> None:
        """End the calls of ranks that wait for a lost engine."""

    def _content(self) -> WeightContent:
        """Return what the ranks send: adapters alone only if all engines have the base weights."""
        if self._adapter_scale is None:
            return "merged"
        return "adapters" if all(self._engines.workers.call("has_base")) else "separate"

    @abstractmethod
    def _send(
        self, version: int, content: WeightContent
    ) -> tuple[Calls, tuple[tuple[Any, ...], ...]]:
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

    def _send(
        self, version: int, content: WeightContent
    ) -> tuple[Calls, tuple[tuple[Any, ...], ...]]:
        arguments = (version, self._engines.workers.size, self._must_verify, content)
        calls = self._ranks.begin_each("send_weights", dict.fromkeys(self._senders, arguments))
        channels = {rank: sender.channel for rank, sender in self._senders.items()}
        return calls, self._by_stage(channels)

    def _digests(self, sent: Sequence[Any]) -> list[Digests]:
        return list(sent)

    def _end_sending(self, sending: Calls, version: int) -> None:
        # From another machine it cannot connect. The calls then end after cluster.rpc_timeout_s.
        deadline = time.monotonic() + _END_SENDING_S
        while (ranks := self._ranks.pending(sending)) and time.monotonic() < deadline:
            for rank in ranks:
                with contextlib.suppress(ChannelError):
                    hang_up(self._senders[rank].channel, version)
            time.sleep(0.1)


class RayTransfer(HostTransfer):
    """Through Ray's object store, which holds one copy of the model in buckets."""

    def _send(
        self, version: int, content: WeightContent
    ) -> tuple[Calls, tuple[tuple[Any, ...], ...]]:
        arguments = (version, self._must_verify, content)
        calls = self._ranks.begin_each("store_weights", dict.fromkeys(self._senders, arguments))
        stored = [references for references, _ in self._ranks.wait(calls)]
        return calls, self._by_stage(dict(zip(self._senders, stored, strict=True)))

    def _digests(self, sent: Sequence[Any]) -> list[Digests]:
        return [digests for _, digests in sent]

    def _end_sending(self, sending: Calls, version: int) -> None:
        pass  # the object store has the buckets; no rank waits for an engine


class DeviceTransfer(WeightTransfer):
    """Way from device to device with vLLM's weight transfer engines. Not run on a device yet.

    Args:
        trainers: Ranks that hold the weights.
        engines: Engines that load them.
        config: Settings of the transfer.
        processes_per_engine: Number of processes of an engine.
    """

    def __init__(
        self,
        trainers: TrainerGroup,
        engines: EngineGroup,
        config: WeightsConfig,
        processes_per_engine: int,
    ) -> None:
        super().__init__(trainers, engines, config)
        self._processes_per_engine = processes_per_engine
        self.reconnect()

    def reconnect(self) -> None:
        """Connect the ranks with the engines, which must hold their devices' memory."""
        (address,) = self._ranks.call_each("free_address", {0: ()})
        group = DeviceGroup(
            self._config.transfer,
            address,
            self._engines.workers.actors,
            self._processes_per_engine,
            self._config.bucket_bytes,
            is_colocated=self._config.transfer in COLOCATED_WAYS,
        )
        self._ranks.call("connect_devices", group)

    def reload(self) -> None:
        """Load the ranks' present weights again, after engines were restarted."""
        self._trainers.onload()
        self.reconnect()
        self._transfer()

    def publish(self, version: int) -> None:
        """Refuse: vLLM's engines load weights while they receive them."""
        raise MsrlError(
            f"rollout.weights.transfer={self._config.transfer}: cannot send weights to engines "
            "that generate. Set it to auto."
        )

    def verify_published(self) -> None:
        """Do nothing: no version is published."""

    def _transfer(self) -> None:
        """Load the present weights while ranks and engines hold their devices' memory."""
        engines = self._engines.workers
        self._engines.onload(before_loading=True)
        if self._must_verify:
            engines.call("begin_digests")
        sent = self._ranks.call("send_to_devices", self._must_verify)
        if self._must_verify:
            self._verify(sent, engines.call("end_digests"))
        self._trainers.offload()
        engines.call("finish_device_loading")


def connect(
    trainers: TrainerGroup,
    engines: EngineGroup,
    config: WeightsConfig,
    timeout_s: float,
    *,
    is_staged: bool,
    processes_per_engine: int,
    shares_main_memory: bool,
    shares_devices: bool,
    adapter_scale: float | None = None,
) -> WeightTransfer:
    """Return the configured way from the ranks to the engines, which have started.

    Args:
        trainers: Ranks that hold the weights.
        engines: Engines that load them.
        config: Settings of the transfer.
        timeout_s: Longest time of a call in seconds.
        is_staged: Hold weights in main memory until the ranks have released the devices.
        processes_per_engine: Number of processes of an engine.
        shares_main_memory: Whether the platform's devices use main memory.
        shares_devices: Whether engines use devices of the ranks.
        adapter_scale: Factor of adapters, if engines add them to the base weights; else None.

    Raises:
        MsrlError: The workers are not where the configured way needs them.
    """
    if config.transfer not in DEVICE_WAYS:
        return _connect_host(
            trainers, engines, config, timeout_s, is_staged=is_staged, adapter_scale=adapter_scale
        )
    if shares_main_memory:
        raise MsrlError(
            f"rollout.weights.transfer={config.transfer}: needs an accelerator. Set it to auto."
        )
    if shares_devices != (config.transfer in COLOCATED_WAYS):
        relation = "share devices" if shares_devices else "are on separate devices"
        raise MsrlError(
            f"rollout.weights.transfer={config.transfer}: ranks and engines {relation}. Set it to "
            "auto."
        )
    return DeviceTransfer(trainers, engines, config, processes_per_engine)


def _connect_host(
    trainers: TrainerGroup,
    engines: EngineGroup,
    config: WeightsConfig,
    timeout_s: float,
    *,
    is_staged: bool,
    adapter_scale: float | None,
) -> HostTransfer:
    senders = _senders(trainers, config, timeout_s)
    machines = {sender.channel.machine for sender in senders.values()}
    machines |= set(engines.workers.call("machine"))
    if config.transfer == "shared_memory" and len(machines) > 1:
        raise MsrlError(
            f"rollout.weights.transfer=shared_memory: ranks and engines are on {len(machines)} "
            "machines. Set it to ray or auto."
        )
    uses_memory = config.transfer != "ray" and len(machines) == 1
    way = SharedMemoryTransfer if uses_memory else RayTransfer
    return way(
        trainers,
        engines,
        senders,
        config,
        timeout_s,
        is_staged=is_staged,
        adapter_scale=adapter_scale,
    )


def _senders(
    trainers: TrainerGroup, config: WeightsConfig, timeout_s: float
) -> dict[int, SenderAddress]:
    """Prepare the ranks that send weights, and return their addresses by rank."""
    addresses = trainers.workers.call("connect_weights", config.bucket_bytes, timeout_s)
    return {rank: address for rank, address in enumerate(addresses) if address is not None}
