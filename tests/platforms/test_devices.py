"""Calls of the trainer that depend on the device, checked without one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from msrl.errors import MsrlError
from msrl.models.parallel_layout import ParallelLayout
from msrl.platforms import get
from msrl.platforms.base import Platform
from msrl.platforms.cuda import CudaPlatform
from msrl.trainer import groups, optimizer_state
from msrl.trainer import replica as replicas
from msrl.trainer.checkpointing import state as checkpoints
from msrl.trainer.checkpointing.publish import random_file
from msrl.trainer.checkpointing.resume import SavedTraining
from msrl.trainer.launch import LocalRanks
from msrl.trainer.replica import ModelReplica
from msrl.trainer.settings import Layout
from support import mentions


@pytest.mark.parametrize(
    ("platform", "dtype"), [("cpu", torch.float64), ("cuda", torch.float64), ("npu", torch.float32)]
)
def test_reductions_use_a_dtype_that_the_back_end_supports(
    platform: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    seen = []
    monkeypatch.setattr(
        replicas.dist, "all_reduce", lambda totals, group: seen.append(totals.dtype)
    )
    monkeypatch.setattr(replicas.parallel_state, "get_data_parallel_group", lambda: None)
    position = SimpleNamespace(
        is_last_stage=True, platform=get(platform), layout=SimpleNamespace(pp=1)
    )
    replica: Any = SimpleNamespace(position=position)
    assert ModelReplica.mean_metrics(
        replica, [{"loss": torch.tensor(1.5)}, {"loss": torch.tensor(2.0)}], 7
    ) == {"loss": 0.5}
    assert seen == [dtype]


class Device(CudaPlatform):
    """Device with a fake random-number state."""

    def __init__(self) -> None:
        self.state = torch.zeros(16, dtype=torch.uint8)

    def random_state(self) -> torch.Tensor:
        return self.state

    def set_random_state(self, state: torch.Tensor) -> None:
        self.state = state


def position_on(platform: Platform) -> Any:
    """Return the attributes of a rank's position that `_restore_random` reads."""
    return SimpleNamespace(platform=platform, layout=Layout())


def test_the_random_state_of_the_device_is_saved_and_restored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: 0)
    tracker: Any = get_cuda_rng_tracker()
    monkeypatch.setattr(
        tracker, "states_", {"model-parallel-rng": torch.full((16,), 3, dtype=torch.uint8)}
    )
    device, saved = Device(), SavedTraining(tmp_path, 1)
    device.state += 7
    states = checkpoints._random_states(device)
    device.state += 1
    tracker.states_["model-parallel-rng"] += 1
    drawn = torch.rand(3)
    saved.training_dir.mkdir(parents=True)
    save_file(states, saved.training_dir / random_file(0))
    checkpoints._restore_random(position_on(device), saved, ParallelLayout())
    assert (
        device.state.tolist() == [7] * 16
        and tracker.states_["model-parallel-rng"].tolist() == [3] * 16
    )
    assert torch.equal(torch.rand(3), drawn)
    # A device of another kind, with states of another size, keeps the state of its seed.
    monkeypatch.setattr(
        tracker, "states_", {"model-parallel-rng": torch.zeros(5056, dtype=torch.uint8)}
    )
    checkpoints._restore_random(position_on(get("cpu")), saved, ParallelLayout())
    assert not tracker.states_["model-parallel-rng"].any()


def test_a_rank_selects_its_device_before_it_joins_a_group(monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []
    platform: Any = SimpleNamespace(
        collective_backend="x",
        device=lambda rank: done.append(f"device {rank}"),
        seed=lambda seed: None,
    )
    monkeypatch.setattr(groups.dist, "init_process_group", lambda *_, **__: done.append("groups"))
    monkeypatch.setattr(groups.parallel_state, "initialize_model_parallel", lambda *_, **__: None)
    monkeypatch.setattr(
        groups.tensor_parallel, "model_parallel_cuda_manual_seed", lambda seed: done.append("seed")
    )
    groups.initialize(
        platform, rank=3, world_size=4, init_method="", layout=Layout(), seed=0, timeout_s=60
    )
    assert done == ["device 3", "groups", "seed"]


class GroupAdamW:
    """Optimizer that counts updates per group, as Apex, Transformer Engine and MindSpeed do."""

    def __init__(self, groups: list[dict[str, Any]], lr: float) -> None:
        self.param_groups = [{"lr": lr, **group} for group in groups]
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = group["step"] + 1 if "step" in group else 1
            for parameter in group["params"]:
                self.state.setdefault(
                    parameter,
                    {name: torch.zeros_like(parameter) for name in optimizer_state.MOMENTS},
                )


def trained_by(kind: Any, platform: str) -> Any:
    """Return a fake replica that trains one matrix, and its optimizer."""
    model = torch.nn.Linear(3, 2, bias=False)
    optimizer = kind([{"params": [model.weight]}], lr=0.1)
    model.weight.grad = torch.ones(2, 3)
    distributed = SimpleNamespace(
        optimizer=optimizer,
        model_param_group_index_map={model.weight: (0, 0)},
        model_fp32_groups=[[]],
        _get_model_param_range_map=lambda parameter: {"param": SimpleNamespace(start=0, end=6)},
    )
    chain = SimpleNamespace(chained_optimizers=[distributed], reload_model_params=lambda: None)
    position = SimpleNamespace(
        dtype=torch.float32, platform=get(platform), device=torch.device("cpu")
    )
    return SimpleNamespace(model=model, optimizer=chain, position=position), optimizer


@pytest.mark.parametrize(
    ("kind", "platform"), [(torch.optim.AdamW, "cuda"), (GroupAdamW, "cuda"), (GroupAdamW, "npu")]
)
def test_the_update_count_is_restored_wherever_the_optimizer_stores_it(
    kind: Any, platform: str, monkeypatch: pytest.MonkeyPatch
):
    """Otherwise bias correction would restart and make the first steps after a resume too large."""
    monkeypatch.setattr(optimizer_state.dist, "all_reduce", lambda count, op: None)
    replica, optimizer = trained_by(kind, platform)
    for _ in range(5):
        optimizer.step()
    assert optimizer_state.num_updates(replica) == 5
    resumed, optimizer = trained_by(kind, platform)
    states = {name: {"weight": torch.full((2, 3), 0.5)} for name in optimizer_state.MOMENTS}
    optimizer_state.restore(resumed, states, 5)
    assert optimizer_state.num_updates(resumed) == 5
    counts = [group["step"] for group in optimizer.param_groups if "step" in group]
    assert len(counts) == (kind is GroupAdamW) and all(
        isinstance(count, torch.Tensor) == (platform == "npu") for count in counts
    )
    optimizer.step()
    assert optimizer_state.num_updates(resumed) == 6


@pytest.mark.parametrize(("platform", "num_devices"), [("cuda", 1), ("npu", 0)])
def test_more_ranks_than_devices_are_refused_before_any_rank_starts(
    platform: str, num_devices: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(type(get(platform)), "device_count", lambda self: num_devices)
    with pytest.raises(
        MsrlError, match=mentions("cluster.devices_per_node", "2 ranks", platform, num_devices)
    ):
        LocalRanks("nowhere:main", None, num_ranks=2, platform=get(platform))
