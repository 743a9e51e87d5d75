"""Verdicts of `msrl diagnose mismatch` on recorded evidence, and its output."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import evidence as recorded
import families
from mixture_families import QWEN3_MOE
from msrl.algorithms.packing import Sequences
from msrl.cli import app
from msrl.config.sections.general import ModelConfig
from msrl.diagnose.checks import CHECKS
from msrl.diagnose.evidence import Evidence, Logprobs
from msrl.diagnose.gap import HEALTHY, healthy_range, measure, share_outside_clip_range
from msrl.diagnose.verdict import judge
from msrl.errors import MsrlError
from msrl.trainer.objective.requests import TokenRequest
from msrl.types import (
    Completion,
    Prompt,
    Reward,
    RolloutGroup,
    SamplingParams,
    ScoredGroup,
    VersionRun,
)
from msrl.workflows.diagnose.reference import config_settings, filter_logits, shape_settings
from msrl.workflows.diagnose.report import as_json, as_text
from msrl.workflows.diagnose.target import choose_step
from msrl.workflows.rl.logprob_gap import ROUNDING_FILE, GapMonitor
from msrl.workflows.rl.step import Clock
from msrl.workflows.rl.update.batches import PreparedStep
from msrl.workflows.rl.update.values import StepValues
from prepared_steps import make_step
from support import assert_mentions, mentions

BFLOAT16 = ModelConfig()


def test_a_healthy_model_gets_no_verdict() -> None:
    verdict = judge(recorded.healthy())
    assert verdict.cause is None
    assert all(comparison.is_healthy for comparison in verdict.comparisons)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_of_a_dtype_is_no_cause(dtype: str) -> None:
    healthy = recorded.healthy()
    noisy = recorded.noisy_engine(healthy, HEALTHY[dtype].mean)
    engine, trainer = replace(noisy.engine, dtype=dtype), replace(noisy.trainer, dtype=dtype)
    assert judge(replace(noisy, engine=engine, trainer=trainer)).cause is None
    assert judge(noisy).cause is not None


def bfloat16_evidence(rounding: float, *, error: float = 0.0) -> Evidence:
    """Return evidence of three bfloat16 implementations that each round independently.

    The ranks compute something else than transformers by `error` in every dtype.
    """
    healthy, exact = recorded.healthy(), recorded.exact()
    shift = np.float32(error)
    fields = dataclasses.fields(healthy.logprobs)
    names = [field.name for field in fields if not field.name.startswith("reference")]
    rounded = {
        name: exact + recorded.rounding(recorded.N, seed, rounding)
        for seed, name in enumerate(names)
    }
    for name in ("trainer", "trainer_packed", "trainer_alone"):
        rounded[name] = rounded[name] + shift
    references = {field.name: exact for field in fields if field.name.startswith("reference")}
    wide = exact + recorded.rounding(recorded.N, 50) + shift
    logprobs = Logprobs(**{**rounded, **references, "trainer_in_float32": wide})
    assert healthy.recorded is not None
    return replace(
        healthy,
        engine=replace(healthy.engine, dtype="bfloat16"),
        trainer=replace(healthy.trainer, dtype="bfloat16"),
        logprobs=logprobs,
        recorded=replace(healthy.recorded, behavior=rounded["sampled"], trainer=rounded["trainer"]),
    )


@pytest.mark.parametrize("rounding", [0.001, 0.05, 0.2])
def test_rounding_of_bfloat16_is_named_however_much_the_model_amplifies_it(rounding: float) -> None:
    evidence = bfloat16_evidence(rounding)
    verdict = judge(evidence)
    assert verdict.cause is None
    assert all(comparison.is_healthy for comparison in verdict.comparisons)
    assert verdict.rounding is not None
    assert verdict.rounding.mean == pytest.approx(rounding * math.sqrt(2 / math.pi), rel=0.1)
    text = as_text(verdict, evidence)
    assert_mentions(text, "healthy", "rounding of bfloat16", "0.8 to 1.2", "model.logits_dtype")
    report = json.loads(as_json(verdict, evidence))
    assert report["rounding"]["num_tokens"] == recorded.N


def test_a_difference_that_is_larger_than_the_rounding_of_the_model_is_no_rounding() -> None:
    """A gap of 0.02 nats is within the range of larger models, but not of this one."""
    evidence = recorded.noisy_engine(bfloat16_evidence(0.001), 0.02)
    cause = judge(evidence).cause
    assert cause is not None
    assert cause.name == "unknown"


def test_ranks_that_differ_from_transformers_in_float32_are_no_rounding() -> None:
    verdict = judge(bfloat16_evidence(0.05, error=0.01))
    assert verdict.cause is not None
    differing = [each.compared for each in verdict.comparisons if not each.is_healthy]
    assert differing == ["trainer in float32, transformers"]


def test_the_cost_is_the_share_of_ratios_outside_the_usual_clip_range() -> None:
    sampled = np.zeros(8, np.float32)
    trainer = np.log(np.array([1, 1.1, 0.9, 1.25, 0.75, 1, 1, np.nan], np.float32))
    assert share_outside_clip_range(sampled, trainer) == pytest.approx(3 / 8)


def test_every_check_has_an_injected_cause() -> None:
    assert set(CHECKS) == {*recorded.CAUSES, "recorded"}


@pytest.mark.parametrize("name", recorded.CAUSES)
def test_an_injected_cause_is_named(name: str) -> None:
    cause = judge(recorded.CAUSES[name]()).cause
    assert cause is not None
    assert cause.name == name


@pytest.mark.parametrize("name", recorded.CAUSES)
def test_no_other_check_precedes_the_one_of_a_cause(name: str) -> None:
    evidence = recorded.CAUSES[name]()
    for other, check in CHECKS.items():
        if other == name:
            return
        assert check(evidence) is None, other


def test_the_verdict_names_the_weight_and_the_side() -> None:
    cause = judge(recorded.weights()).cause
    assert cause is not None
    assert_mentions(cause.problem, "lm_head.weight")
    assert cause.where == "engine"
    healthy = recorded.healthy()
    digests = {**healthy.trainer.digests, "lm_head.weight": "float32 [2] other"}
    trainer = replace(healthy.trainer, digests=digests)
    cause = judge(replace(healthy, trainer=trainer)).cause
    assert cause is not None
    assert (cause.name, cause.where) == ("weights", "trainer")


def test_filters_of_sampling_are_named_with_their_values() -> None:
    cause = judge(recorded.filtered_sampling()).cause
    assert cause is not None
    assert cause.name == "sampling"
    assert_mentions(cause.problem, "top_p=0.9")
    assert judge(recorded.tempered_evidence()).cause is None


def test_the_first_deviating_layer_is_named() -> None:
    cause = judge(recorded.layer()).cause
    assert cause is not None
    assert_mentions(cause.problem, "layer 2")


def test_a_record_of_another_version_is_named() -> None:
    healthy = recorded.healthy()
    assert healthy.recorded is not None
    stale = replace(healthy.recorded, behavior=healthy.recorded.behavior - np.float32(0.3))
    cause = judge(replace(healthy, recorded=stale)).cause
    assert cause is not None
    assert cause.name == "weights"
    assert_mentions(cause.problem, "step 5", "version 4")


def test_an_unexplained_difference_is_no_healthy_verdict() -> None:
    evidence = recorded.noisy_engine(recorded.healthy())
    cause = judge(evidence).cause
    assert cause is not None
    assert cause.name == "unknown"


def test_values_that_are_no_numbers_count_as_infinitely_different() -> None:
    gap = measure(np.array([np.nan, -1.0], np.float32), np.array([-1.0, -1.0], np.float32))
    assert gap.largest == np.inf
    assert gap.exceeds(healthy_range("bfloat16"))


def test_the_gap_has_mean_percentile_and_maximum() -> None:
    left = np.zeros(200, np.float32)
    right = np.zeros(200, np.float32)
    right[:4] = (1.0, 0.5, 0.25, 0.25)
    gap = measure(left, right)
    assert gap.mean == pytest.approx(0.01)
    assert (gap.p99, gap.largest, gap.num_tokens) == (0.5, 1.0, 200)


def test_filters_keep_the_tokens_that_sampling_keeps() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    def allowed(**options: float) -> list[bool]:
        sampling = SamplingParams(max_tokens=1, **options)  # pyright: ignore[reportArgumentType]
        return torch.isfinite(filter_logits(logits, sampling))[0].tolist()

    assert allowed() == [True, True, True, True]
    assert allowed(top_p=0.6) == [True, True, False, False]
    assert allowed(top_k=3) == [True, True, True, False]
    assert allowed(min_p=0.4) == [True, True, False, False]


def test_the_output_has_differences_verdict_and_remedy() -> None:
    evidence = recorded.attention()
    verdict = judge(evidence)
    text = as_text(verdict, evidence)
    assert_mentions(text, "attention", "rope_theta=5000.0", "10000.0", "remedy", "tokens")
    report = json.loads(as_json(verdict, evidence))
    assert report["cause"]["name"] == "attention"
    assert report["comparisons"][0]["num_tokens"] == recorded.N
    healthy = recorded.healthy()
    assert json.loads(as_json(judge(healthy), healthy))["healthy"]


def gap_step(trainer_shift: float, version: int = 3) -> PreparedStep:
    """Return a step whose trainer's log-probabilities are shifted by so many nats."""
    response = np.array([7, 8, 9, 9], np.int64)
    logprobs = np.array([-1.0, -2.0, -0.5, -0.5], np.float32)
    runs = (VersionRun(2, 1), VersionRun(version, 3))
    completion = Completion(response, logprobs, "stop", 2, "", runs)
    prompt = Prompt(0, np.array([1, 2], np.int64))
    group = ScoredGroup(RolloutGroup(prompt, (completion,)), (Reward(1.0, {}),))
    trained = np.concatenate((np.zeros(2), [-9.0], logprobs[1:] + trainer_shift))
    values = StepValues(policy=(trained.astype(np.float32),))
    return make_step([group], None, None, "train.updates.epochs=2", values=values)


