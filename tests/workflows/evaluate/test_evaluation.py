"""Evaluation during training: correct responses, pass@k by counting, and refused settings."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from config_inputs import GRPO, TRAINING, make_data, make_model
from msrl.algorithms.pass_at_k import depths, pass_at_k
from msrl.cli.configuration import load_configuration as load
from msrl.errors import ManyErrors
from msrl.rewards.sources import Source
from msrl.rewards.verdicts import Judge
from msrl.tracking.report import summarize
from msrl.types import (
    Completion,
    Episode,
    Prompt,
    Reward,
    RolloutGroup,
    ScoredGroup,
    StepReport,
)
from msrl.workflows.episodes.metrics import episode_metrics
from msrl.workflows.rollout_log import RolloutLog
from msrl.workflows.training.best import Best
from support import assert_each_mentions, checked_plan


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_choices_of_k_answers_with_a_right_one(count: int):
    for k in range(1, count + 1):
        expected = []
        for right in range(count + 1):
            drawn = list(itertools.combinations([True] * right + [False] * (count - right), k))
            expected.append(sum(map(any, drawn)) / len(drawn))
        np.testing.assert_allclose(pass_at_k(np.arange(count + 1), count, k), expected, atol=1e-12)
    with pytest.raises(ValueError, match=f"pass@{count + 1} of {count}"):
        pass_at_k(np.arange(2), count, count + 1)


def test_curves_are_drawn_at_powers_of_two_and_at_all_answers():
    assert [depths(count) for count in (1, 2, 3, 8, 12)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4, 8],
        [1, 2, 4, 8, 12],
    ]


def prompt(**extra: str) -> Prompt:
    return Prompt(0, np.array([1, 2]), "4", extra)


def score(row: Prompt, *scores: dict[str, float]) -> ScoredGroup:
    empty = Completion(np.zeros(0, np.int64), np.zeros(0, np.float32), "stop", 0, "")
    return ScoredGroup(
        RolloutGroup(row, (empty,) * len(scores)), tuple(Reward(0.0, score) for score in scores)
    )


def test_the_first_verifier_of_a_ground_truth_decides_and_its_full_score_is_right():
    judge = Judge(
        (Source(model="m"), Source(verifier="strict_format", weight=0.5), Source(verifier="acc"))
    )
    group = score(
        prompt(),
        *({"reward_model": 9.0, "strict_format": 1.0, "acc": score} for score in (1.0, -0.5, -1.0)),
    )
    assert judge.source_for(prompt()) == "acc"
    assert judge.verdicts([group]) == [[True, False, False]]
    assert Judge(judge.sources, right_from=-0.5).verdicts([group]) == [[True, True, False]]
    assert Judge(judge.sources, source="reward_model").verdicts([group]) == [[True] * 3]
    assert Judge((Source(verifier="step"), Source(url="http://a"))).source_for(prompt()) == "step"


def test_every_row_is_judged_by_a_source_of_its_tag_and_by_a_model_only_if_configured():
    judge = Judge(
        (
            Source(verifier="acc", tags=("math",)),
            Source(verifier="multiple_choice", tags=("choice",)),
            Source(model="m", tags=("talk",)),
        )
    )
    assert [judge.source_for(prompt(tag=tag)) for tag in ("math", "choice", "talk")] == [
        "acc",
        "multiple_choice",
        None,
    ]
    assert judge.verdicts([score(prompt(tag="talk"), {"reward_model": 3.0})]) == [None]
    assert Judge(judge.sources, source="acc").source_for(prompt(tag="choice")) is None


def play(*ends: tuple[str, bool | None], environment: str = "") -> ScoredGroup:
    """Return a group of episodes by their finish reason and the success that was reported."""
    nothing = np.zeros(0, np.int64), np.zeros(0, np.float32)
    completions = []
    for reason, success in ends:
        fault = ("crash", "gone") if reason == "fault" else ("", "")
        episode = Episode((), (), (), success, fault, environment=environment)
        completions.append(Completion(*nothing, reason, 0, "", (), episode))
    rollout = RolloutGroup(prompt(), tuple(completions))
    return ScoredGroup(rollout, tuple(Reward(0.0, {}) for _ in ends))


def test_episodes_that_an_environment_did_not_finish_are_not_successful():
    walks = [play(("stop", True)), play(("stop", False)), *[play(("turns", None))] * 8]
    verdicts = Judge(()).verdicts(walks)
    assert verdicts == [[True], *[[False]] * 9]
    assert episode_metrics([walk.rollout for walk in walks])["success"] == 0.1
    ends = [("length", None), ("time", None), ("fault", None), ("stop", True)]
    mixed = play(*ends, environment="lake")
    unknown = play(*ends[:3], environment="talk")
    assert Judge(()).verdicts([mixed, unknown]) == [[False, False, False, True], None]
    assert episode_metrics([mixed.rollout, unknown.rollout])["success"] == pytest.approx(1 / 3)
    assert "success" not in episode_metrics([unknown.rollout])


def test_the_best_evaluation_is_the_lowest_loss_or_the_highest_of_anything_else_and_never_nan():
    for sign, is_loss in ((1.0, True), (-1.0, False)):
        best = None
        for step, value in enumerate([math.nan, 3.0, 2.0, math.nan, 2.0]):
            best = Best.after(best, step, sign * value, is_loss=is_loss)
        assert best == Best(2, sign * 2.0, since=2)


def test_a_report_counts_steps_and_not_the_evaluation_before_them():
    reports = [
        StepReport(0, {"eval/pass@1": 0.1}),
        StepReport(1, {"train/loss": 2.0}),
        StepReport(2, {"eval/pass@1": 0.3}),
    ]
    summary = summarize(reports)
    assert (summary.first_step, summary.last_step, summary.num_steps) == (1, 2, 2)
    pass_rate = summary.metrics["eval/pass@1"]
    assert (pass_rate.first, pass_rate.last) == (0.1, 0.3)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    for name in ("data", "held"):
        make_data(tmp_path / name)
    (tmp_path / "sft.yaml").write_text(TRAINING)
    (tmp_path / "grpo.yaml").write_text(GRPO)
    return tmp_path


def mistakes(command: str, *sets: str) -> list[str]:
    resolved = load([f"{command}.yaml"], [*sets])
    try:
        checked_plan(resolved, f"train-{command}")
    except ManyErrors as error:
        return [line.removeprefix("--set: ") for line in error.messages]
    return []


SAMPLED = (
    "eval.samples_per_prompt=4",
    "eval.sampling.temperature=0.6",
    "eval.sampling.top_p=0.95",
    "eval.patience=2",
)
GREEDY = ("greedy", "eval.sampling.temperature")
EVERY = ("data.eval=held", "eval.every_steps=5")


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("command", "sets", "fragments"),
    [
        ("grpo", (*EVERY, *SAMPLED), None),
        (
            "grpo",
            (*EVERY, "eval.source=acc", "checkpoint.keep_best=true", "eval.at_start=true"),
            None,
        ),
        ("grpo", ("eval.at_start=true",), ("eval.at_start=true", "data.eval")),
        (
            "grpo",
            (*EVERY, "eval.samples_per_prompt=4"),
            ("eval.samples_per_prompt=4", "greedy", "eval.sampling.temperature"),
        ),
        ("grpo", (*EVERY, "eval.sampling.top_p=0.9"), ("eval.sampling.top_p=0.9", *GREEDY)),
        (
            "grpo",
            ("data.eval=held", "eval.sampling.seed=3"),
            ("eval.sampling.seed=3", "eval.every_steps"),
        ),
        (
            "grpo",
            (*EVERY, "eval.max_response_tokens=500"),
            ("eval.max_response_tokens=500", "rollout.max_prompt_tokens", "564", "512"),
        ),
        (
            "grpo",
            (*EVERY, "eval.max_response_tokens=100", "rollout.engine.max_model_len=128"),
            ("rollout.engine.max_model_len=128", "eval.max_response_tokens", "164 tokens"),
        ),
        (
            "grpo",
            ("eval.prompts=8",),
            ("eval.prompts=8", "eval.every_steps"),
        ),
        (
            "grpo",
            (*EVERY, "eval.source=accuracy"),
            ("eval.source=accuracy", "reward.sources", "acc"),
        ),
        ("grpo", ("eval.patience=2",), ("eval.patience=2", "eval.every_steps")),
        (
            "sft",
            (*EVERY, "eval.sampling.temperature=0.5"),
            ("eval.sampling.temperature=0.5", "train-grpo"),
        ),
    ],
)
def test_invalid_settings_of_an_evaluation_are_one_line(
    folder: Path, command: str, sets: tuple[str, ...], fragments: tuple[str, ...] | None
):
    assert_each_mentions(mistakes(command, *sets), *([fragments] if fragments else []))


def test_a_longer_answer_in_evaluations_makes_the_engine_longer(folder: Path):
    from msrl.plan.derived import max_model_len

    assert max_model_len(load(["grpo.yaml"], [*EVERY]).config) == 128
    assert (
        max_model_len(load(["grpo.yaml"], [*EVERY, "eval.max_response_tokens=100"]).config) == 164
    )


def test_answers_are_written_with_their_scores(tmp_path: Path):
    import json

    from tiny_qwen2 import make_tokenizer

    class Text:
        backend = make_tokenizer()

    groups = [
        score(prompt(), {"acc": 1.0}, {"acc": -1.0}),
        score(prompt(tag="talk"), {"reward_model": 2.0}, {"reward_model": 1.0}),
    ]
    RolloutLog(tmp_path, Text(), is_on=True).write_evaluation(7, groups, [[True, False], None])  # pyright: ignore[reportArgumentType]
    rows = [
        json.loads(line)
        for line in (tmp_path / "eval" / "step_000007.jsonl").read_text().splitlines()
    ]
    assert [row["is_right"] for row in rows] == [True, False, None, None] and rows[0]["scores"] == {
        "acc": 1.0
    }
