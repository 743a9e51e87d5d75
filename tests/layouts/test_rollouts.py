"""Predicted steps of train-grpo against hand calculations, and `msrl plan` for train-grpo."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from mixture_families import QWEN3_MOE
from msrl.config.loader import load
from msrl.errors import MsrlError
from msrl.layouts.responses import read_responses
from msrl.layouts.rollouts import (
    Engines,
    ListedLengths,
    Schedule,
    engine_speeds,
    generation_s,
    step_times,
)
from msrl.memory.flops import head_weights, layer_weights
from msrl.tracking.metrics import MetricsWriter
from msrl.types import StepReport
from support import assert_mentions
from test_cli import msrl
from test_cost import job, profile
from test_models import QWEN2
from test_search import FILES, set_memory


def schedule(lengths: list[int], prompts: int, staleness: int = 0) -> Schedule:
    return Schedule(prompts, 1, 0.0, ListedLengths("", lengths), staleness, False)


def test_a_token_takes_the_reads_or_the_products_and_the_step():
    shape = job(profile()).shape
    weights = head_weights(shape) + sum(sum(layer_weights(shape, x)) for x in shape.layers)
    reading = engine_speeds(job(profile(memory_bytes_per_s=1e6, engine_step_s=7.0)), 1, 9, 0.0)
    assert reading.token_s(1, 0.0) == pytest.approx(7 + weights * 2 / 1e6)
    computing = engine_speeds(job(profile()), 1, 9, 0.0)
    assert computing.token_s(3, 0.0) == pytest.approx(2 * 3 * weights / 1e9)
    assert computing.prefill_s(3) == pytest.approx(2 * 3 * weights / 1e9)
    halves = engine_speeds(job(profile(collective_s=5.0)), 2, 9, 0.0)
    assert halves.token_s(3, 0.0) == pytest.approx(3 * weights / 1e9 + 2 * 5 * shape.num_layers)


def test_few_tokens_read_few_experts():
    speeds = engine_speeds(job(profile(memory_bytes_per_s=1.0), QWEN3_MOE), 1, 9, 0.0)
    moe = job(profile(), QWEN3_MOE).shape.moe
    assert moe is not None
    one = (speeds.token_s(1, 0.0) - speeds.dense_bytes) / speeds.expert_bytes
    assert one == pytest.approx(moe.experts_per_token / moe.num_experts)
    assert speeds.token_s(1000, 0.0) - speeds.dense_bytes == pytest.approx(speeds.expert_bytes)


def test_generation_ends_with_the_longest_response_of_any_engine():
    speeds = engine_speeds(job(profile(engine_step_s=1.0)), 1, 9, 0.0)
    lengths, engines = [10, 20, 30, 40], Engines(2, 1, is_separate=False)
    assert generation_s(schedule(lengths, 4), engines, speeds) == pytest.approx(40, rel=1e-3)
    full = dataclasses.replace(speeds, max_running=1)
    assert generation_s(schedule(lengths, 4), engines, full) == pytest.approx(60, rel=1e-3)


def test_staleness_overlaps_generation_and_training():
    speeds = engine_speeds(job(profile(engine_step_s=1.0)), 1, 64, 0.0)
    engines = Engines(1, 1, is_separate=True)
    times = step_times(schedule([100], 8, staleness=1), engines, speeds, 90.0)
    assert times.total == pytest.approx(100, rel=0.1)
    assert times.waiting == pytest.approx(10, abs=10)


def test_lengths_come_from_a_file_a_run_a_number_or_an_assumption(tmp_path: Path):
    file = tmp_path / "lengths.txt"
    file.write_text("5\n7\n\n9000\n")
    assert read_responses(str(file), 1000, 8).lengths == [5, 7, 1000]
    (tmp_path / "run").mkdir()
    metrics = {"rollout/response_length": 100.0, "rollout/response_length_max": 400.0}
    MetricsWriter(tmp_path / "run").log(StepReport(1, metrics))
    run = read_responses(str(tmp_path / "run"), 1000, 64)
    assert run.mean == pytest.approx(100, rel=0.1)
    assert read_responses("50", 1000, 8).mean == pytest.approx(50, rel=0.1)
    assert "assumed" in read_responses(None, 1000, 8).name
    file.write_text("5\nfive\n")
    for text, word in ((str(file), "2"), (str(tmp_path / "none"), "none"), (str(tmp_path), "run")):
        with pytest.raises(MsrlError, match=word):
            read_responses(text, 1000, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a small model, a profile and a configuration of train-grpo."""
    (tmp_path / "model").mkdir()
    config = {**QWEN2, "max_position_embeddings": 8192}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    set_memory(tmp_path, 4e9)
    values = {
        "model": {"path": str(tmp_path / "model"), "dtype": "bfloat16"},
        "data": {"train": "data/rl"},
        "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_response_tokens": 512},
        "reward": {"sources": [{"verifier": "acc"}]},
        "train": {"steps": 1},
    }
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump(values))
    return tmp_path


def plan(folder: Path, *words: str) -> int:
    own = ("--profile", str(folder / "own.yaml"))
    return msrl("plan", "-c", str(folder / "grpo.yaml"), *own, *words)


def test_ranks_and_engines_are_planned_together(folder: Path, capsys: pytest.CaptureFixture[str]):
    file = folder / "layout.yaml"
    assert plan(folder, "--devices", "4", "--responses", "100", "--write", str(file)) == 0
    output = capsys.readouterr().out
    assert_mentions(output, "colocated", "generation", "100", "train-grpo")
    keys = yaml.safe_load(file.read_text())
    assert keys["rollout"]["engine"]["tp"] >= 1
    load([str(folder / "grpo.yaml"), str(file)])


def test_staleness_needs_separate_engines(folder: Path, capsys: pytest.CaptureFixture[str]):
    sets = ("--set", "rollout.async.max_staleness=1")
    assert plan(folder, "--devices", "4", *sets) == 0
    output = capsys.readouterr().out
    assert "separate" in output and "assumed" in output
    keep = ("--keep", "rollout.engine.tp", "--set", "rollout.engine.tp=2")
    assert plan(folder, "--devices", "4", *keep) == 0
    assert "TP 1," not in capsys.readouterr().out


def test_engines_that_do_not_fit_are_told_what_would_make_them_possible(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    set_memory(folder, 1e6)
    assert plan(folder, "--devices", "2") == 2
    assert_mentions(capsys.readouterr().err, "memory", "2 devices")


def test_packaged_profiles_have_a_time_for_engines():
    for file in FILES.glob("*.yaml"):
        assert yaml.safe_load(file.read_text())["engine_step_s"]["value"] > 0