def test_the_gap_of_a_step_counts_tokens_of_the_current_version_only() -> None:
    prepared = gap_step(0.25)
    notes: list[str] = []
    monitor = GapMonitor(
        BFLOAT16, Path("runs/grpo"), notes.append, is_async=True, has_one_update=False
    )
    metrics = monitor.metrics(3, prepared, {}, {})
    assert metrics == pytest.approx(
        {
            "rollout/logprob_gap": 0.25,
            "rollout/logprob_gap_p99": 0.25,
            "rollout/logprob_gap_max": 0.25,
        }
    )
    assert monitor.metrics(4, prepared, {}, {}) == {}


def test_the_alarm_names_the_command_once_until_the_gap_is_healthy_again() -> None:
    notes: list[str] = []
    monitor = GapMonitor(
        BFLOAT16, Path("runs/grpo"), notes.append, is_async=True, has_one_update=False
    )
    for shift in (0.001, 0.25, 0.25, 0.001, 0.25):
        monitor.metrics(3, gap_step(shift), {}, {})
    assert len(notes) == 2
    assert_mentions(notes[0], "msrl diagnose mismatch runs/grpo", "step 4", "bfloat16", "0.03")


class Ranks:
    """Ranks whose log-probabilities in bfloat16 are `rounding` away from those in float32."""

    def __init__(self, rounding: float) -> None:
        self.rounding, self.requests = rounding, list[TokenRequest]()

    def forward(self, request: TokenRequest, sequences: Sequences, _: object) -> Any:
        self.requests.append(request)
        shift = 0.0 if request.in_float32 else self.rounding
        return {"logprobs": [np.full(len(ids), shift) for ids in sequences.token_ids]}


