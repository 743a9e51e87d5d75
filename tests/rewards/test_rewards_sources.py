"""Reward sources in real worker processes: user functions, names, tags and failure policies."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from msrl.errors import ManyErrors, MsrlError
from msrl.rewards.pool import Pool
from msrl.rewards.score import Scorer, Source
from msrl.rewards.shaping import with_neutral_totals
from msrl.rewards.sources import mistakes
from msrl.types import Image, PlacedImage, Reward, ScoredGroup
from reward_groups import group, totals
from support import assert_each_mentions, assert_mentions, mentions

OWN = """
import time
from other_file import FACTOR
from math import floor as rounded

def longer(response, answer, *, than=3):
    return FACTOR * float(len(response) > than)

def of_row(response, answer, extra):
    return float(extra.get("grade", -1))

def stuck_at_b(response, answer):
    while response == "b":
        time.sleep(1)
    return float(len(response))

async def later(response, answer):
    return 1.0

def alone(response):
    return 1.0

def with_prompt(prompt, response, answer):
    return 1.0

def renamed(gold, text):
    return 1.0

def both(solution_str, response):
    return 1.0

def needs_prompts(prompts, completions, **kwargs):
    return [1.0]

def everything(**kwargs):
    return 1.0

def of_trl(completions, ground_truth, level=None, **kwargs):
    right = zip(completions, ground_truth, strict=True)
    return [float(text == truth) + 10 * float((level or [0])[0]) for text, truth in right]

def swapped(answer, response):
    return float(response == "a") + 10 * float(answer == "7")

def neutral(x, y):
    return float(x == "a") + 10 * float(y == "7")

def ordered(response, answer, /):
    return float(response == "a") + 10 * float(answer == "7")

def verl(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "gsm8k" and extra_info["split"] == "test"
    return {"score": float(solution_str == "a") + 10 * float(ground_truth == "7"), "acc": True}

async def verl_later(*, solution_str, ground_truth, **kwargs):
    assert set(kwargs) == {"data_source", "extra_info"}
    return float(solution_str == "a") + 10 * float(ground_truth == "7")

def sizes(response, answer, images):
    return float("".join(str(len(open(path, "rb").read())) for path in images) or -1)

def sizes_of_trl(completions, images, **kwargs):
    return [sizes(text, "", paths) for text, paths in zip(completions, images, strict=True)]

def suffixes(response, answer, images=(), than=3):
    return float(sum(path.endswith(".png") for path in images))

def texts(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0]
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "other_file.py").write_text("FACTOR = 2.0\n")
    return str(tmp_path / "own.py")


def test_a_function_of_the_user_scores_with_its_options_and_the_columns_of_the_row(own):
    sources = [
        Source(function=f"{own}:longer", options={"than": 1}, weight=0.5),
        Source(function=f"{own}:of_row", name="grade"),
    ]
    with Scorer(sources, 1) as scorer:
        scores = scorer.score([group("a", "bb", grade="7"), group("ccc")])
    assert totals(scores) == [[7.0, 8.0], [0.0]]
    assert scores.groups[0].rewards[1].scores == {"longer": 2.0, "grade": 7.0}
    assert scores.means() == {"longer": pytest.approx(4 / 3), "grade": pytest.approx(13 / 3)}


@pytest.mark.parametrize(
    ("name", "options", "fragments"),
    [
        ("own.py", {}, ("path/file.py:NAME",)),
        ("nowhere.py:f", {}, ("nowhere.py", "file")),
        ("own.py:longr", {}, ("longr", "'longer'")),
        ("own.py:longer", {"then": 3}, ("then", "option", "'than'")),
        ("own.py:with_prompt", {}, ("with_prompt", "prompt", "response, answer")),
        ("own.py:renamed", {}, ("renamed", "gold, text", "verl", "TRL")),
        ("own.py:both", {}, ("both", "solution_str, response", "verl")),
        ("own.py:of_trl", {"ground_truth": 1}, ("of_trl", "ground_truth")),
        ("own.py:needs_prompts", {}, ("needs_prompts", "prompts", "TRL")),
        ("own.py:everything", {}, ("everything", "**kwargs", "TRL")),
        ("broken.py:f", {}, ("broken.py", "Python")),
    ],
)
def test_an_invalid_function_is_refused_without_running_its_file(
    own, monkeypatch, name, options, fragments
):
    monkeypatch.chdir(Path(own).parent)
    Path("broken.py").write_text("def f(:\n")
    with pytest.raises(ManyErrors, match=mentions(*fragments)):
        Scorer([Source(function=name, options=options)], 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "name", ["swapped", "neutral", "ordered", "verl", "verl_later", "later", "alone", "of_trl"]
)
def test_a_function_is_called_by_the_names_of_its_parameters(own, name):
    """The response is "a" and the ground truth "7"."""
    columns = {"data_source": "gsm8k", "split": "test", "level": "1"}
    with Scorer([Source(function=f"{own}:{name}", on_failure="fail")], 1) as scorer:
        scores = scorer.score([group("a", answer="a" if name == "of_trl" else "7", **columns)])
    assert totals(scores) == [[1.0 if name in ("later", "alone") else 11.0]]


