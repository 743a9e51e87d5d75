"""Curriculum: measured success rates, choices of prompts, and checkpoints of both."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import test_async_rollouts as asynchronous
import test_rollout_filter as synchronous
from config_inputs import make_working_folder
from msrl.cli.configuration import load_configuration as load
from msrl.config.schema import Config, FilterConfig
from msrl.config.sections.general import CurriculumConfig, RunConfig
from msrl.config.sections.reward import RewardConfig
from msrl.config.sections.rollout import AsyncConfig
from msrl.errors import ManyErrors, MsrlError
from msrl.rewards.score import Scores
from msrl.types import Prompt, Reward, RolloutGroup, ScoredGroup
from msrl.workflows.rl import setup
from msrl.workflows.rl.asynchronous.rollouts import AsyncRollouts
from msrl.workflows.rl.levels import prompt_levels
from msrl.workflows.rl.rollouts import Rollouts
from msrl.workflows.rl.step import Clock
from support import assert_mentions, mentions

RANGE = CurriculumConfig(sampler="success_range")
REPLAY = CurriculumConfig(sampler="replay", options={"share": 0.9})


def judged(groups: Sequence[RolloutGroup]) -> Scores:
    """Score each group by its prompt: of three prompts, one has none, half and all right."""
    scored = [
        ScoredGroup(group, tuple(Reward(score, {"acc": score}) for score in rates(group)))
        for group in groups
    ]
    return Scores(tuple(scored), {}, ())


def rates(group: RolloutGroup) -> list[float]:
    kind = group.prompt.index % 3
    return [float(kind > n) for n, _ in enumerate(group.completions)]


class Judged(asynchronous.Scoring):
    def score(self, groups: Sequence[RolloutGroup]) -> Scores:
        super().score(groups)  # takes a random time
        return judged(groups)


class JudgedEngine(synchronous.RecordingEngine):
    def score(self, groups: tuple[RolloutGroup, ...]) -> Scores:
        return judged(groups)


def add_curriculum(job: Any, section: CurriculumConfig) -> Any:
    """Set the curriculum of the fake setup of a run with a verifier."""
    job.config.data = Config().data.model_copy(update={"curriculum": section})
    job.config.run, job.config.eval = RunConfig(seed=3), Config().eval
    job.config.reward = RewardConfig.model_validate({"sources": [{"verifier": "acc"}]})
    job.levels = prompt_levels(section, job.prompts.dataset, len(job.prompts.rows))
    return job


def rollouts_of(
    section: CurriculumConfig, engine: Any, state: dict[str, Any], groups: FilterConfig
) -> Rollouts:
    """Return synchronous rollouts of four prompts per step from twelve rows."""
    made = synchronous.make_rollouts(engine, groups)
    job: Any = add_curriculum(made._job, section)
    return Rollouts(job, engine, engine, state)


@pytest.mark.parametrize("section", [RANGE, REPLAY], ids=["success_range", "replay"])
@pytest.mark.parametrize("refill", [False, True])
def test_a_resumed_run_samples_the_prompts_of_the_uninterrupted_one(
    section: CurriculumConfig, refill: bool
):
    groups = FilterConfig(kind="all_equal", refill=True) if refill else FilterConfig()
    engine = JudgedEngine(set())
    rollouts = rollouts_of(section, engine, {}, groups)
    states = list[str]()
    for step in range(6):
        rollouts.generate(step, Clock())
        states.append(json.dumps(rollouts.state()))
    again = JudgedEngine(set())
    resumed = rollouts_of(section, again, json.loads(states[2]), groups)
    for step in range(3, 6):
        resumed.generate(step, Clock())
    assert again.calls and engine.calls[-len(again.calls) :] == again.calls
    assert json.dumps(resumed.state()) == states[5]


def test_every_prompt_is_sampled_once_before_the_sampler_repeats_those_in_range():
    engine = JudgedEngine(set())
    section = CurriculumConfig(sampler="success_range", options={"outside": 0.0})
    rollouts = rollouts_of(section, engine, {}, FilterConfig())
    measured = [rollouts.generate(step, Clock()).metrics for step in range(4)]
    assert sorted(itertools.chain(*engine.calls[:3])) == [*range(12)]
    assert {*engine.calls[3]} == {1, 4, 7, 10}  # half of their responses are right
    assert measured[0]["curriculum/measured"] == pytest.approx(1 / 3)
    expected = {"measured": 1.0, "success": 0.5, "first_pool": 1 / 3, "repeated": 1.0}
    assert measured[3] == pytest.approx({f"curriculum/{k}": v for k, v in expected.items()})


def test_the_replay_repeats_informative_prompts_beside_new_ones():
    engine = JudgedEngine(set())
    rollouts = rollouts_of(REPLAY, engine, {}, FilterConfig())
    for step in range(6):
        rollouts.generate(step, Clock())
    counts = Counter(itertools.chain(*engine.calls))
    assert min(counts[n] for n in (1, 4, 7, 10)) > max(counts[n] for n in range(12) if n % 3 != 1)


def test_prompts_of_a_level_share_a_success_rate_that_moves_by_the_momentum():
    section = CurriculumConfig(
        sampler="success_range", level_column="digits", initial_difficulty=True, momentum=0.75
    )
    extra = [{"digits": str(n % 2), "difficulty": str(n / 8)} for n in range(4)]
    prompts = [Prompt(n, np.array([1]), extra=extra[n]) for n in range(4)]
    levels = prompt_levels(section, prompts, 4)
    assert levels.of_prompts.tolist() == [0, 1, 0, 1]
    assert levels.success.tolist() == [0.875, 0.75]  # means of 1, 0.75 and of 0.875, 0.625

    engine = JudgedEngine(set())
    rollouts = rollouts_of(CurriculumConfig(sampler="replay"), engine, {}, FilterConfig())
    job: Any = rollouts._job
    job.levels, job.config.data = levels, Config().data.model_copy(update={"curriculum": section})
    job.prompts = type(job.prompts)(prompts, tuple(range(4)), job.prompts.order)
    rollouts = Rollouts(job, engine, engine, {})  # type: ignore[arg-type] - both in one
    rollouts.generate(0, Clock())  # all four prompts, of which 0, 1, 2 have 0, 0.5 and 1; 3 has 0
    curriculum = rollouts._curriculum
    assert curriculum is not None
    assert curriculum._success == pytest.approx([0.75 * 0.875 + 0.25 * 0.5, 0.75**2 + 0.25 * 0.25])


@pytest.mark.parametrize(
    ("sets", "extra", "expected"),
    [
        ({"level_column": "digits"}, {}, ["level_column=digits", "prompt 0", "map_keys"]),
        ({"initial_difficulty": True}, {"difficulty": "hard"}, ["initial_difficulty", "'hard'"]),
        ({"initial_difficulty": True}, {"difficulty": "7"}, ["initial_difficulty", "7", "0 "]),
    ],
)
def test_a_column_that_does_not_fit_is_one_line(
    sets: dict[str, Any], extra: dict[str, str], expected: list[str]
):
    section = CurriculumConfig(sampler="success_range", **sets)
    with pytest.raises(MsrlError, match=mentions(*expected)):
        prompt_levels(section, [Prompt(0, np.array([1]), extra=extra)], 1)


def test_a_step_without_any_verdict_is_refused():
    engine = synchronous.RecordingEngine(set())  # scores another source
    rollouts = rollouts_of(RANGE, engine, {}, FilterConfig())
    with pytest.raises(MsrlError, match=mentions("data.curriculum.sampler", "eval.source")):
        rollouts.generate(0, Clock())


def test_a_step_needs_as_many_prompts_as_the_data_has():
    made = synchronous.make_rollouts(JudgedEngine(set()), FilterConfig(), prompts_per_step=13)
    job: Any = add_curriculum(made._job, RANGE)
    with pytest.raises(MsrlError, match=mentions("rollout.prompts_per_step=13", "has 12")):
        setup._levels(job.config, job.prompts)


def async_run(
    section: CurriculumConfig, steps: range, state: dict[str, Any], **changes: Any
) -> tuple[list[int], dict[str, Any]]:
    """Return the trained rows of some steps of an asynchronous run, and its state."""
    options = AsyncConfig(max_staleness=2, **changes)
    plain = asynchronous.make_rollouts(options)
    job = add_curriculum(asynchronous.make_job(options, start_step=steps.start), section)
    workers = asynchronous.LocalEngines()

    def publish(version: int) -> None:
        workers.call("update_weights", version)

    engines = type(plain._engines)(workers, None)
    scorer: Any = Judged()
    with AsyncRollouts(job, engines, scorer, publish, state) as rollouts:
        rows = asynchronous.row_numbers(asynchronous.train(rollouts, steps))
        return rows, json.loads(json.dumps(rollouts.state()))


@pytest.mark.parametrize("section", [RANGE, REPLAY], ids=["success_range", "replay"])
def test_an_asynchronous_run_chooses_its_prompts_independently_of_delays_and_resumes(
    section: CurriculumConfig,
):
    steps = range(asynchronous.STEPS)
    rows, state = async_run(section, steps, {})
    slow, slow_state = async_run(section, steps, {}, max_running_groups=1)
    first, saved = async_run(section, range(2), {})
    second, resumed_state = async_run(section, range(2, asynchronous.STEPS), saved)
    assert rows == slow == [*first, *second]
    assert state["curriculum"] == slow_state["curriculum"] == resumed_state["curriculum"]
    batches = [rows[n : n + asynchronous.BATCH] for n in range(0, len(rows), asynchronous.BATCH)]
    assert all(len({*batch}) == asynchronous.BATCH for batch in batches)


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["options={high: 0.1}"], ("data.curriculum.options", "low=0.2", "high=0.1")),
        (["options={low: x}"], ("data.curriculum.options.low=x", "number")),
        (["options={high: 2.0}"], ("data.curriculum.options.high=2.0", "at most 1")),
        (["options={share: 0.5}"], ("data.curriculum.options.share", "unknown option")),
        (["sampler=success"], ("data.curriculum.sampler=success", "success_range")),
        (["sampler=null", "momentum=0.5"], ("data.curriculum.momentum", "data.curriculum.sampler")),
    ],
)
def test_an_invalid_curriculum_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: list[str], expected: tuple[str, ...]
):
    monkeypatch.chdir(make_working_folder(tmp_path))
    keys = ["sampler=success_range", *sets]
    with pytest.raises((MsrlError, ManyErrors)) as caught:
        load(["grpo.yaml"], [f"data.curriculum.{key}" for key in keys], command="train-grpo")
    assert_mentions(caught.value, *expected)


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (["data.shuffle=false"], ("data.shuffle=false", "data.curriculum.sampler")),
        (["data.train=null", "data.blend={data: 1.0}"], ("data.curriculum.sampler", "data.blend")),
        (
            ["reward.sources=[{url: 'http://127.0.0.1:1'}]"],
            ("data.curriculum.sampler", "eval.source"),
        ),
    ],
)
def test_a_curriculum_names_what_it_cannot_be_combined_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: list[str], expected: tuple[str, ...]
):
    monkeypatch.chdir(make_working_folder(tmp_path))
    with pytest.raises((MsrlError, ManyErrors)) as caught:
        load(["grpo.yaml"], ["data.curriculum.sampler=replay", *sets], command="train-grpo")
    assert_mentions(caught.value, *expected)
