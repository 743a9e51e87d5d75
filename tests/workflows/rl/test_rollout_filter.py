"""`rollout.filter`: informative groups, prompts that replace filtered groups, and import from ROLL.

A fake engine records the sampled prompts; `test_killed_grpo.py` runs real engines with a filter.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from config_inputs import make_working_folder
from import_changes import FILTER, ROLL
from msrl.algorithms.selection import informative_groups
from msrl.cli.configuration import load_configuration as load
from msrl.config.schema import FilterConfig
from msrl.config.sources import Origin, plain, wrap
from msrl.data.order import RowOrder
from msrl.errors import ManyErrors, MsrlError
from msrl.importers.roll import files as roll
from msrl.rewards.score import Scores
from msrl.types import Completion, Prompt, Reward, RolloutGroup, SamplingParams, ScoredGroup
from msrl.workflows.rl.rollouts import Rollouts, select_informative
from msrl.workflows.rl.setup import Prompts
from msrl.workflows.rl.step import Clock
from support import assert_mentions, mentions

ROWS = 12


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected"),
    [
        ("none", None, None, [True, True, True, True]),
        ("all_equal", None, None, [False, True, False, True]),
        ("mean", 0.0, 1.0, [False, True, False, True]),
        ("mean", 0.3, None, [False, True, True, False]),
        ("mean", None, 0.5, [True, False, False, True]),  # strictly below
        ("std", 0.45, None, [False, True, False, False]),  # population deviations 0.5 and 0.433
        ("std", 0.0, None, [False, True, False, True]),
    ],
)
def test_informative_groups_agree_with_hand_calculation(
    kind: str, low: float | None, high: float | None, expected: list[bool]
):
    scores = np.array([[0, 0, 0, 0], [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 1]], dtype=np.float64)
    assert informative_groups(scores, scores >= 0, kind, low, high).tolist() == expected


def test_equal_scores_have_no_deviation_despite_rounding():
    scores = np.full((1, 3), 0.1)
    decided = np.ones((1, 3), np.bool_)
    assert scores.std(axis=1) > 0
    assert informative_groups(scores, decided, "std", 0.0).tolist() == [False]


class RecordingEngine:
    """Engine and scorer that record the rows of each call; rows in `equal` have equal rewards."""

    def __init__(self, equal: set[int]) -> None:
        self.equal, self.calls = equal, list[list[int]]()
        self.sampling = list[SamplingParams]()

    def onload(self) -> None:
        """Do nothing: no device memory is involved."""

    def generate(
        self, prompts: list[Prompt], sampling: SamplingParams, policy_version: int
    ) -> tuple[RolloutGroup, ...]:
        self.calls.append([prompt.index for prompt in prompts])
        self.sampling.append(sampling)
        answer = Completion(
            np.array([5]), np.array([-1.0], np.float32), "stop", policy_version, "5"
        )
        answers = (answer,) * (1 if sampling.temperature == 0 else 2)
        return tuple(RolloutGroup(prompt, answers) for prompt in prompts)

    def score(self, groups: tuple[RolloutGroup, ...]) -> Scores:
        def rewards(index: int) -> tuple[Reward, ...]:
            second = 1.0 if index in self.equal else 0.0
            return tuple(
                Reward(total, {"right": right}) for total, right in ((1.0, 1.0), (second, second))
            )

        return Scores(
            tuple(
                ScoredGroup(group, rewards(group.prompt.index)[: len(group.completions)])
                for group in groups
            ),
            {"right/timeout": 1},
            ("one",),
        )


def make_rollouts(
    engine: RecordingEngine,
    filter: FilterConfig,
    state: dict[str, Any] | None = None,
    *,
    prompts_per_step: int = 4,
    shuffle: bool = False,
    estimator: str = "group_norm",
) -> Rollouts:
    """Return rollouts of four prompts per step from twelve rows in file order."""
    dataset: Any = [Prompt(row, np.array([1, 2, 3])) for row in range(ROWS)]
    config = SimpleNamespace(
        rollout=SimpleNamespace(prompts_per_step=prompts_per_step, filter=filter),
        algo=SimpleNamespace(advantage=SimpleNamespace(estimator=estimator)),
    )
    prompts = Prompts(
        dataset, tuple(range(ROWS)), RowOrder(ROWS, prompts_per_step, seed=0, shuffle=shuffle)
    )
    setup: Any = SimpleNamespace(
        config=config, prompts=prompts, levels=None, sampling=SamplingParams(4), start_step=0
    )
    engine_and_scorer: Any = engine
    return Rollouts(setup, engine_and_scorer, engine_and_scorer, state or {})


def indices(groups: tuple[ScoredGroup, ...]) -> list[int]:
    return [group.rollout.prompt.index for group in groups]


def test_without_a_filter_steps_use_the_prompts_in_order():
    engine = RecordingEngine(set(range(ROWS)))
    rollouts = make_rollouts(engine, FilterConfig())
    steps = [rollouts.generate(step, Clock()) for step in range(2)]
    assert engine.calls == [[0, 1, 2, 3], [4, 5, 6, 7]] and rollouts.state() == {"prompts_taken": 8}
    assert (
        [indices(step.train_groups) for step in steps] == engine.calls
        and not steps[0].dropped_groups
        and not steps[0].metrics
    )


def test_remax_samples_one_greedy_response_per_prompt_beside_the_others():
    engine = RecordingEngine({1})
    step = make_rollouts(engine, FilterConfig(), estimator="remax").generate(0, Clock())
    assert engine.calls == [[0, 1, 2, 3], [0, 1, 2, 3]]
    greedy = engine.sampling[1]
    assert (greedy.num_samples, greedy.temperature, greedy.top_p, greedy.top_k) == (1, 0.0, 1.0, -1)
    for group in step.train_groups:
        assert group.greedy is not None
        assert len(group.rewards) == 2 and len(group.greedy.rewards) == 1
        assert group.greedy.rollout.prompt.index == group.rollout.prompt.index
    assert step.scores.failures == {"right/timeout": 2} and step.scores.notes == ("one", "one")


def test_a_refill_samples_as_many_prompts_as_are_likely_needed():
    engine = RecordingEngine({1, 3, 4})
    rollouts = make_rollouts(engine, FilterConfig(kind="all_equal", refill=True))
    clock = Clock()
    step = rollouts.generate(0, clock)
    # Two of four groups are informative and two are missing: four more are likely to give two.
    assert engine.calls == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert indices(step.train_groups) == [0, 2, 5, 6] and indices(step.dropped_groups) == [
        1,
        3,
        4,
        7,
    ]
    assert step.metrics == {
        "rollout/prompts": 8,
        "rollout/informative": 5 / 8,
        "rollout/refills": 1,
        "rollout/missing": 0,
    }
    assert len(step.scores.groups) == 8 and step.scores.failures == {"right/timeout": 2}
    assert {"rollout", "reward"} <= clock.seconds.keys()
    rollouts.generate(1, clock)
    assert engine.calls[2:] == [[8, 9, 10, 11]]


def test_a_resumed_run_uses_the_next_prompts():
    engine = RecordingEngine(set())
    make_rollouts(engine, FilterConfig(), {"prompts_taken": 7}).generate(1, Clock())
    assert engine.calls == [[7, 8, 9, 10]]


def test_extra_prompts_are_added_and_surplus_groups_are_dropped():
    engine = RecordingEngine({0})
    step = make_rollouts(
        engine, FilterConfig(kind="all_equal", refill=True, extra_prompts=1)
    ).generate(0, Clock())
    # One group is missing: 4 / 3 of it, rounded up, plus one extra prompt.
    assert engine.calls == [[0, 1, 2, 3], [4, 5, 6]]
    assert indices(step.train_groups) == [1, 2, 3, 4] and indices(step.dropped_groups) == [
        0,
        5,
        6,
    ]


@pytest.mark.parametrize(("most", "calls"), [(0, 1), (1, 2), (2, 3), (9, 3), (None, 3)])
def test_after_all_refills_or_rows_a_step_trains_uninformative_groups(most: int | None, calls: int):
    engine = RecordingEngine(set(range(ROWS)) - {2})
    section = FilterConfig(kind="all_equal", refill=True, max_refills=most)
    step = make_rollouts(engine, section).generate(0, Clock())
    assert len(engine.calls) == calls and sorted(itertools.chain(*engine.calls)) == list(
        range(4 * calls)
    ), "no row twice in a step"
    assert indices(step.train_groups) == [0, 1, 2, 3]
    assert select_informative(section, step.train_groups).tolist() == [False, False, True, False]
    assert step.metrics["rollout/missing"] == 3
    assert_mentions(step.scores.notes[-1], f"1 of {4 * calls} groups", f"{calls - 1} refills")


def test_a_step_without_informative_groups_is_reported():
    step = make_rollouts(
        RecordingEngine(set(range(ROWS))), FilterConfig(kind="all_equal", refill=True)
    ).generate(0, Clock())
    assert_mentions(step.scores.notes[-1], "0 of 12 groups", "2 refills")


def test_a_step_at_the_start_of_an_epoch_uses_no_prompt_twice():
    engine = RecordingEngine(set(range(ROWS)) - {9})
    rollouts = make_rollouts(
        engine, FilterConfig(kind="all_equal", refill=True, max_refills=1), {"prompts_taken": 8}
    )
    rollouts.generate(2, Clock())
    assert engine.calls == [[8, 9, 10, 11], [0, 1, 2, 3]] and rollouts.state() == {
        "prompts_taken": 16
    }
    rollouts = make_rollouts(
        engine, FilterConfig(kind="all_equal", refill=True, max_refills=3), {"prompts_taken": 9}
    )
    rollouts.generate(3, Clock())
    assert engine.calls[2:] == [[9, 10, 11, 0], [1, 2, 3, 4], [5, 6, 7, 8]], (
        "the step ends after all twelve rows"
    )
    shuffled = make_rollouts(
        engine := RecordingEngine(set(range(ROWS))),
        FilterConfig(kind="all_equal", refill=True),
        {"prompts_taken": 10},
        shuffle=True,
    )
    shuffled.generate(1, Clock())
    assert sorted(itertools.chain(*engine.calls)) == list(range(ROWS))


def test_a_step_of_more_prompts_than_rows_has_no_refill():
    engine = RecordingEngine(set(range(ROWS)))
    rollouts = make_rollouts(
        engine,
        FilterConfig(kind="all_equal", refill=True, max_refills=None),
        prompts_per_step=ROWS + 1,
    )
    step = rollouts.generate(0, Clock())
    assert engine.calls == [[*range(ROWS), 0]] and step.metrics["rollout/missing"] == ROWS + 1
    assert rollouts.state() == {"prompts_taken": ROWS + 1}


def test_without_refill_a_step_keeps_its_groups_and_reports_only_metrics():
    engine = RecordingEngine({1, 3})
    step = make_rollouts(engine, FilterConfig(kind="all_equal")).generate(0, Clock())
    assert indices(step.train_groups) == [0, 1, 2, 3] and step.scores.notes == ("one",)
    assert step.metrics["rollout/missing"] == 2 and step.metrics["rollout/informative"] == 0.5


def test_groups_are_filtered_by_the_configured_source():
    group = RolloutGroup(Prompt(0, np.array([1])), ())
    scored = ScoredGroup(group, (Reward(1.5, {"right": 1.0}), Reward(1.0, {"right": 1.0})))
    assert select_informative(FilterConfig(kind="all_equal"), [scored]).tolist() == [True]
    assert select_informative(
        FilterConfig(kind="all_equal", source="right"), [scored]
    ).tolist() == [False]
    assert select_informative(
        FilterConfig(kind="all_equal", source="elsewhere"), [scored]
    ).tolist() == [True], "the row has no reward of this source"


# --- configuration


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with all inputs of trainings."""
    monkeypatch.chdir(tmp_path)
    return make_working_folder(tmp_path)


