"""Prometheus endpoint, profiles, distributions and the values of tokens that a run logs."""

from __future__ import annotations

import json
import os
import re
import urllib.request
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from config_inputs import make_working_folder
from msrl.algorithms.packing import Sequences
from msrl.cli.configuration import load_configuration
from msrl.config.loader import load
from msrl.config.schema import Config
from msrl.errors import MsrlError
from msrl.plan.run_plan import resolve
from msrl.platforms import get
from msrl.rollout.engine import EngineMetrics
from msrl.tracking.plots import plot_distributions
from msrl.tracking.prometheus import MetricsServer, PrometheusTracker
from msrl.trainer.objective.requests import TokenRequest
from msrl.types import Prompt, StepReport
from msrl.workflows.rl.setup import numbered_engine_settings
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.token_values import TokenValues, size_note
from msrl.workflows.rl.update.batches import PreparedStep
from msrl.workflows.training.trainer_group import ForwardResult
from prepared_steps import make_step, scored_group
from support import ROOT, assert_mentions, mentions
from training_runs import listening_hosts


def read(port: int, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return reply.read().decode()


def free_tracker() -> PrometheusTracker:
    return PrometheusTracker(0, "grpo")


def test_prometheus_reads_the_last_value_of_each_metric():
    tracker = free_tracker()
    tracker.log(StepReport(1, {"reward/mean": 0.5, "eval/pass@1": 0.25}, {"update": 2.0}, ("x",)))
    tracker.log(StepReport(2, {"reward/mean": float("nan")}, {"update": 1.5}))
    lines = read(tracker.port).splitlines()
    assert set().union(*listening_hosts([os.getpid()]).values()) == {"127.0.0.1"}
    tracker.close()
    assert 'msrl_step{run="grpo"} 2.0' in lines
    assert 'msrl_metric{name="eval/pass@1",run="grpo"} 0.25' in lines
    assert 'msrl_metric{name="reward/mean",run="grpo"} NaN' in lines
    assert 'msrl_stage_seconds{run="grpo",stage="update"} 1.5' in lines
    assert 'msrl_notes_total{run="grpo"} 1.0' in lines


def test_a_port_in_use_is_one_message():
    tracker = free_tracker()
    with pytest.raises(MsrlError, match=mentions("log.prometheus", tracker.port, "another port")):
        PrometheusTracker(tracker.port, "grpo")
    tracker.close()


def test_engines_use_the_ports_after_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    make_working_folder(tmp_path)
    sets = ["cluster.devices_per_node=2", "log.prometheus=9400", "run.name=math"]
    loaded = load_configuration(["grpo.yaml"], sets, command="train-grpo").config
    engines = numbered_engine_settings(resolve(loaded, "train-grpo"))
    endpoints = [EngineMetrics(port, "math") for port in (9401, 9402)]
    assert [engine.metrics for engine in engines] == endpoints


def test_a_port_of_an_engine_in_use_is_one_message():
    tracker = free_tracker()
    with pytest.raises(MsrlError, match=mentions("log.prometheus", tracker.port, "another port")):
        MetricsServer(tracker.port)
    tracker.close()


def test_the_dashboard_reads_series_that_the_endpoint_has():
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    tracker = free_tracker()
    tracker.log(StepReport(1, {"reward/mean": 1.0}, {"update": 1.0}, ("x",)))
    series = set(re.findall(r"^(\w+)\{", read(tracker.port), re.MULTILINE))
    tracker.close()
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= 10
    assert set(re.findall(r"msrl_\w+", " ".join(queries))) == series - {"msrl_notes_created"}


def test_distributions_are_plotted(tmp_path: Path):
    path = tmp_path / "distributions" / "step_000010.png"
    plot_distributions({"reward": [0.0, 1.0, float("nan")], "length": [3.0] * 5}, path, title="x")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_profiler_of_a_platform_writes_a_trace(tmp_path: Path):
    import torch

    with get("cpu").profiler(tmp_path / "rank_00000"):
        torch.ones(8) @ torch.ones(8)
    trace = json.loads((tmp_path / "rank_00000.json").read_text())
    assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])


def config(tmp_path: Path, *sets: str) -> Config:
    (tmp_path / "grpo.yaml").write_text(
        "rollout: {prompts_per_step: 32, samples_per_prompt: 2, max_prompt_tokens: 8,\n"
        "          max_response_tokens: 8}\n"
    )
    return load([str(tmp_path / "grpo.yaml")], sets=list(sets)).config


class Ranks:
    """Training ranks that count their forward passes and return the positions of sequences."""

    dp_size = 3

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def forward(self, request: TokenRequest, sequences: Sequences, limits: object) -> ForwardResult:
        """Return the first token of a sequence as log-probabilities, its negative as entropies."""
        self.calls.append((request.model, len(sequences.token_ids)))
        assert all(mask.sum() == 2 for mask in sequences.loss_masks)
        rows = tuple(np.full(len(ids), ids[0], np.float32) for ids in sequences.token_ids)
        values = {"logprobs": rows, "entropies": tuple(-row for row in rows)}
        return ForwardResult({name: values[name] for name in request.values})