def test_a_function_that_is_imported_is_checked_when_it_is_loaded(own):
    importing = Path(own).parent / "importing.py"
    importing.write_text("from own import with_prompt\n")
    source = Source(function=f"{importing}:with_prompt")
    with Scorer([source], 1) as scorer, pytest.raises(MsrlError, match=mentions("prompt", "verl")):
        scorer.score([group("a")])


def test_a_function_that_names_images_gets_their_files_while_it_is_called(own, monkeypatch):
    files = [b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff of a camera"]
    images = [Image(str(number), (1, 2, 2), data) for number, data in enumerate(files)]
    with_images = group("a", "b")
    placed = tuple(PlacedImage(number, image) for number, image in enumerate(images))
    with_images = replace(with_images, prompt=replace(with_images.prompt, images=placed))
    sent = list[tuple[str, ...]]()
    mapped = Pool.map

    def recorded(pool, calls):
        calls = list(calls)
        sent.extend(call.images for call in calls)
        return mapped(pool, calls)

    monkeypatch.setattr(Pool, "map", recorded)
    names = ["sizes", "sizes_of_trl", "suffixes", "longer"]
    sources = [Source(function=f"{own}:{name}", on_failure="fail") for name in names]
    with Scorer(sources, 1) as scorer:
        scores = scorer.score([with_images, group("a")])
    first, second, third = (reward for each in scores.groups for reward in each.rewards)
    assert first.scores == second.scores
    assert [first.scores[name] for name in names] == [815.0, 815.0, 1.0, 0.0]
    assert [third.scores[name] for name in names] == [-1.0, -1.0, 0.0, 0.0]
    paths = {path for each in sent for path in each}
    assert len(paths) == 2 and sum(map(bool, sent)) == 6, "one file per image, for those who ask"
    assert not any(Path(path).exists() for path in paths)


def test_a_function_that_is_imported_gets_no_images(own):
    importing = Path(own).parent / "importing.py"
    importing.write_text("from own import sizes\n")
    with (
        Scorer([Source(function=f"{importing}:sizes")], 1) as scorer,
        pytest.raises(MsrlError, match=mentions("sizes", "images", "defines")),
    ):
        scorer.score([group("a")])


def test_a_file_that_fails_when_it_runs_is_a_user_error(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("import nowhere_at_all\ndef f(response, answer):\n    return 1.0\n")
    with (
        Scorer([Source(function=f"{file}:f")], 1) as scorer,
        pytest.raises(MsrlError, match=mentions("own.py:f", "nowhere_at_all")),
    ):
        scorer.score([group("a")])


def test_a_row_is_scored_by_the_sources_of_its_tag():
    sources = [
        Source(verifier="acc", tags=("math",)),
        Source(verifier="exact_match", tags=("words", "names"), weight=2.0),
        Source(verifier="step", weight=0.5),
        Source(verifier="acc", name="strict", tags=("math",), options={"percent": False}),
    ]
    with Scorer(sources, 1) as scorer:
        scores = scorer.score(
            [
                group(r"\boxed{0.04}", tag="math"),
                group("Bo", answer="Bo", tag="names"),
                group("x", answer=""),
            ]
        )
    assert [dict(g.rewards[0].scores) for g in scores.groups] == [
        {"acc": 1.0, "step": 0.0, "strict": -0.5},
        {"exact_match": 1.0, "step": 0.0},
        {"step": 0.0},
    ]
    assert totals(scores) == [[0.5], [2.0], [0.0]]


def test_a_row_without_a_source_is_refused():
    with Scorer([Source(verifier="acc", tags=("math",))], 1) as scorer:
        with pytest.raises(MsrlError, match=mentions("row 3", "code", "math", "extra.tag")):
            scorer.score([group("a", index=3, tag="code")])
        with pytest.raises(MsrlError, match=mentions("row 3", "None")):
            scorer.score([group("a", index=3)])


def test_rows_that_cannot_be_scored_are_found_before_any_is():
    sources = [
        Source(verifier="acc", tags=("math",)),
        Source(url="http://a", tags=("chat",), options={"prompt_column": "question"}),
    ]
    fine = [group(tag="math").prompt, group(answer="", tag="chat", question="why?").prompt]
    with Scorer(sources, 1) as scorer:
        scorer.check(fine)
        for bad, fragments in (
            (group(tag="code", index=5), ("row 5", "code")),
            (group(answer=" ", tag="math", index=6), ("acc", "row 6", "ground truth")),
            (group(tag="chat", index=7), ("prompt_column=question", "column")),
        ):
            with pytest.raises(MsrlError, match=mentions(*fragments)):
                scorer.check([*fine, bad.prompt])


@pytest.mark.slow
def test_a_failure_is_wrong_or_undecided_or_the_end_as_configured(own):
    def source(*, timeout_s=3.0, **options):
        return Source(function=f"{own}:stuck_at_b", timeout_s=timeout_s, **options)

    sources = [source(wrong=-3.0), source(name="undecided", on_failure="undecided")]
    with Scorer(sources, 4) as scorer:  # one process for each call that is stuck
        scores = scorer.score([group("a", "b", "ccc"), group("b")])
    assert [[r.scores["stuck_at_b"] for r in g.rewards] for g in scores.groups] == [
        [1.0, -3.0, 3.0],
        [-3.0],
    ]
    assert [[r.scores.get("undecided") for r in g.rewards] for g in scores.groups] == [
        [1.0, None, 3.0],
        [None],
    ]
    assert [g.is_decided for g in scores.groups] == [[True, False, True], [False]]
    assert [g.rewards[-1].total for g in scores.groups] == [6.0, 0.0]
    assert scores.groups[0].rewards[1].total == 4.0  # the mean of the others
    assert scores.means()["undecided"] == 2.0
    assert scores.failures == {"stuck_at_b/timeout": 2, "undecided/timeout": 2}
    assert_mentions(scores.notes[1], "undecided/timeout: 2 ", "prompt 0", "3 s")
    with (
        Scorer([source(timeout_s=0.4, on_failure="fail")], 1) as scorer,
        pytest.raises(MsrlError, match=mentions("stuck_at_b", "timeout", "prompt 5")),
    ):
        scorer.score([group("b", index=5)])


def test_all_mistakes_of_the_sources_are_found_at_once():
    messages = list(
        mistakes(
            [
                Source(verifier="acc", options={"tolerance": "x", "tolerence": 1}),
                Source(),
                Source(verifier="acc", function="a.py:f"),
                Source(verifier="exact_match", options={"part": "end"}),
                Source(verifier="regex_match"),
            ]
        )
    )
    assert [(number, key) for number, key, _ in messages] == [
        (0, "options.tolerence"),
        (0, "options.tolerance"),
        (1, "verifier"),
        (2, "function"),
        (3, "options.part"),
        (4, "verifier"),
    ]
    assert "valid number" in messages[1][2]
    assert_mentions(messages[2][2], "verifier, function, url, model", 0)
    assert "'response', 'last_line', 'boxed' or 'answer'" in messages[4][2]
    assert_each_mentions(
        [message for *_, message in mistakes([Source(verifier="acc", weight=0.0)])], ("weights", 0)
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_option_that_is_not_finite_is_refused(value: float) -> None:
    source = Source(verifier="repetition", options={"max_penalty": value})
    assert_each_mentions(
        [" ".join(map(str, mistake)) for mistake in mistakes([source])], ("max_penalty", "finite")
    )


def test_an_undecided_reward_among_equal_scores_is_bitwise_equal_to_them():
    """0.1 + 0.1 + 0.1 is not 0.3, and a difference in the last bit would create an advantage."""
    rewards = tuple(Reward(0.1, {}, is_decided) for is_decided in (True, True, False, True))
    scored = with_neutral_totals(ScoredGroup(group("a", "b", "c", "d"), rewards))
    assert [reward.total for reward in scored.rewards] == [0.1] * 4