@pytest.mark.parametrize(
    ("sets", "fragments"),
    [
        (["refill=true"], ("rollout.filter.refill=true", "rollout.filter.kind")),
        (["low=0.1"], ("rollout.filter.low=0.1", "rollout.filter.kind")),
        (
            ["kind=all_equal", "high=0.9"],
            ("rollout.filter.high=0.9", "rollout.filter.kind=all_equal"),
        ),
        (
            ["kind=std", "low=0.0", "high=0.9"],
            ("rollout.filter.high=0.9", "rollout.filter.kind=std"),
        ),
        (["kind=mean"], ("rollout.filter.kind=mean", "rollout.filter.low", "rollout.filter.high")),
        (
            ["kind=mean", "low=0.9", "high=0.1"],
            ("rollout.filter.low=0.9", "rollout.filter.high=0.1"),
        ),
        (
            ["kind=all_equal", "max_refills=2"],
            ("rollout.filter.max_refills=2", "rollout.filter.refill=true"),
        ),
        (["kind=all_equal", "source=nobody"], ("rollout.filter.source=nobody", "reward.sources")),
    ],
)
def test_an_invalid_filter_is_refused(folder: Path, sets: list[str], fragments: tuple[str, ...]):
    with pytest.raises((MsrlError, ManyErrors)) as caught:
        load(["grpo.yaml"], [f"rollout.filter.{key}" for key in sets], command="train-grpo")
    assert_mentions(caught.value, *fragments)