def prepared_step(num_samples: int, **fields: Any) -> PreparedStep:
    """Return a step of one response to each prompt, of which every other one is trained on."""
    prompts = [Prompt(n, np.array([n, 1])) for n in range(num_samples)]
    groups = [scored_group(prompt, [0.0], [2]) for prompt in prompts]
    step = make_step(groups, None, np.arange(num_samples)[:, None] % 2 == 0)
    sequences = step.sequences
    return replace(step, sequences=sequences._replace(fields={**sequences.fields, **fields}))


def token_values(config: Config, notes: list[str], num_bytes: int = 0) -> tuple[TokenValues, Ranks]:
    ranks = Ranks()
    log: Any = SimpleNamespace(is_over=lambda limit: num_bytes > limit, folder="rollouts")
    return TokenValues(config, ranks, log, notes.append), ranks  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "count"), [("none", 0), ("sampled", 4), ("all", 64)])
def test_values_are_computed_for_the_logged_samples(tokens: str, count: int, tmp_path: Path):
    values, ranks = token_values(config(tmp_path, f"log.tokens={tokens}"), [])
    columns = values.of_step(prepared_step(64), Clock())
    assert ranks.calls == ([("policy", count)] if count else [])
    assert {*columns} == ({"trainer_logprobs", "entropies"} if count else set())
    for name, arrays in columns.items():
        sign = 1 if name == "trainer_logprobs" else -1
        assert [array[0] for array in arrays] == [sign * n for n in range(count)]


@pytest.mark.parametrize(
    ("has", "missing"), [("old_logprobs", "entropies"), ("entropies", "trainer_logprobs")]
)
def test_only_the_missing_values_are_recorded(has: str, missing: str, tmp_path: Path):
    values, _ = token_values(config(tmp_path, "log.tokens=all"), [])
    assert [*values.of_step(prepared_step(6, **{has: ()}), Clock())] == [missing]


def test_values_of_the_reference_are_computed_alone_if_the_step_has_the_others(tmp_path: Path):
    settings = ("log.tokens=all", "algo.kl.reward.coef=0.1", "model.path=policy")
    values, ranks = token_values(config(tmp_path, *settings), [])
    clock = Clock()
    columns = values.of_step(prepared_step(6, old_logprobs=(), entropies=()), clock)
    assert ranks.calls == [("reference", 6)] and "token_values" in clock.seconds
    assert [*columns] == ["reference_logprobs"]


def test_values_that_the_step_has_are_not_computed_again(tmp_path: Path):
    values, ranks = token_values(config(tmp_path, "log.tokens=all"), [])
    assert values.of_step(prepared_step(6, old_logprobs=(), entropies=()), Clock()) == {}
    assert ranks.calls == []


def test_values_end_at_the_size_limit_with_one_note(tmp_path: Path):
    notes: list[str] = []
    limited = config(tmp_path, "log.tokens=all", "log.tokens_max_gb=0.000001")
    values, ranks = token_values(limited, notes, num_bytes=2000)
    for _ in range(2):
        assert values.of_step(prepared_step(6), Clock()) == {}
    assert ranks.calls == []
    (note,) = notes
    assert_mentions(note, "log.tokens_max_gb", "limit")


def test_the_size_of_the_record_is_known_before_the_run(tmp_path: Path):
    assert size_note(config(tmp_path), 10) is None
    note = size_note(config(tmp_path, "log.tokens=all"), 1000)
    # 1000 steps of 64 samples with 16 tokens: 18 bytes and two values of 4 bytes each
    assert note is not None
    assert_mentions(
        note, "log.tokens=all", f"{1000 * 64 * 16 * 26 / 1e9:.3g} GB", "log.tokens_max_gb"
    )


def test_a_session_profiles_only_its_steps(tmp_path: Path):
    from msrl.workflows.training.session import TrainingSession

    calls: list[tuple[str, ...]] = []
    trainers = SimpleNamespace(
        begin_profile=lambda folder, ranks: calls.append((folder.name, str(ranks))),
        end_profile=lambda: calls.append(("end",)),
    )
    session = TrainingSession.__new__(TrainingSession)
    profiled = config(tmp_path, "log.profile.steps=[2]", "log.profile.ranks=[0,1]")
    session._config, session._trainers = profiled, trainers  # type: ignore[assignment]
    session._start_step, session._step, session._num_steps, session._is_over = 0, 0, 3, False
    log = SimpleNamespace(path=tmp_path, show_stage=lambda *_: None)
    session._log = log  # type: ignore[assignment]
    for step in session.steps():
        calls.append((str(step + 1),))
    assert calls == [("1",), ("step_000002", "(0, 1)"), ("2",), ("end",), ("3",)]
