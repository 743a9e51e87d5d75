"""Environment variables and engine arguments on Ascend NPUs. No NPU is involved."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import families
from msrl.config.loader import load
from msrl.config.sections.rollout import EngineConfig
from msrl.errors import MsrlError
from msrl.models.families import load_shape
from msrl.platforms import get
from msrl.rollout.engine import EngineSettings
from msrl.rollout.engine_arguments import engine_arguments
from msrl.rollout.vllm import _prepare_environment
from msrl.workflows.training.settings import worker_variables
from support import assert_mentions, mentions
from test_config_loader import mistakes

NPU = get("npu")
RANGES = ("HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE")


def _ports(text: str) -> set[int]:
    first, last = map(int, text.split("-"))
    return set(range(first, last + 1))


def _collectives(role, timeout_s=600.0, **variables):
    return NPU.collective_environment(role, timeout_s=timeout_s, variables=variables)


@pytest.mark.parametrize("variables", [{}, {"HCCL_IF_BASE_PORT": "48000"}])
def test_trainers_and_engines_use_different_ports(variables):
    environments = [_collectives(role, **variables) for role in ("trainer", "engine")]
    ranges = [_ports(environment[name]) for environment in environments for name in RANGES]
    assert len(set.union(*ranges)) == sum(map(len, ranges))
    assert all(len(ports) >= 16 for ports in ranges)
    assert min(map(min, ranges)) == int(variables.get("HCCL_IF_BASE_PORT", "60000"))
    assert max(map(max, ranges)) < 65536


@pytest.mark.parametrize("port", ["zero", "-1", "80", "65520", "1e4"])
def test_a_base_port_without_room_for_all_ports_is_refused(port):
    with pytest.raises(MsrlError, match=mentions(f"cluster.env.HCCL_IF_BASE_PORT={port}", "1024")):
        _collectives("trainer", HCCL_IF_BASE_PORT=port)


def test_time_limits_of_collectives_follow_the_limit_of_calls():
    # HCCL gives up before torch_npu's watchdog, which has the limit of calls.
    assert [_collectives("trainer", s)["HCCL_EXEC_TIMEOUT"] for s in (0.5, 600.0)] == ["1", "540"]
    limits = [_collectives("trainer", s)["HCCL_CONNECT_TIMEOUT"] for s in (1.0, 600.0, 1e5)]
    assert limits == ["120", "600", "7200"]


def test_the_users_variables_take_precedence(tmp_path):
    (tmp_path / "config.yaml").write_text(
        "cluster: {rpc_timeout_s: 900, env: {HCCL_EXEC_TIMEOUT: '7', HCCL_DETERMINISTIC: strict}}\n"
        "run: {deterministic: true}\n"
    )
    config = load([str(tmp_path / "config.yaml")]).config
    variables = worker_variables(config, NPU)
    assert variables["HCCL_EXEC_TIMEOUT"] == "7" and variables["HCCL_CONNECT_TIMEOUT"] == "900"
    assert variables["HCCL_DETERMINISTIC"] == "strict"
    assert variables["CLOSE_MATMUL_K_SHIFT"] == "1"
    assert variables["ATB_MATMUL_SHUFFLE_K_ENABLE"] == "0"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Folder of a model, whose class decides on variables of its engine."""
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen2ForCausalLM"]}')
    return tmp_path


@pytest.mark.parametrize(
    ("inherited", "used"),
    [
        ("expandable_segments:True", ""),
        ("max_split_size_mb:64, expandable_segments:True", "max_split_size_mb:64"),
        ("expandable_segments : True,page_size:1g", "page_size:1g"),
    ],
)
def test_an_engine_that_sleeps_gets_no_expandable_segments(
    monkeypatch, capsys, model, inherited, used
):
    monkeypatch.setattr(os, "environ", {"PYTORCH_NPU_ALLOC_CONF": inherited})
    _prepare_environment(NPU, EngineSettings(model, EngineConfig()))
    assert os.environ.get("PYTORCH_NPU_ALLOC_CONF", "") == used
    # vllm-ascend 0.23 appends to an empty value, and torch_npu cannot parse the result.
    assert used or "PYTORCH_NPU_ALLOC_CONF" not in os.environ
    assert_mentions(capsys.readouterr().err, f"PYTORCH_NPU_ALLOC_CONF={inherited}", "segments")


def test_ranks_keep_expandable_segments():
    assert "PYTORCH_NPU_ALLOC_CONF" not in NPU.worker_environment(2)
    assert not NPU.engine_overrides({"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64"})
    assert not get("cpu").engine_overrides({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"})


def test_an_engine_loads_weights_in_the_plain_layout_and_captures_graphs(
    monkeypatch, capsys, model
):
    variables = {"VLLM_ASCEND_ENABLE_NZ": "1", "TASK_QUEUE_ENABLE": "2"}
    monkeypatch.setattr(os, "environ", dict(variables))
    _prepare_environment(NPU, EngineSettings(model, EngineConfig()))
    assert os.environ["VLLM_ASCEND_ENABLE_NZ"] == "0" and os.environ["TASK_QUEUE_ENABLE"] == "1"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(f"{k}={v}" in "\n".join(lines) for k, v in variables.items())


def test_an_engine_whose_weights_change_captures_graphs_only_on_request(tmp_path):
    folder = families.save_model(tmp_path, families.FAMILIES["qwen3"].config)
    eager = {
        (weights_change, setting): engine_arguments(
            EngineSettings(
                folder, engine=EngineConfig(eager=setting), random_weights=weights_change
            ),
            load_shape(folder),
            NPU,
        )["enforce_eager"]
        for weights_change in (True, False)
        for setting in (None, True, False)
    }
    assert eager == {
        **{(True, None): True, (True, True): True, (True, False): False},
        **{(False, None): False, (False, True): True, (False, False): False},
    }


@pytest.mark.parametrize("name", ["float16", "fp16", "half"])
def test_float16_is_refused_with_the_reason(name):
    (line,) = mistakes(sets=(f"model.dtype={name}",))
    assert_mentions(line, f"model.dtype={name}", "loss scaling", "bfloat16")