def test_a_filter_needs_several_samples_per_prompt(folder: Path):
    with pytest.raises(MsrlError, match=mentions("kind=all_equal", "samples")):
        sets = [
            "rollout.filter.kind=all_equal",
            "rollout.samples_per_prompt=1",
            "algo.advantage.estimator=reinforce",
        ]
        load(["grpo.yaml"], sets, command="train-grpo")


def roll_filter(**changes: Any) -> tuple[Any, list[str]]:
    """Return the filter and the errors of a translated ROLL configuration."""
    translation = roll.translate(wrap({**ROLL, **changes}, Origin("roll.yaml")), "roll.yaml")
    tree: Any = plain(translation.tree)
    return tree.get("rollout", {}).get("filter"), translation.errors


def test_roll_filters_of_the_run_and_of_its_domains_are_translated():
    mean = {"kind": "mean", "low": 0.1, "high": 0.9}
    assert roll_filter(**FILTER)[0] == mean
    assert roll_filter(query_filter_config={"type": "std_filter"})[0] == {
        "kind": "std",
        "low": -1.0,
    }, "the default threshold filters nothing"
    section, _ = roll_filter(
        query_filter_config={"type": "std_filter", "filter_args": {"std_threshold": 0.34}}
    )
    rewards = np.array([1.0, *[0.0] * 7])  # of 8 samples; ROLL's deviation divides by n - 1
    assert (
        rewards.std() > section["low"]
        and rewards.std(ddof=1) > 0.34
        and section["low"] == pytest.approx(0.34 * np.sqrt(7 / 8))
    )
    both = {**FILTER, "is_use_additional_prompts": True, "max_additional_running_prompts": 7}
    assert roll_filter(**both)[0] == {
        **mean,
        "refill": True,
        "extra_prompts": 7,
        "max_refills": None,
    }
    assert roll_filter(is_use_additional_prompts=True)[0] is None, "there is no filter"
    domains = {
        name: {"worker_cls": "x.MathRuleRewardWorker", **FILTER} for name in ("math", "logic")
    }
    assert roll_filter(rewards=domains)[0] == mean


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ({"threshold": 1}, ("filter_args.threshold", "std_threshold")),
        ({"std_threshold": None}, ("filter_args.std_threshold", "number")),
        ({"std_threshold": "x"}, ("filter_args.std_threshold", "number")),
        ([1], ("filter_args", "std_threshold")),
    ],
)
def test_invalid_roll_filters_are_reported(arguments: Any, fragments: tuple[str, ...]):
    (error,) = roll_filter(query_filter_config={"type": "std_filter", "filter_args": arguments})[1]
    assert_mentions(error, *fragments)


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"query_filter_config": {"type": "no_filter"}},
        {"query_filter_config": {"type": "std_filter"}},
    ],
)
def test_roll_domains_with_different_filters_are_refused(other: dict[str, Any]):
    domains = {
        "math": {"worker_cls": "x.MathRuleRewardWorker", **FILTER},
        "logic": {"worker_cls": "x.MathRuleRewardWorker", **other},
    }
    errors = roll_filter(rewards=domains)[1]
    assert errors and all("domains" in error and "rollout.filter" in error for error in errors)
