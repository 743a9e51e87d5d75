"""The adapter's calls against the signatures of vLLM 0.23 and vllm-ascend 0.23, and later ones.

No NPU is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import families
from msrl.config.sections.rollout import EngineConfig
from msrl.errors import MsrlError
from msrl.models.families import load_shape
from msrl.platforms import get
from msrl.rollout.engine import EngineMetrics, EngineSettings
from msrl.rollout.engine_arguments import engine_arguments
from msrl.rollout.routed_requests import RoutedRequests
from msrl.rollout.sleep import EngineMemory
from msrl.rollout.vllm import VllmEngine
from msrl.rollout.vllm_sender import DeviceSender, EngineClient, TransferGroup
from msrl.rollout.vllm_weights import WeightReceiver
from msrl.types import Prompt, SamplingParams
from support import mentions
from vllm_ascend_signatures import (
    FIELDS,
    FUNCTIONS,
    LATER,
    LATER_FIELDS,
    fields,
    parameters,
    read_fields,
    read_parameters,
    recorder,
)

NPU = get("npu")
HCCL = "vllm_ascend.distributed.weight_transfer.hccl_engine"
TENSORS = {"model.embed_tokens.weight": torch.zeros(20, 4), "model.norm.weight": torch.zeros(4)}


def _recorded_class(name: str, calls: list[tuple[str, Any]], results: dict[str, Any]) -> Any:
    """Return an object with the recorded methods of a class."""
    names = [each for each in map(str, _all_functions()) if each.startswith(f"{name}.")]
    methods = {each.rpartition(".")[2]: each for each in names}
    return SimpleNamespace(
        **{key: recorder(calls, each, results.get(key)) for key, each in methods.items()}
    )


def _all_functions() -> Iterator[str]:
    for functions in FUNCTIONS.values():
        yield from functions


def test_recorded_signatures_are_those_of_the_wheels():
    folder = os.environ.get("MSRL_ASCEND_WHEELS")
    if folder is None:
        pytest.skip("MSRL_ASCEND_WHEELS names no folder with unpacked wheels of version 0.23")
    root = Path(folder)
    for path, functions in FUNCTIONS.items():
        for name, expected in functions.items():
            assert read_parameters(root, path, name) == expected, name
    for path, classes in FIELDS.items():
        for name in classes:
            assert fields(name) <= read_fields(root, path, name), name


def test_weights_are_sent_with_the_object_of_a_later_vllm_ascend(monkeypatch: pytest.MonkeyPatch):
    """After 0.23, the trainer's side is an object, and `start_weight_update` has no argument."""
    calls: list[tuple[str, Any]] = []

    def call_worker(method: str, arguments: list[tuple[Any, ...]]) -> None:
        name = f"NPUWorker.{method}"
        for own_arguments in arguments:
            recorder(calls, name, signature=LATER.get(name))(*own_arguments)

    info_class = dataclasses.make_dataclass(
        "HCCLTrainerInitInfo", LATER_FIELDS["HCCLTrainerInitInfo"].split()[:-1]
    )
    trainer = "HCCLTrainerWeightTransferEngine.trainer_init"
    sender = SimpleNamespace(send_weights=lambda: calls.append(("send_weights", {})))
    module = SimpleNamespace(
        HCCLTrainerInitInfo=info_class,
        HCCLTrainerWeightTransferEngine=SimpleNamespace(
            trainer_init=recorder(calls, trainer, sender, LATER[trainer])
        ),
    )
    monkeypatch.setitem(sys.modules, HCCL, module)
    base = SimpleNamespace(ParamMeta=lambda *values: values, WeightSource=object)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    group = TransferGroup(NPU.weight_engine("nccl"), 0, ("10.0.0.1", 4711), 4, bucket_bytes=128)
    client = EngineClient(call_worker, 2, 2)
    DeviceSender(group, client, _weights).send()
    ((_, arguments), last) = calls
    assert dataclasses.asdict(arguments["init_info"]) == {
        "rank": 0,
        "master_address": "10.0.0.1",
        "master_port": 4711,
        "world_size": 5,
        "packed": True,
        "packed_buffer_size_bytes": 320,
    }
    assert arguments["client"] is client and dict(arguments["source"]) == TENSORS
    assert last == ("send_weights", {})
    client.start_weight_update()
    assert calls[2:] == [("start_weight_update", {})] * 2


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_wakes_with_calls_of_the_recorded_signatures(level: int):
    calls: list[tuple[str, Any]] = []
    memory = EngineMemory(_recorded_class("LLM", calls, {}), level)
    memory.release(discard_weights=True)
    memory.take(before_loading=True)
    memory.finish_loading()
    assert calls == [
        ("collective_rpc", {"method": "keep_parameters"}),
        ("sleep", {"level": level}),
        ("wake_up", {"tags": ["weights"]}),
        ("collective_rpc", {"method": "restore_parameters"}),
        ("wake_up", {"tags": ["kv_cache"]}),
    ]


