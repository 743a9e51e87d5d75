"""msrl doctor: all findings at once, versions of pyproject.toml, and memory by hand calculation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from config_inputs import GRPO, make_data, make_model
from msrl.cli.configuration import load_configuration as load
from msrl.errors import MsrlError
from msrl.plan.run_plan import resolve
from msrl.platforms import NAMES, get
from msrl.platforms.cpu import CpuPlatform
from msrl.workflows import doctor
from msrl.workflows.doctor_config import config_findings
from msrl.workflows.training.memory_check import check_memory, fit
from support import ROOT, assert_mentions, mentions
from test_cli import msrl


class Small(CpuPlatform):
    """Platform with four devices that have one megabyte of memory each."""

    name = "small"
    shares_main_memory = False

    def device_count(self) -> int:
        return 4

    def memory_bytes(self) -> int | None:
        return 10**6


class Sized(Small):
    """Platform with four devices of a given memory size in bytes."""

    def __init__(self, size: int) -> None:
        self.size = size

    def memory_bytes(self) -> int | None:
        return self.size


class Sleeping(Sized):
    def engine_arguments(self) -> dict[str, bool]:
        return {"enable_sleep_mode": True}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    make_data(tmp_path / "data")
    (tmp_path / "grpo.yaml").write_text(GRPO, encoding="utf-8")
    return tmp_path


def test_the_doctor_reports_no_error_on_this_machine(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    assert msrl("doctor", "--no-imports", "--platform", "cpu") == 0
    out = capsys.readouterr().out
    assert re.search(r"^ok {5}platform: cpu$", out, re.M) and re.search(
        r"^ok {5}devices: \d+ of cpu, [\d.]+ GB .*memory$", out, re.M
    )
    assert all(re.search(rf"^ok {{5}}{package}: \d", out, re.M) for package in get("cpu").stack)


def test_versions_that_fit_are_those_of_the_extras():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for platform in NAMES:
        packages = get(platform).stack
        extra = re.search(rf"^{platform} = \[(.*?)\]$", text, re.S | re.M)
        engine = re.search(r"^engine = \[(.*?)^\]$", text, re.S | re.M)
        light = re.search(r"^dependencies = \[(.*?)^\]$", text, re.S | re.M)
        assert extra and engine and light
        lists = extra[1] + engine[1] + light[1]
        pinned = dict(re.findall(r'"([\w-]+)(?:\[\w+\])?((?:[=<>]=?)[^";]+)', lists))
        known = {package: version for package, version in packages.items() if package in pinned}
        for package, versions in known.items():  # a newer Megatron is accepted if it is installed
            exact = pinned[package].removeprefix("==")
            assert versions == pinned[package] or exact in SpecifierSet(versions), package
        assert set(packages) - set(known) <= {"vllm"}  # from source on NPU


def test_every_mistake_is_reported_together_with_exit_code_2(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    sets = [
        "--set",
        "rollout.samples_per_prompt=1",
        "--set",
        "data.train=gone",
        "--set",
        "rollout.max_response_tokens=600",
    ]
    assert (
        msrl("doctor", "--no-imports", "--platform", "cpu", "-c", "grpo.yaml", *sets, "--json") == 2
    )
    wrong = [
        finding["text"]
        for finding in json.loads(capsys.readouterr().out)
        if finding["level"] == "wrong"
    ]
    assert len(wrong) == 3
    assert any("data.train=gone" in text for text in wrong) and any(
        "max_response_tokens=600" in text for text in wrong
    )
    assert msrl("doctor", "--no-imports", "-c", "grpo.yaml", "--set", "train.stps=1") == 2
    assert_mentions(
        capsys.readouterr().out, "wrong  configuration: --set: train.stps=1", "key", "'steps'"
    )


def test_memory_of_training_reference_and_engine_is_added_up(folder: Path):
    # 4 layers of hidden 64, ffn 96, 8 heads of 8 in 4 groups with biases, 1001 tied rows, in fp32.
    # Bytes per parameter: 4 weights, 4 gradients, 8 moments, 4 reference.
    resolved = load(
        ["grpo.yaml"], ["algo.kl.loss.coef=0.1", "rollout.engine.kv_cache_bytes=1000000"]
    )
    findings = {
        what: (level, text)
        for level, what, text in config_findings(resolved, "train-grpo", Small())
    }
    parameters = (
        4 * (2 * 64 * 64 + 2 * 64 * 32 + 64 + 2 * 32 + 3 * 64 * 96 + 2 * 64) + 1001 * 64 + 64
    )
    training, engine = parameters * (4 + 4 + 8 + 4), parameters * 4 + 10**6
    assert findings["memory"][0] == "wrong"
    assert_mentions(findings["memory"][1], f"{(training + engine) / 1e6:.1f} MB", "1.0 MB")
    assert re.search(rf"^ +optimizer +{parameters * 8 / 1e6:.1f} MB$", findings["memory"][1], re.M)
    # A micro-batch of one prompt and response of 64 tokens each: 64 are trained on, of 1001 logits.
    assert re.search(r"^ +activations +[\d.]+ MB$", findings["memory"][1], re.M)
    # Keys and values of 4 layers, 4 groups of 8, 4 bytes: 1024 bytes a token.
    level, text = findings["KV cache"]
    assert level == "ok"
    assert_mentions(text, f"{10**6 // 1024:,} tokens", 10**6 // (1024 * 128))
    little = load(["grpo.yaml"], ["rollout.engine.kv_cache_bytes=100000"])
    assert ("wrong", "KV cache") in [
        (level, what) for level, what, _ in config_findings(little, "train-grpo", Small())
    ]


def test_devices_of_a_run_are_counted_against_the_machine(folder: Path):
    resolved = load(
        ["grpo.yaml"], ["cluster.devices_per_node=8", "rollout.engine.kv_cache_bytes=1000000"]
    )
    findings = [
        (level, text)
        for level, what, text in config_findings(resolved, "train-grpo", Small())
        if what == "devices"
    ]
    ((level, text),) = findings
    assert level == "wrong"
    assert_mentions(text, 8, 4, "cluster.devices_per_node", "cluster.nodes")
    on_cores = [
        level
        for level, what, _ in config_findings(resolved, "train-grpo", get("cpu"))
        if what == "devices"
    ]
    assert on_cores in (["note"], ["ok"])


def test_a_library_that_does_not_import_is_reported_with_its_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CpuPlatform, "libraries", ("json", "msrl_no_such_library"))
    findings = doctor.run("cpu", resolved=None, mistakes=(), command=None, imports=True)
    imports = {row.what: row for row in findings if row.what.startswith("import ")}
    assert imports["import json"].level == "ok"
    broken = imports["import msrl_no_such_library"]
    assert broken.level == "wrong" and broken.text.startswith(
        "ModuleNotFoundError: No module named 'msrl_no_such_library'"
    )


def test_a_platform_that_this_machine_lacks_is_wrong_only_if_it_is_selected(
    capsys: pytest.CaptureFixture[str],
):
    assert msrl("doctor", "--no-imports", "--platform", "npu") == 2
    assert re.search(r"^wrong  platform: cluster.platform=npu: ", capsys.readouterr().out, re.M)


@pytest.mark.full
@pytest.mark.slow
def test_the_libraries_of_this_machine_import():
    findings = doctor.run("cpu", resolved=None, mistakes=(), command=None, imports=True)
    assert [row for row in findings if row.what.startswith("import ") and row.level != "ok"] == []


def test_a_training_that_cannot_fit_is_refused_and_one_that_might_not_fit_causes_a_warning(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    # Weights, gradients and moments of 141,000 parameters in fp32 are 2.3 MB. A row of 500 tokens
    # has 500 x 1001 logits, 2 MB.
    sets = [
        "model.path=model",
        "model.dtype=float32",
        "train.micro_batch=8",
        "data.seq_length=500",
    ]
    plan = resolve(load(sets=sets).config, "train-sft")
    with pytest.raises(
        MsrlError,
        match=mentions("memory", "1.0 MB", "train.recompute.granularity: full"),
    ):
        check_memory(plan, Small(), longest=500)
    needed = fit(plan, Sized(10**6), longest=500)
    assert needed is not None and needed.certain < needed.needed / 2
    check_memory(plan, Sized((needed.certain + needed.needed) // 2), longest=500)
    warning = capsys.readouterr().err
    assert_mentions(warning, "warning: memory", "lower train.micro_batch", "train.chunk")
    check_memory(plan, Sized(needed.needed), longest=500)
    assert capsys.readouterr().err == ""
    on_cores = Sized(10**6)
    on_cores.shares_main_memory = True
    check_memory(plan, on_cores, longest=500)
    assert_mentions(capsys.readouterr().err, "memory", "1.0 MB")


def test_memory_of_a_sleeping_engine_and_of_a_pass_are_not_added(folder: Path):
    config = load(
        ["grpo.yaml"], ["rollout.engine.kv_cache_bytes=100000000", "train.offload.optimizer=true"]
    ).config
    plan = resolve(config, "train-grpo")
    awake, asleep = fit(plan, Sized(10**9)), fit(plan, Sleeping(10**9))
    assert awake is not None and asleep is not None
    engine, memory = asleep.memory.engine, asleep.memory
    assert engine == 100_000_000 + memory.weights
    assert awake.needed - engine == memory.training
    # Moments are offloaded to host memory.
    assert asleep.needed == memory.generating == engine + memory.weights + memory.gradients
