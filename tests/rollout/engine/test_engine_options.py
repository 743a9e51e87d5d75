"""Engine arguments of vLLM, sleep levels and expert parallelism of rollout.engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from config_inputs import make_working_folder
from msrl.checks.validate import find_errors
from msrl.cli.configuration import load_configuration as load
from msrl.config.sections.rollout import EngineConfig
from msrl.errors import MsrlError
from msrl.models.families import load_shape
from msrl.plan.run_plan import resolve
from msrl.platforms import get
from msrl.rollout import engine_arguments
from msrl.rollout.engine import EngineSettings, check_platform, sleep_level
from msrl.rollout.sleep import EngineMemory
from support import assert_mentions


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_working_folder(tmp_path)


def mistakes(*sets: str) -> list[str]:
    resolved = load(["grpo.yaml"], ["reward.sources=[{verifier: acc}]", *sets])
    return find_errors(resolved, resolve(resolved.config, "train-grpo"))


def option_mistakes(option: str) -> list[str]:
    return [line for line in mistakes(f"rollout.engine.options={{{option}}}") if "options" in line]


class Recorder:
    """Stand-in for the memory of a device: a log of the calls that change it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, object]] = []

    def sleep(self, level: int = 1) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake_up", tags))

    def collective_rpc(self, method: str) -> None:
        """Call the workers, which have no device memory here."""


def update(memory: EngineMemory) -> None:
    """Release the memory, take it again and load new weights, as a training step does."""
    memory.release(discard_weights=True)
    memory.take(before_loading=True)
    memory.check_loadable()
    memory.finish_loading()
    memory.check_ready()


# --- engine arguments


def test_a_known_engine_argument_is_accepted(folder: Path) -> None:
    assert option_mistakes("block_size: 32") == []


def test_an_unknown_engine_argument_is_refused_with_the_nearest_name(folder: Path) -> None:
    (line,) = option_mistakes("blok_size: 32")
    assert_mentions(line, "rollout.engine.options.blok_size=32", "block_size")


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", sorted(engine_arguments.SET_BY_MSRL))
def test_an_engine_argument_that_msrl_sets_is_refused_with_the_key_to_use(
    folder: Path, name: str
) -> None:
    (line,) = option_mistakes(f"{name}: 1")
    assert_mentions(line, f"rollout.engine.options.{name}=1", engine_arguments.SET_BY_MSRL[name])


def test_engine_arguments_are_checked_in_every_command_with_an_engine(folder: Path) -> None:
    for command in ("generate", "chat"):
        resolved = load([], ["rollout.engine.options={blok_size: 1}"])
        lines = find_errors(resolved, resolve(resolved.config, command))
        assert any("blok_size" in line for line in lines)


def test_every_argument_of_vllm_has_one_class() -> None:
    known = engine_arguments.engine_argument_names()
    if known is None:
        pytest.skip("vLLM is not installed")
    own, refused = set(engine_arguments.SET_BY_MSRL), set(engine_arguments.REFUSED)
    harmless = set(engine_arguments.HARMLESS)
    assert own | refused | harmless <= known
    assert not (own & refused or own & harmless or refused & harmless)
    problems = {x: engine_arguments.option_problem(x, weights_change=True) for x in known}
    assert {name for name, problem in problems.items() if problem is None} == harmless
    untried = {name for name, problem in problems.items() if "not tried" in (problem or "")}
    assert untried == known - own - refused - harmless
    assert {"quantization", "kv_cache_dtype", "enable_lora", "moe_backend"} <= untried


def test_an_argument_that_was_not_tried_is_refused_where_weights_change(folder: Path) -> None:
    (line,) = option_mistakes("kv_cache_dtype: fp8")
    assert_mentions(line, "rollout.engine.options.kv_cache_dtype=fp8", "not tried", "weights")
    resolved = load([], ["rollout.engine.options={kv_cache_dtype: fp8}"])
    lines = find_errors(resolved, resolve(resolved.config, "generate"))
    assert not any("kv_cache_dtype" in line for line in lines)


def test_without_vllm_no_name_is_unknown(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_arguments, "engine_argument_names", lambda: None)
    assert option_mistakes("enable_chunked_prefill: true") == []
    resolved = load([], ["rollout.engine.options={blok_size: 32}"])
    lines = find_errors(resolved, resolve(resolved.config, "generate"))
    assert not any("blok_size" in line for line in lines)