class Experts(nn.Module):
    """Fused experts in the layout of vllm-ascend's kernels: transposed after loading."""

    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.arange(24.0).view(2, 3, 4))
        self.w2_weight = nn.Parameter(torch.arange(12.0).view(2, 2, 3))


class Worker(WeightReceiver):
    """Stand-in of NPUWorker whose `wake_up` replaces the experts' weights by transposed views."""

    def __init__(self, model: nn.Module) -> None:
        self.model_runner = SimpleNamespace(get_model=lambda: model)

    def wake_up(self) -> None:
        for module in self.model_runner.get_model().modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter.ndim == 3:
                    setattr(module, name, nn.Parameter(parameter.data.transpose(1, 2)))


def test_weights_of_experts_have_the_kernels_layout_after_waking():
    model = nn.Sequential(Experts(), nn.Linear(2, 2))
    before = dict(model.named_parameters())
    worker = Worker(model)
    worker.keep_parameters()
    worker.wake_up()
    assert model[0].w2_weight is not before["0.w2_weight"]
    worker.restore_parameters()
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert worker._awake_parameters == ()


def test_tensors_of_dispatchers_have_their_values_after_waking(monkeypatch: pytest.MonkeyPatch):
    """Sleep level 2 discards them, and they are no part of the model."""
    experts = torch.arange(8, dtype=torch.int32) % 4
    dispatcher = SimpleNamespace(expert_ids_per_ep_rank=experts.clone(), top_k=2)
    method = SimpleNamespace(token_dispatcher=dispatcher, expert_token_nums=torch.zeros(4))
    module = SimpleNamespace(_MoECommMethods={"alltoall": method, "mc2": None})
    monkeypatch.setitem(sys.modules, "vllm_ascend.ops.fused_moe.moe_comm_method", module)
    worker = Worker(nn.Linear(2, 2))
    worker.keep_parameters()
    address = dispatcher.expert_ids_per_ep_rank.data_ptr()
    dispatcher.expert_ids_per_ep_rank.fill_(77)
    method.expert_token_nums.fill_(77)
    worker.restore_parameters()
    assert torch.equal(dispatcher.expert_ids_per_ep_rank, experts)
    assert dispatcher.expert_ids_per_ep_rank.data_ptr() == address  # captured graphs refer to it
    assert not method.expert_token_nums.any()