def test_the_alarm_follows_the_rounding_of_the_model_which_a_run_measures_once(
    tmp_path: Path,
) -> None:
    notes, prepared, clock = list[str](), gap_step(0.25), Clock()
    for ranks, requests in ((Ranks(0.15), 2), (Ranks(0.01), 0)):  # the second one is a resumed run
        monitor = GapMonitor(BFLOAT16, tmp_path, notes.append, is_async=True, has_one_update=False)
        for _ in range(2):
            monitor.prepare(prepared, cast("Any", ranks), 0.7, clock)
            monitor.metrics(3, prepared, {}, {})
        assert len(ranks.requests) == requests
        assert all(request.temperature == 0.7 for request in ranks.requests)
    assert notes == []  # 0.25 nats are less than twice 0.15
    wide = ModelConfig(logits_dtype="float32")  # other settings round differently
    monitor = GapMonitor(wide, tmp_path, notes.append, is_async=True, has_one_update=False)
    monitor.prepare(prepared, cast("Any", Ranks(0.01)), 0.7, clock)
    monitor.metrics(3, prepared, {}, {})
    assert_mentions(notes[0], "rounding of bfloat16", "0.02", "msrl diagnose mismatch")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"dtype": 3}'])
def test_a_damaged_record_of_the_rounding_is_replaced(text: str, tmp_path: Path) -> None:
    (tmp_path / ROUNDING_FILE).write_text(text)
    monitor = GapMonitor(BFLOAT16, tmp_path, print, is_async=True, has_one_update=False)
    monitor.prepare(gap_step(0.25), cast("Any", Ranks(0.15)), 1.0, Clock())
    values = json.loads((tmp_path / ROUNDING_FILE).read_text())
    assert values["mean"] == pytest.approx(0.15)


