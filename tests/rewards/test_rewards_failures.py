"""Failures of reward sources in real worker processes.

A source without any score ends the step with its cause. A source that sometimes fails does not.
"""

import time
from http.server import BaseHTTPRequestHandler

import pytest

from http_servers import served_by
from msrl.errors import MsrlError
from msrl.rewards.failures import error_line
from msrl.rewards.pool import Call, Pool
from msrl.rewards.score import Scorer, Source
from msrl.rewards.worker import Function
from reward_groups import group
from support import assert_mentions

FUNCTIONS = """
import ctypes, os, sys, time

def raises(response, answer):
    raise KeyError("no such column\\nat all")

def nan(response, answer):
    return float("nan")

def text(response, answer):
    return response * 5000

def mapping(response, answer):
    return {"value": 1.0}

def nothing(response, answer):
    return None

def leaves(response, answer):
    sys.exit(3)

def exits(response, answer):
    os._exit(0)

def segfaults(response, answer):
    ctypes.string_at(0)

def hangs(response, answer):
    time.sleep(3600)

def is_slow_and_raises(response, answer):
    time.sleep(0.2)
    raise OSError("no connection")

def scores_a(response, answer):
    return 1.0 / (response == "a")

def hangs_unless_a(response, answer):
    while response != "a":
        time.sleep(1)
    return 1.0

def fine(response, answer):
    return 1.0
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(FUNCTIONS)
    return str(tmp_path / "own.py")


def refusal(scores, **options):
    with pytest.raises(MsrlError) as error:
        scores.require_scores("step 3", **options)
    return str(error.value)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "kind", "cause"),
    [
        ("raises", "error", "KeyError: 'no such column\\nat all'"),
        ("nan", "error", "nan"),
        ("text", "error", "(str)"),
        ("mapping", "error", "'score'"),
        ("nothing", "error", "(NoneType)"),
        ("leaves", "error", "SystemExit: 3"),
        ("exits", "crash", "died"),
        ("segfaults", "crash", "died"),
        ("hangs", "timeout", "within 0.3 s"),
    ],
)
def test_a_function_that_fails_on_every_call_ends_the_step_with_its_cause(own, name, kind, cause):
    timeout_s = 0.3 if kind == "timeout" else 60.0
    with Scorer([Source(function=f"{own}:{name}", timeout_s=timeout_s)], 2) as scorer:
        message = refusal(scorer.score([group("a", "b"), group("c", "d", index=1)]))
    assert (
        f"reward.sources[0].function={own}:{name}: all 4 calls of step 3 failed (4 {kind})"
        in message
    )
    assert cause in message and "Fix the function" in message
    assert "\n" not in message and len(message) < 1000


@pytest.mark.slow
def test_a_verifier_that_fails_on_every_call_ends_the_step():
    boxed = "\\boxed{" + "+".join(f"\\sqrt[{n}]{{x^{{{n}}}+{n}}}" for n in range(2, 60)) + "}"
    with Scorer([Source(verifier="acc", timeout_s=0.3)], 1) as scorer:
        message = refusal(scorer.score([group(boxed, answer="x^{7}+\\sqrt{y}")]))
    assert_mentions(message, "reward.sources[0].verifier=acc: ", "step 3", "(1 timeout)")


def test_a_source_that_fails_on_some_calls_is_counted_and_does_not_end_the_step(own):
    with Scorer([Source(function=f"{own}:scores_a")], 2) as scorer:
        scores = scorer.score([group("a", "b"), group("c", "d", index=1)])
    scores.require_scores("step 3")
    assert scores.failures == {"scores_a/error": 3}
    assert "scores_a/error: 3 scored as wrong; first at prompt 0" in scores.notes[0]


@pytest.mark.slow
def test_every_source_is_judged_by_its_own_calls(own):
    sources = [
        Source(function=f"{own}:fine"),
        Source(verifier="acc", tags=("math",)),
        Source(
            function=f"{own}:raises",
            name="grade",
            weight=0.0,
            tags=("math",),
            on_failure="undecided",
        ),
    ]
    with Scorer(sources, 2) as scorer:
        scorer.score([group("a")]).require_scores("step 3")  # no call, no failure
        message = refusal(scorer.score([group("a", "b"), group("c", "d", tag="math")]))
    assert f"reward.sources[2].function={own}:raises (name=grade): all 2 calls" in message
    assert "fine" not in message and "acc" not in message


def test_a_step_of_several_parts_is_judged_as_one(own):
    with Scorer([Source(function=f"{own}:scores_a")], 1) as scorer:
        good, bad = scorer.score([group("a")]), scorer.score([group("b", "c")])
    good.plus(bad).require_scores("step 3")
    joined = bad.plus(bad)
    assert "all 4 calls" in refusal(joined)
    joined.require_scores("step 3", only_stopped=True)  # nothing was skipped
    assert joined.failures == {"scores_a/error": 4} and len(joined.groups) == 2


@pytest.mark.slow
def test_a_function_that_hangs_on_every_call_takes_a_bounded_time(own):
    with Scorer(
        [Source(function=f"{own}:hangs", timeout_s=0.2), Source(function=f"{own}:fine")], 2
    ) as scorer:
        start = time.monotonic()
        scores = scorer.score([group(*"abcdefgh", index=index) for index in range(50)])
        # Running every call to its limit would take 400 * 0.2 s / 2 and 400 process starts.
        assert time.monotonic() - start < 60
    assert scores.failures["hangs/timeout"] < 20
    assert scores.failures["hangs/timeout"] + scores.failures["hangs/skipped"] == 400
    assert scores.means()["fine"] == 1.0
    message = refusal(scores, only_stopped=True)
    assert (
        f"all {scores.failures['hangs/timeout']} calls" in message
        and f"{scores.failures['hangs/skipped']} were skipped" in message
    )


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"), [("segfaults", "crash"), ("is_slow_and_raises", "error")]
)
def test_other_slow_failures_take_a_bounded_time_too(own, name, kind):
    with Scorer([Source(function=f"{own}:{name}", timeout_s=0.5)], 2) as scorer:
        scores = scorer.score([group(*"abcdefgh", index=index) for index in range(50)])
    assert scores.failures[f"{name}/{kind}"] < 200 < scores.failures[f"{name}/skipped"]


def test_quick_errors_do_not_stop_further_calls(own):
    with Scorer([Source(function=f"{own}:raises", timeout_s=10.0)], 2) as scorer:
        scores = scorer.score([group(*"abcdefgh", index=index) for index in range(50)])
    assert scores.failures == {"raises/error": 400}


@pytest.mark.slow
def test_hanging_on_the_first_prompts_does_not_stop_a_function_that_answers_others(
    own, monkeypatch
):
    monkeypatch.setattr("msrl.rewards.pool.MIN_LOST_LIMITS", 2)
    with Scorer([Source(function=f"{own}:hangs_unless_a", timeout_s=2.5)], 1) as scorer:
        scores = scorer.score([group(*"bcd"), *(group("a", index=index) for index in range(1, 4))])
    assert scores.failures == {"hangs_unless_a/timeout": 3}
    assert [g.rewards[0].total for g in scores.groups[1:]] == [1.0] * 3


@pytest.mark.slow
def test_a_stopped_worker_returns_the_calls_of_other_functions(own):
    functions = [
        Function("own", name, {}, limit_s, own)
        for name, limit_s in (("hangs", 0.2), ("fine", 60.0))
    ]
    with Pool(functions, 2) as pool:
        results = pool.map([Call(number % 2, "a", "") for number in range(200)])
    assert all(result.score == 1.0 for result in results[1::2])
    assert {result.failure for result in results[::2]} == {"timeout", "skipped"}


def test_a_server_that_never_answers_does_not_get_every_batch():
    class Silent(BaseHTTPRequestHandler):
        def do_POST(self):
            time.sleep(2.0)

        def log_message(self, *_):
            pass

    options = {"batch": 1, "concurrency": 2, "retries": 0}
    with served_by(Silent) as url:
        source = Source(url=url, timeout_s=0.2, on_failure="undecided", options=options)
        with Scorer([source], 1) as scorer:
            scores = scorer.score([group(*"abcdefgh", index=index) for index in range(3)])
    assert scores.failures["remote/skipped"] >= 18
    assert "reward.sources[0].url=http://127.0.0.1" in refusal(scores)


STACK = "Traceback (most recent " + 'call last):\n  File "a.py", line 1, in f\n    g()\n    ^^^\n'
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"


@pytest.mark.parametrize(
    ("detail", "line"),
    [
        ("no answer within 10 s", "no answer within 10 s"),
        (f"{STACK}ValueError: one\n  two\nthree\n", "ValueError: one two three"),
        (f"{STACK}KeyError: 1\n{DURING}{STACK}TypeError: 2\n", "TypeError: 2"),
        ("", ""),
    ],
)
def test_the_last_error_is_one_line(detail, line):
    assert error_line(detail) == line
    assert len(error_line("x" * 5000)) == 300
