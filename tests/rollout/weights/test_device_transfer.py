"""Transfers from device to device, against the classes of the installed vLLM.

No device is needed: only the communication of NCCL and the memory handles of CUDA are replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch import Tensor

import collection_ranks
import families
import mixture_families
from families import FAMILIES
from msrl.checkpoint.source import open_weights
from msrl.models.parallel_layout import ParallelLayout
from msrl.platforms import get
from msrl.rollout.vllm_sender import DeviceSender, EngineClient, TransferGroup, weight_source
from msrl.rollout.weights.digest import file_digests
from msrl.workflows.engine import hf_weights

pytestmark = pytest.mark.slow
TENSORS = {"model.embed_tokens.weight": torch.randn(20, 4), "model.norm.weight": torch.randn(4)}
GROUP = TransferGroup(
    get("cuda").weight_engine("nccl"), 0, ("127.0.0.1", 4711), num_receivers=4, bucket_bytes=128
)
Calls = list[tuple[str, Any]]


@pytest.mark.full
@pytest.mark.parametrize(
    ("config", "layout", "world_size"),
    [
        (FAMILIES["qwen3"].config, ParallelLayout(2, 2), 4),
        (mixture_families.QWEN3_MOE, ParallelLayout(2, ep=2, etp=1), 2),
    ],
    ids=["tp 2, pp 2", "tp 2, ep 2"],
)
def test_ranks_collect_all_weights(
    tmp_path: Path, config: dict[str, Any], layout: ParallelLayout, world_size: int
) -> None:
    model = families.save_model(tmp_path, config)
    results = tmp_path / "results"
    results.mkdir()
    arguments = (world_size, str(model), layout, str(results))
    torch.multiprocessing.spawn(collection_ranks.run, arguments, nprocs=world_size)
    expected = dict(hf_weights(open_weights(model)))
    for rank in range(world_size):
        on_first, everywhere = torch.load(results / f"{rank}.pt")
        assert on_first.keys() == (expected.keys() if rank == 0 else set())
        assert everywhere.keys() == expected.keys()
        for tensors in (on_first, everywhere):
            assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())


def weights() -> Iterator[tuple[str, Tensor]]:
    yield from TENSORS.items()


def client(calls: Calls) -> EngineClient:
    """Return a client of two engines of two processes each, which records the calls."""
    return EngineClient(lambda method, arguments: calls.append((method, arguments)), 2, 2)


def test_a_broadcast_connects_all_processes_and_describes_all_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.distributed.weight_transfer import nccl_engine

    calls: Calls = []
    broadcast: list[tuple[str, Tensor]] = []
    engine = nccl_engine.NCCLTrainerWeightTransferEngine

    def record(self: Any, source: Any, meta: Any) -> None:
        broadcast.extend(self._checked_iter(source, meta))

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: info)
    monkeypatch.setattr(engine, "_broadcast", record)
    sender = DeviceSender(GROUP, client(calls), weights)
    ((method, arguments),) = calls
    assert method == "init_weight_transfer_engine"
    infos = [nccl_engine.NCCLWeightTransferInitInfo(**info) for (info,) in arguments]
    assert [info.rank_offset for info in infos] == [1, 3]
    assert {info.world_size for info in infos} == {5}
    assert {info.packed_buffer_size_bytes for info in infos} == {320}  # the largest tensor
    for _ in range(2):
        calls.clear()
        broadcast.clear()
        sender.send()
        assert [name for name, _ in calls] == [
            "start_weight_update",
            "update_weights",
            "finish_weight_update",
        ]
        first, second = (
            nccl_engine.NCCLWeightTransferUpdateInfo(**info) for (info,) in calls[1][1]
        )
        assert first == second
        assert dict(zip(first.names, first.shapes, strict=True)) == {
            name: list(tensor.shape) for name, tensor in TENSORS.items()
        }
        assert dict(broadcast) == TENSORS


def test_memory_handles_are_sent_in_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer import ipc_engine, packed_tensor

    calls: Calls = []
    device = SimpleNamespace(uuid="GPU-0")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: device)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(packed_tensor, "reduce_tensor", lambda tensor: (None, ("handle",)))
    allocate = torch.empty
    monkeypatch.setattr(
        packed_tensor.torch, "empty", lambda *size, dtype, device: allocate(*size, dtype=dtype)
    )
    group = TransferGroup(get("cuda").weight_engine("ipc"), 0, GROUP.address, 4, bucket_bytes=330)
    sender = DeviceSender(group, client(calls), weights)
    (method, ((info,), _)) = calls[0]
    assert method == "init_weight_transfer_engine"
    assert ipc_engine.IPCWeightTransferInitInfo(**info).packed
    calls.clear()
    sender.send()
    assert [name for name, _ in calls] == [
        "start_weight_update",
        "update_weights",
        "update_weights",
        "finish_weight_update",
    ]
    updates = [ipc_engine.IPCWeightTransferUpdateInfo(**call[1][0][0]) for call in calls[1:3]]
    assert [update.names for update in updates] == [[name] for name in TENSORS]


def test_a_source_of_vllm_has_the_same_weights_every_time() -> None:
    from vllm.distributed.weight_transfer.base import WeightSource

    source = weight_source(weights)
    assert isinstance(source, WeightSource)
    assert dict(source) == dict(source) == TENSORS
    assert [meta.name for meta in source.metadata()] == [*TENSORS]


def test_vllms_worker_receives_in_the_same_order_and_computes_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replace only the reading of CUDA handles by host tensors in the engine `ipc` of vLLM."""
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

    from msrl.config.sections.rollout import EngineConfig
    from msrl.rollout.engine import EngineSettings
    from msrl.rollout.vllm import VllmEngine
    from tiny_qwen2 import make_model, save_model

    save_model(tmp_path, tied=False)
    tensors = dict(make_model(tied=False, seed=1).named_parameters())
    settings = EngineSettings(
        tmp_path,
        dtype="float32",
        engine=EngineConfig(max_model_len=64, max_num_seqs=4),
        weight_backend="ipc",
    )
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(
        IPCWeightTransferEngine,
        "receive_weights",
        lambda self, info: self.model.load_weights([(name, tensors[name]) for name in info.names]),
    )
    engine = VllmEngine(settings, get("cpu"))
    try:
        engine.call_workers("init_weight_transfer_engine", {"packed": True})
        engine.call_workers("begin_digests", str(tmp_path))
        engine.call_workers("start_weight_update")
        for name, tensor in tensors.items():
            update = {
                "names": [name],
                "dtype_names": ["float32"],
                "shapes": [list(tensor.shape)],
                "ipc_handles": {},
                "tensor_sizes": [tensor.nbytes],
            }
            engine.call_workers("update_weights", update)
        engine.call_workers("finish_weight_update")
        (digests,) = engine.call_workers("end_digests")
    finally:
        engine.close()
    expected = [
        entry for name, tensor in tensors.items() for entry in file_digests(name, tensor, 0)
    ]
    assert digests == dict(expected)
