"""Built-in environments play their scripted episodes in real processes."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from msrl import registry
from msrl.environments.base import Environment, EnvironmentSource, EpisodeFault, Opening, StepResult
from msrl.environments.builtin import (
    calculator,
    frozen_lake,
    gymnasium,
    search,
    sokoban,
    textarena,
)
from msrl.environments.builtin._grid import read_action
from msrl.environments.pool import EnvironmentPool
from msrl.errors import MsrlError
from msrl.rewards import sandbox
from scripted_episodes import ENVIRONMENTS, Script
from support import HANG_S, ROOT, assert_mentions, locate, mentions
from training_runs import children

NEEDS_A_SANDBOX = {"python_tool"}
SLOW = {"mcp", "endpoint", "textarena"}  # their packages take seconds to import
PACKAGES = ("mcp", "textarena")
OPPONENT = locate("textarena_opponent.py")


def text(reply: Opening | StepResult) -> str:
    return "\n".join(message.content for message in reply.messages)


@pytest.fixture(scope="module")
def quick_environments() -> Iterator[EnvironmentPool]:
    """Start one process that loads all environments whose packages are quick to import."""
    sources = {
        name: EnvironmentSource(name, options=script.options, timeout_s=HANG_S)
        for name, script in ENVIRONMENTS.items()
        if name not in SLOW and (not script.package or importlib.util.find_spec(script.package))
    }
    with EnvironmentPool(sources) as environments:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            environments.start()
        yield environments


@pytest.mark.parametrize("name", [name for name in ENVIRONMENTS if name not in SLOW])
def test_an_environment_plays_its_scripted_episode(name: str, quick_environments: EnvironmentPool):
    if name in NEEDS_A_SANDBOX and (reason := sandbox.refusal()):
        pytest.skip(reason)
    if ENVIRONMENTS[name].package:
        pytest.importorskip(ENVIRONMENTS[name].package)
    play(name, quick_environments)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW & {*ENVIRONMENTS}))
def test_an_environment_with_a_large_package_plays_its_scripted_episode(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    script = ENVIRONMENTS[name]
    if script.package:
        pytest.importorskip(script.package)
    monkeypatch.chdir(ROOT)
    source = EnvironmentSource(name, options=script.options, timeout_s=HANG_S)
    with EnvironmentPool({name: source}) as environments:
        play(name, environments)


def play(name: str, environments: EnvironmentPool) -> None:
    script = ENVIRONMENTS[name]
    opening = environments.open(name, {**script.row, "environment": name}).result(HANG_S)
    steps = [environments.step(name, answer).result(HANG_S) for answer in script.answers]
    check(script, opening, steps)


def check(script: Script, opening: Any, steps: list[Any]) -> None:
    """Compare an episode with its script."""
    assert isinstance(opening, Opening), opening
    assert [tool["function"]["name"] for tool in opening.tools] == list(script.tools)
    assert all(isinstance(step, StepResult) for step in steps), steps
    assert [step.reward for step in steps] == pytest.approx(list(script.rewards))
    assert [step.done for step in steps] == [False] * (len(steps) - 1) + [True]
    for expected, reply in zip(script.texts, [opening, *steps], strict=False):
        assert expected in text(reply)
    assert steps[-1].info.get("success") == script.success


@pytest.mark.full
@pytest.mark.slow
def test_an_episode_whose_mcp_server_is_killed_is_lost():
    pytest.importorskip("mcp")
    script = ENVIRONMENTS["mcp"]
    source = EnvironmentSource("mcp", options=script.options, timeout_s=HANG_S)
    with EnvironmentPool({"mcp": source}) as environments:
        environments.open("episode", dict(script.row)).result(HANG_S)
        server = script.options["command"][-1]
        pid = next(pid for pid, line in children(os.getpid()).items() if server in line)
        os.kill(pid, signal.SIGKILL)
        reply = environments.step("episode", script.answers[0]).result(HANG_S)
    assert isinstance(reply, EpisodeFault) and reply.reason == "lost"


# CliffWalking: the walk along the cliff has 13 steps of reward -1, and gymnasium has no threshold.
CLIFF_WALK = ("0", *("1",) * 11, "2")


@pytest.mark.parametrize(
    ("options", "answers", "success"),
    [
        ({"id": "CartPole-v1"}, ("1",) * 30, False),
        ({"id": "CartPole-v1", "success_return": 5.0}, ("1",) * 30, True),
        ({"id": "CliffWalking-v1"}, CLIFF_WALK, None),
        ({"id": "CliffWalking-v1", "success_return": -13.0}, CLIFF_WALK, True),
        ({"id": "CliffWalking-v1", "success_return": -12.0}, CLIFF_WALK, False),
    ],
)
def test_success_in_gymnasium_follows_from_its_return(options, answers, success):
    pytest.importorskip("gymnasium")
    assert last_result(gymnasium.environment(**options), answers).info.get("success") is success


def test_success_in_gymnasium_is_what_the_environment_reports(monkeypatch: pytest.MonkeyPatch):
    package = pytest.importorskip("gymnasium")
    cartpole = package.envs.classic_control.CartPoleEnv
    step = cartpole.step
    monkeypatch.setattr(cartpole, "step", lambda *a: (*step(*a)[:4], {"is_success": True}))
    room = gymnasium.environment(id="CartPole-v1")
    assert last_result(room, ("1",) * 30).info["success"] is True


def last_result(room: Environment, answers: Sequence[str]) -> StepResult:
    room.reset({"seed": 1})
    return next(result for answer in answers if (result := room.step(answer)).done)


def test_frozen_lakes_of_a_seed_are_equal_and_have_a_path():
    for seed in range(50):
        lakes = [frozen_lake.environment(hole_share=0.4) for _ in range(2)]
        texts = [lake.reset({"seed": seed})[0].content for lake in lakes]
        assert texts[0] == texts[1]
        lake = lakes[0]
        while not (result := lake.step(lake.best_action())).done:
            assert result.reward == 0.0
        assert result.info["success"] is True


@pytest.mark.parametrize(
    ("answer", "opens_thought", "action"),
    [
        ("<think>left</think> Up", False, "up"),
        ("<think><answer>left</answer>", False, None),
        ("left", True, None),
        ("<answer>left</answer>", True, None),
        ("left</think><answer>Up</answer>", True, "up"),
    ],
)
def test_an_action_is_not_read_from_a_thought(answer, opens_thought, action):
    assert read_action(answer, opens_thought=opens_thought) == action


def test_a_hole_ends_a_walk():
    lake = frozen_lake.environment(hole_share=0.4)
    lake.reset({"seed": next(seed for seed in range(100) if first_hole(seed))})
    assert lake.step("down").info["success"] is False


def first_hole(seed: int) -> bool:
    lake = frozen_lake.environment(hole_share=0.4)
    lake.reset({"seed": seed})
    return (1, 0) in lake.holes


def test_a_slippery_lake_moves_to_the_sides_in_two_of_three_steps():
    moves = []
    for seed in range(300):
        lake = frozen_lake.environment(size=9, hole_share=0.0, slippery=True)
        lake.reset({"seed": seed})
        lake.player = lake.player._replace(row=4, column=4)
        lake.step("left")
        moves.append(tuple(lake.player))
    counts = [moves.count(cell) for cell in ((4, 3), (3, 4), (5, 4))]
    assert sum(counts) == 300 and all(70 < count < 130 for count in counts)


def test_every_room_of_sokoban_is_solved_by_its_solution():
    for seed in range(50):
        room = sokoban.environment(num_boxes=1 + seed % 2, max_steps=1000)
        room.reset({"seed": seed})
        assert not room.boxes & room.targets
        results = [room.step(action) for action in room.solution]
        assert results[-1].info.get("success") is True


def test_a_box_is_not_pushed_into_a_wall_or_another_box():
    room = sokoban.environment(num_boxes=2)
    source = random.Random(0)
    for seed in range(20):
        room.reset({"seed": seed})
        for _ in range(29):
            room.step(source.choice(["left", "right", "up", "down"]))
            assert len(room.boxes) == 2
            assert not room.boxes & room.walls and room.player not in room.boxes | room.walls


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1 + 2 * 3", 7), ("-(2 ** 10)", -1024), ("7 / 2", 3.5), ("7 // 2 % 2", 1)],
)
def test_a_calculator_evaluates_arithmetic(expression, value):
    assert calculator.evaluate(expression) == value


@pytest.mark.parametrize(
    "expression",
    ["__import__('os')", "9 ** 9 ** 9", "1e308 * 10", "(-1) ** 0.5", "1 if 1 else 2", "'a' * 9",
     "1" * 201, "", "2 +", "True + 1", "9" * 199 + "e", "(" * 150],
)  # fmt: skip
def test_a_calculator_refuses_everything_else(expression):
    with pytest.raises((ValueError, ZeroDivisionError, OverflowError)):
        calculator.evaluate(expression)


@pytest.mark.parametrize(
    ("truth", "answer", "is_right"),
    [
        ("The answer is 42", "So it is 42.0", True),
        ("1267650600228229401496703205376", "1,267,650,600,228,229,401,496,703,205,376", True),
        ("1267650600228229401496703205376", "1267650600228229401496703205377", False),
        ("42", "I do not know", False),
        ("42", "9" * 10_000, False),
        ("9" * 400, "8" * 400, False),
    ],
)
def test_a_calculator_compares_the_last_numbers_exactly(truth, answer, is_right):
    room = calculator.environment(reward=True)
    room.reset({"answer": truth, "messages": [{"role": "user", "content": "q"}]})
    result = room.finish(answer)
    assert (result.reward, result.info["success"]) == (float(is_right), is_right)


def test_a_calculator_rewards_nothing_without_a_number_in_the_ground_truth():
    room = calculator.environment(reward=True)
    with pytest.raises(ValueError, match=mentions("ground truth", "number")):
        room.reset({"answer": "unknown"})


def test_bm25_prefers_rare_words_and_short_texts():
    long = "dog sat " + "sat " * 9 + "cat"
    index = search.BM25(["cat sat", "dog sat", long, "bird"])
    assert index.search("dog", 2) == ["dog sat", long]
    assert index.search("cat sat", 1) == ["cat sat"]
    assert index.search("fish", 3) == []


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("name", "options", "keywords"),
    [
        ("search", {}, ("corpus",)),
        ("search", {"corpus": "/no/corpus.jsonl"}, ("/no/corpus.jsonl",)),
        ("frozen_lake", {"size": 1}, ("size",)),
        ("sokoban", {"num_boxes": 0}, ("num_boxes",)),
        ("retry", {"verifier": "unknown"}, ("verifier", "unknown")),
        pytest.param("mcp", {}, ("command", "url"), marks=pytest.mark.slow),
        ("textarena", {"id": "GuesTheNumber-v0"}, ("id=GuesTheNumber-v0", "'GuessTheNumber-v0'")),
        ("textarena", {"id": "TicTacToe-v0"}, ("id=TicTacToe-v0", "players", "opponent")),
        ("textarena", {"id": "TicTacToe-v0", "players": 2}, ("players=2", "opponent")),
        ("textarena", {"id": "GuessTheNumber-v0", "options": {"x": 1}}, ("GuessTheNumber-v0", "x")),
        (
            "textarena",
            {"id": "TicTacToe-v0", "players": 2, "opponent": f"{OPPONENT}:first"},
            ("opponent=", "first"),
        ),
    ],
)
def test_options_without_meaning_are_refused_before_the_run(name, options, keywords):
    if name in PACKAGES:
        pytest.importorskip(name)
    source = EnvironmentSource(name, options=options)
    with EnvironmentPool({name: source}) as environments, pytest.raises(MsrlError) as error:
        environments.start()
    assert_mentions(error.value, *keywords)


@pytest.mark.parametrize("name", ["gymnasium", "mcp", "textarena"])
def test_a_missing_package_of_an_environment_is_one_line_with_its_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, name, None)
    module = registry.load(registry.ENVIRONMENTS, name, key="environment.name")
    with pytest.raises(MsrlError, match=mentions(name, f"msrl[{name}]")) as error:
        module.prepare(**({} if name == "mcp" else {"id": "any"}))
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_textarena_plays_the_other_seats_with_the_function_of_the_user():
    pytest.importorskip("textarena")
    game = {"id": "TicTacToe-v0", "players": 2, "opponent": f"{OPPONENT}:last_cell"}
    room = textarena.environment(**game)
    (opening,) = room.reset({"seed": 0})  # the model is player 0, who begins
    assert "[Player 1]" not in opening.content
    second = room.step("I take <answer>[0]</answer>")
    assert_mentions(second.messages[0].content, "[Player 1] [8]", "Player 1 placed")
    assert "I take" not in second.messages[0].content and second.reward == 0.0
    room.step("[1]")
    last = room.step("[2]")
    assert (last.done, last.reward, last.info) == (True, 1.0, {"success": True})
    room = textarena.environment(**game)
    (opening,) = room.reset({"seed": 1})
    assert_mentions(opening.content, "[Player 0] [8]")
    for move in ("[0]", "[1]", "[2]"):
        last = room.step(move)
        if last.done:
            break
    assert (last.done, last.reward, last.info) == (True, -1.0, {"success": False})


@pytest.mark.slow
def test_a_game_of_textarena_follows_from_the_seed_and_ends_at_invalid_moves():
    pytest.importorskip("textarena")
    texts = set()
    for seed in (1, 1, 2):
        room = textarena.environment(id="FrozenLake-v0-random")
        texts.add((seed, room.reset({"seed": seed})[0].content))
    assert len(texts) == 2
    room = textarena.environment(id="GuessTheNumber-v0")
    room.reset({"seed": 1})
    first, second = room.step("none"), room.step("none")
    assert first.info == {"invalid_action": True} and not first.done
    assert second.done and second.info == {"success": False, "invalid_action": True}


@pytest.mark.slow
def test_a_game_without_its_word_list_is_one_line():
    pytest.importorskip("textarena")
    nltk = pytest.importorskip("nltk")
    with pytest.raises(LookupError):
        nltk.data.find("corpora/words")
    with pytest.raises(MsrlError, match=mentions("id=Hangman-v0", "nltk.downloader")) as error:
        textarena.prepare(id="Hangman-v0")
    assert "\n" not in str(error.value)
