"""Verification of weights that engines load while they generate, with stand-ins for workers."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from fake_workers import FakeWorkers
from msrl.cluster.waiting import WorkerError
from msrl.config.sections.rollout import WeightsConfig
from msrl.errors import VerificationError
from msrl.rollout.weights.digest import TensorDigest
from msrl.workflows.rl.weight_offer import WeightOffer
from msrl.workflows.rl.weight_transfer import HostTransfer
from msrl.workflows.training.transport.base import Calls
from support import mentions


def digests(version: int, *, is_corrupted: bool = False) -> Mapping[str, TensorDigest]:
    return {"head.weight": TensorDigest("float32", (2, 2), version + 100 * is_corrupted)}


class LoadingEngines(FakeWorkers):
    """Two engines that load what they receive. Engine 1 is lost in the calls `losses`."""

    def __init__(self, losses: tuple[int, ...] = (), corrupted: int | None = None) -> None:
        super().__init__(2)
        self.losses, self.corrupted, self.num_updates = losses, corrupted, 0
        self.loaded: list[dict[int, Any]] = [{}, {}]

    def update_weights(self, engine: int, offer: WeightOffer) -> None:
        self.num_updates += engine == 1
        if engine == 1 and self.num_updates in self.losses:
            raise WorkerError("rollout engine 1 failed", ["rollout engine 1"])
        is_corrupted = (engine, offer.version) == (1, self.corrupted)
        self.loaded[engine][offer.version] = [digests(offer.version, is_corrupted=is_corrupted)]

    def loaded_digests(self, engine: int) -> dict[int, Any]:
        loaded, self.loaded[engine] = self.loaded[engine], {}
        return loaded


class LocalTransfer(HostTransfer):
    """Transfer of versions whose digests have the version as value."""

    def __init__(self, engines: LoadingEngines) -> None:
        trainers: Any = None
        group: Any = SimpleNamespace(workers=engines)
        config = WeightsConfig(verify="every")
        super().__init__(trainers, group, {}, config, 1.0, is_staged=False, adapter_scale=None)

    def _run(self, method: str, version: int) -> None:
        self._engines.workers.call(method, WeightOffer(version, (), True, 1.0))
        self._sent_digests = [digests(version)]

    def _transfer(self) -> None:
        raise NotImplementedError

    def _end_sending(self, sending: Calls, version: int) -> None:
        raise NotImplementedError

    def _send(self, version: int, content: Any) -> Any:
        raise NotImplementedError

    def _digests(self, sent: Any) -> Any:
        raise NotImplementedError


def test_every_version_is_verified_and_the_last_one_at_the_end() -> None:
    transfer = LocalTransfer(LoadingEngines())
    for version in range(1, 12):
        transfer.publish(version)
    transfer.verify_published()


@pytest.mark.parametrize("is_last", [False, True])
def test_a_corrupted_version_is_named_by_the_next_one_or_at_the_end(is_last: bool) -> None:
    transfer = LocalTransfer(LoadingEngines(corrupted=3))
    for version in range(1, 4):
        transfer.publish(version)
    with pytest.raises(VerificationError, match=mentions("head.weight", "rollout engine 1")):
        if is_last:
            transfer.verify_published()
        transfer.publish(4)


def test_a_version_that_one_engine_did_not_receive_is_published_again() -> None:
    transfer = LocalTransfer(LoadingEngines(losses=(2,)))
    transfer.publish(1)
    with pytest.raises(WorkerError):
        transfer.publish(2)
    for version in (2, 3):
        transfer.publish(version)
    transfer.verify_published()