def test_float32_has_no_measured_rounding(tmp_path: Path) -> None:
    model, ranks = ModelConfig(dtype="float32"), Ranks(0.15)
    monitor = GapMonitor(model, tmp_path, print, is_async=True, has_one_update=False)
    monitor.prepare(gap_step(0.25), cast("Any", ranks), 1.0, Clock())
    assert not ranks.requests and not (tmp_path / ROUNDING_FILE).exists()


def test_the_mean_of_the_update_is_the_gap_where_no_forward_pass_precedes_it() -> None:
    prepared = gap_step(0.0)
    fields = {n: v for n, v in prepared.sequences.fields.items() if n != "old_logprobs"}
    plain = replace(prepared, sequences=prepared.sequences._replace(fields=fields))
    trained = {"sampler_logprob_difference": 0.002}
    notes: list[str] = []
    folder = Path("runs/grpo")
    monitor = GapMonitor(BFLOAT16, folder, notes.append, is_async=False, has_one_update=True)
    assert monitor.metrics(3, plain, {}, trained) == {"rollout/logprob_gap": 0.002}
    monitor.metrics(4, plain, {}, {"sampler_logprob_difference": 0.2})
    assert "p99" not in notes[0]  # which was not measured
    later = GapMonitor(BFLOAT16, Path("runs/grpo"), print, is_async=False, has_one_update=False)
    assert later.metrics(3, plain, {}, trained) == {}
    logged = {"trainer_logprobs": prepared.sequences.fields["old_logprobs"]}
    assert "rollout/logprob_gap_max" in later.metrics(3, plain, logged, trained)


def test_settings_of_training_and_defaults_of_config_classes_are_not_compared() -> None:
    shape = families.shape(QWEN3_MOE)
    values = {**QWEN3_MOE, "router_aux_loss_coef": 0.001, "pruned_heads": None}
    assert config_settings(values, shape) == shape_settings(shape)
    other = config_settings({**values, "num_experts_per_tok": 2}, shape)
    expected = shape_settings(shape)
    assert [name for name in expected if other[name] != expected[name]] == [
        "feed_forward.experts_per_token"
    ]


@pytest.mark.parametrize(
    ("steps", "files", "expected"),
    [([2, 4, 6], [1, 2, 3, 4, 5, 6], 4), ([6], [1, 2, 6], 6), ([], [1], 0), ([3], [], 3)],
)
def test_a_run_is_diagnosed_at_the_newest_step_with_a_record(
    steps: list[int], files: list[int], expected: int
) -> None:
    assert choose_step(steps, dict.fromkeys(files, Path("x"))) == expected


def test_a_missing_folder_and_a_template_of_a_run_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MsrlError, match=mentions("no such folder", "absent")):
        app.app(["diagnose", "mismatch", str(tmp_path / "absent")], standalone_mode=False)
    (tmp_path / "config.yaml").write_text("run: {name: x}\n")
    with pytest.raises(MsrlError, match=mentions("--template", "run")):
        arguments = ["diagnose", "mismatch", str(tmp_path), "--template", "qwen"]
        app.app(arguments, standalone_mode=False)