class Absorbed(nn.Module):
    """Latent attention whose loader computes a matrix that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("scale", torch.ones(1))
        self.impl = SimpleNamespace(absorbed=torch.zeros(4, 4))

    def load(self, moves: str) -> None:
        """Load new weights in place, except for the tensor `moves`."""
        with torch.no_grad():
            self.weight.fill_(1.0)
            self.impl.absorbed.fill_(1.0)
        if moves == "weight":
            self.weight = nn.Parameter(torch.ones_like(self.weight))
        elif moves == "transposed":
            self.weight.data = self.weight.data.t()
        elif moves == "scale":
            self.scale = torch.ones_like(self.scale)
        elif moves == "absorbed":
            self.impl.absorbed = torch.ones(4, 4)


@pytest.mark.parametrize(
    ("moves", "name"),
    {
        "": "",
        "weight": "1.weight",
        "transposed": "1.weight",
        "scale": "1.scale",
        "absorbed": "1.impl.absorbed",
    }.items(),
)
def test_a_load_that_moves_a_tensor_of_captured_graphs_ends_the_run_with_its_name(
    settings: EngineSettings, moves: str, name: str
):
    model = nn.Sequential(nn.Linear(2, 2), Absorbed())
    worker = Worker(model)
    engine = _engine(settings, [])
    engine._llm.collective_rpc = lambda method, args=(): [getattr(worker, method)(*args)] * 2
    engine._checks_addresses = True
    engine.call_workers("record_addresses")
    for _ in range(2):
        engine.finish_device_loading()
    model[1].load(moves)
    refused = pytest.raises(
        MsrlError, match=mentions("rollout.engine.eager=false", name, "1 tensors")
    )
    with refused if moves else contextlib.nullcontext():
        engine.finish_device_loading()


@pytest.fixture
def settings(tmp_path: Path) -> EngineSettings:
    model = families.save_model(tmp_path, families.FAMILIES["qwen3"].config)
    engine = EngineConfig(tp=2, max_model_len=32, max_num_batched_tokens=64, sleep=1)
    metrics = EngineMetrics(9401, "grpo")
    return EngineSettings(
        model, engine=engine, random_weights=True, is_stepped=True, metrics=metrics
    )


def test_all_arguments_of_an_engine_are_known(settings: EngineSettings):
    shape = load_shape(settings.model_dir)
    arguments = engine_arguments(settings, shape, NPU)
    assert arguments.keys() <= fields("EngineArgs")
    assert arguments["disable_log_stats"] is False and arguments["served_model_name"] == "grpo"
    assert arguments["enable_sleep_mode"] is True and arguments["enforce_eager"] is True
    assert "kv_cache_memory_bytes" not in arguments


def _engine(settings: EngineSettings, calls: list[tuple[str, Any]]) -> VllmEngine:
    """Return an engine whose `vllm.LLM` records calls."""
    engine = object.__new__(VllmEngine)
    requests = _recorded_class("LLMEngine", calls, {"step": []})
    llm = _recorded_class("LLM", calls, {"reset_prefix_cache": True, "generate": []})
    llm.llm_engine = requests
    engine._llm, engine._settings = llm, settings
    engine._shape, engine.max_model_len = load_shape(settings.model_dir), 32
    engine._memory, engine._control = EngineMemory(llm, 1), {}
    engine._routed = RoutedRequests(engine.call_workers)
    engine._checks_addresses, engine._images = False, None
    return engine


def test_requests_and_sampling_parameters_fit_the_recorded_signatures(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
):
    def sampling_params(**options: Any) -> SimpleNamespace:
        assert options.keys() <= fields("SamplingParams")
        return SimpleNamespace(**options)

    vllm = SimpleNamespace(SamplingParams=sampling_params)
    kinds = SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA="delta"))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", kinds)
    calls: list[tuple[str, Any]] = []
    engine = _engine(settings, calls)
    prompt, sampling = Prompt(0, np.arange(1, 5)), SamplingParams(max_tokens=4, num_samples=1)
    engine.add_request("0", prompt, sampling, 1, "salt")
    engine.step()
    engine.abort_requests(["0"])
    engine.recompute_requests()
    engine.forget_prompts()
    engine.call_workers("update_weights", {})
    assert [name for name, _ in calls] == [
        *("add_request", "step", "abort_request"),
        *("reset_prefix_cache", "reset_prefix_cache", "collective_rpc"),
    ]
    assert calls[3][1] == {"reset_running_requests": True}


def test_weights_are_loaded_with_a_call_of_the_recorded_signature():
    calls: list[tuple[str, Any]] = []
    runner = SimpleNamespace(
        get_model=lambda: nn.Linear(2, 2),
        reload_weights=recorder(calls, "GPUModelRunner.reload_weights"),
    )
    worker = WeightReceiver()
    worker.model_runner = runner
    worker.receive_weights(iter(()))
    assert [name for name, _ in calls] == ["reload_weights"]
    assert calls[0][1].keys() == {"weights_iterator"}


def _weights() -> Iterator[tuple[str, Tensor]]:
    yield from TENSORS.items()


def test_weights_are_broadcast_over_hccl_with_vllm_ascends_engine(monkeypatch: pytest.MonkeyPatch):
    calls: list[tuple[str, Any]] = []

    def send_arguments(**values: Any) -> dict[str, Any]:
        assert values.keys() <= fields("HCCLTrainerSendWeightsArgs")
        return values

    engine = _recorded_class("HCCLWeightTransferEngine", calls, {"trainer_init": "communicator"})
    module = SimpleNamespace(
        HCCLWeightTransferEngine=engine, HCCLTrainerSendWeightsArgs=send_arguments
    )
    monkeypatch.setitem(sys.modules, HCCL, module)

    def call_worker(method: str, arguments: list[tuple[Any, ...]]) -> None:
        for own_arguments in arguments:
            recorder(calls, f"NPUWorker.{method}")(*own_arguments)

    group = TransferGroup(NPU.weight_engine("nccl"), 0, ("10.0.0.1", 4711), 4, bucket_bytes=128)
    sender = DeviceSender(group, EngineClient(call_worker, 2, 2), _weights)
    infos = [info["init_info"] for name, info in calls if name == "init_weight_transfer_engine"]
    assert [info["rank_offset"] for info in infos] == [1, 3]
    assert all(info.keys() == fields("HCCLWeightTransferInitInfo") for info in infos)
    calls.clear()
    sender.send()
    assert {name for name, _ in calls} == {
        *("start_weight_update", "update_weights", "trainer_send_weights", "finish_weight_update")
    }
    updates = [values["update_info"] for name, values in calls if name == "update_weights"]
    assert all(update.keys() == fields("HCCLWeightTransferUpdateInfo") for update in updates)
    assert updates[0]["names"] == [*TENSORS] and updates[0]["packed_buffer_size_bytes"] == 320


def test_engines_of_npus_have_the_names_that_vllm_ascend_registers():
    assert NPU.weight_engine("nccl").name == "hccl"
    with pytest.raises(MsrlError, match=mentions("rollout.weights.transfer=ipc", "npu", "auto")):
        NPU.weight_engine("ipc")


def test_a_recorded_signature_refuses_other_arguments():
    with pytest.raises(TypeError):
        recorder([], "LLM.sleep")(depth=2)
    assert parameters("LLM.wake_up") == "self, tags=None"