def test_an_argument_that_the_platform_sets_is_refused() -> None:
    engine = EngineConfig(options={"enable_chunked_prefill": True})
    with pytest.raises(MsrlError) as caught:
        check_platform(engine, get("cpu"))
    assert_mentions(str(caught.value), "rollout.engine.options.enable_chunked_prefill", "cpu")
    check_platform(engine, get("cuda"))


@pytest.mark.slow
def test_options_and_expert_parallelism_reach_the_engine(tmp_path: Path) -> None:
    from tiny_qwen2 import make_model

    make_model(tied=True).save_pretrained(tmp_path / "model")
    engine = EngineConfig(tp=2, ep=2, options={"block_size": 32}, kv_cache_bytes=1 << 20)
    settings = EngineSettings(tmp_path / "model", engine=engine, dtype="float32")
    shape = load_shape(settings.model_dir)
    arguments = engine_arguments.engine_arguments(settings, shape, get("cpu"))
    assert arguments["block_size"] == 32 and arguments["enable_expert_parallel"] is True
    platform_arguments = set(get("cpu").engine_arguments())
    set_names = set(arguments) - {"block_size"} - platform_arguments
    assert set_names <= set(engine_arguments.SET_BY_MSRL)


# --- expert parallelism


def test_experts_are_distributed_over_all_devices_of_an_engine_or_none(folder: Path) -> None:
    sets = ("cluster.devices_per_node=4", "rollout.engine.tp=4", "rollout.engine.ep=2")
    lines = [line for line in mistakes(*sets) if "engine.ep" in line]
    assert any("tp=4" in line for line in lines)


def test_a_model_without_experts_has_no_expert_parallelism(folder: Path) -> None:
    sets = ("cluster.devices_per_node=2", "rollout.engine.tp=2", "rollout.engine.ep=2")
    assert any("rollout.engine.ep=2" in line and "experts" in line for line in mistakes(*sets))


# --- sleep


def test_the_default_sleep_level_is_1_where_the_platform_has_sleep_mode() -> None:
    default = EngineConfig()
    assert [sleep_level(default, get(name)) for name in ("cpu", "cuda", "npu")] == [0, 1, 1]
    assert sleep_level(EngineConfig(sleep=2), get("cuda")) == 2


def test_sleep_is_refused_on_a_platform_without_sleep_mode() -> None:
    with pytest.raises(MsrlError) as caught:
        check_platform(EngineConfig(sleep=1), get("cpu"))
    assert_mentions(str(caught.value), "rollout.engine.sleep=1", "cpu")
    check_platform(EngineConfig(sleep=0), get("cpu"))
    check_platform(EngineConfig(sleep=2), get("npu"))


@pytest.mark.parametrize("level", [1, 2])
def test_weights_return_first_then_new_ones_are_loaded_then_the_cache_returns(level: int) -> None:
    recorder = Recorder()
    update(EngineMemory(recorder, level))
    assert recorder.calls == [
        ("sleep", level),
        ("wake_up", ["weights"]),
        ("wake_up", ["kv_cache"]),
    ]


def test_at_level_0_the_engine_keeps_its_memory() -> None:
    recorder = Recorder()
    update(EngineMemory(recorder, 0))
    assert recorder.calls == []


def test_generating_after_discarded_weights_is_refused_until_weights_are_loaded() -> None:
    memory = EngineMemory(Recorder(), 2)
    memory.release(discard_weights=True)
    with pytest.raises(RuntimeError, match="discarded"):
        memory.check_ready()
    memory.take()
    with pytest.raises(RuntimeError, match="load weights"):
        memory.check_ready()
    memory.finish_loading()
    memory.check_ready()


def test_weights_that_are_needed_again_are_not_discarded() -> None:
    recorder = Recorder()
    memory = EngineMemory(recorder, 2)
    memory.release()
    memory.take()
    memory.check_ready()
    assert recorder.calls[0] == ("sleep", 1)


def test_weights_are_not_loaded_into_a_sleeping_engine() -> None:
    memory = EngineMemory(Recorder(), 1)
    memory.release()
    with pytest.raises(RuntimeError, match="sleeps"):
        memory.check_loadable()


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_the_calls_fit_the_signatures_of_vllm(level: int) -> None:
    vllm = pytest.importorskip("vllm")
    engine: Any = create_autospec(vllm.LLM, instance=True, spec_set=True)
    update(EngineMemory(engine, level))
    names = [call[0] for call in engine.method_calls if call[0] != "collective_rpc"]
    assert names == ["sleep", "wake_up", "wake_up"]
