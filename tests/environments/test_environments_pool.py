"""Environments that hang, crash or return nonsense, in real processes: one episode ends."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from types import SimpleNamespace

import pytest

from bad_environments import INJECTION
from msrl.data.rows.turns import ToolCall
from msrl.environments import pool_loop
from msrl.environments.base import EnvironmentSource, EpisodeFault, Opening, StepResult
from msrl.environments.pool import EnvironmentPool, select_environment
from msrl.environments.tool_formats import hermes
from msrl.errors import MsrlError
from msrl.http_requests import without_loopback_proxy
from msrl.types import Message
from support import HANG_S, assert_mentions, locate

FILE = locate("bad_environments.py")


def moody(timeout_s: float = 60.0, **options) -> EnvironmentSource:
    return EnvironmentSource(path=f"{FILE}:Moody", options=options, timeout_s=timeout_s)


def toolbox(timeout_s: float = 60.0) -> EnvironmentSource:
    return EnvironmentSource(path=f"{FILE}:Toolbox", timeout_s=timeout_s)


def pool(source: EnvironmentSource, **settings) -> EnvironmentPool:
    return EnvironmentPool({"it": source}, **settings)


@pytest.fixture(scope="module")
def shared() -> Iterator[EnvironmentPool]:
    """Start a process for the tests that neither end it nor count all faults."""
    with pool(moody(greeting="hi")) as environments:
        yield environments


@pytest.fixture(scope="module")
def tools() -> Iterator[EnvironmentPool]:
    with pool(toolbox()) as environments:
        yield environments


@pytest.fixture
def episode(request: pytest.FixtureRequest) -> str:
    """Return a name that no other test gives to its episode."""
    return request.node.name


def fault(future: Future) -> EpisodeFault:
    result = future.result(HANG_S)
    assert isinstance(result, EpisodeFault), result
    return result


def test_an_episode_keeps_its_state_between_steps(shared: EnvironmentPool, episode: str):
    before = dict(shared.fault_counts)
    opening = shared.open(episode, {"index": 3}).result(HANG_S)
    assert opening == Opening([Message("user", "hi 3")])
    results = [shared.step(episode, text).result(HANG_S) for text in ("x", "y", "end")]
    assert [r.messages[0].content for r in results] == ["x 1", "y 2", "end 3"]
    assert [(r.reward, r.done) for r in results] == [(1.0, False), (1.0, False), (1.0, True)]
    assert shared.fault_counts == before


def test_every_episode_has_a_process_of_its_own(shared: EnvironmentPool, episode: str):
    names = [f"{episode} {number}" for number in range(2)]
    for name in names:
        shared.open(name, {}).result(HANG_S)
    pids = {shared.step(name, "x").result(HANG_S).info["pid"] for name in names}
    assert len(pids) == 2 and os.getpid() not in pids


@pytest.mark.slow
def test_environments_reach_loopback_without_a_proxy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("no_proxy", "internal")
    with pool(moody()) as environments:
        environments.open("a", {}).result(HANG_S)
        info = environments.step("a", "x").result(HANG_S).info
    assert info["no_proxy"].split(",") == ["internal", "127.0.0.1", "localhost"]


def test_hosts_without_a_proxy_keep_their_meaning():
    assert without_loopback_proxy({"A": "1"})["NO_PROXY"] == "127.0.0.1,localhost"
    assert without_loopback_proxy({"NO_PROXY": "*"})["no_proxy"] == "*"
    both = without_loopback_proxy({"NO_PROXY": "a, localhost", "no_proxy": "b"})
    assert (both["NO_PROXY"], both["no_proxy"]) == (
        "a,localhost,127.0.0.1",
        "b,127.0.0.1,localhost",
    )


@pytest.mark.parametrize(
    ("mood", "reason", "keyword"),
    [
        ("segfault", "crash", "SIGSEGV"),
        ("exit", "crash", "7"),
        ("raise", "error", "broken"),
        ("memory", "error", "MemoryError"),
        ("big", "oversized", "limit"),
        ("empty", "invalid", "message"),
        ("assistant", "invalid", "assistant"),
        ("nan", "invalid", "nan"),
        ("object", "invalid", "JSON"),
        ("none", "invalid", "StepResult"),
        ("call text", "invalid", "tool_calls"),
        ("call number", "invalid", "tool_calls"),
    ],
)
def test_a_fault_ends_its_episode_with_a_counted_reason(shared, mood, reason, keyword):
    environments, before = shared, dict(shared.fault_counts)
    environments.open(mood, {}).result(HANG_S)
    environments.open(f"neighbor of {mood}", {}).result(HANG_S)
    result = fault(environments.step(mood, mood))
    assert result.reason == reason
    assert_mentions(result.detail, keyword)
    assert fault(environments.step(mood, "again")) == result
    assert environments.step(f"neighbor of {mood}", "x").result(HANG_S).reward == 1.0
    assert environments.fault_counts[reason] == before.get(reason, 0) + 1


@pytest.mark.slow
def test_the_memory_limit_begins_at_the_size_of_the_loaded_environments(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("LARGE", "1")
    source = EnvironmentSource(path=f"{FILE}:Large", timeout_s=60.0)
    with pool(source, memory_bytes=1 << 30) as environments:
        for name in "ab":
            environments.open(name, {}).result(HANG_S)
        assert environments.step("a", str(1 << 29)).result(HANG_S).done
        assert fault(environments.step("b", str(3 << 29))).reason == "error"


@pytest.mark.parametrize("mood", ["hang", "ignore signals"])
def test_a_call_over_the_time_limit_is_killed_with_its_children(shared, episode, mood):
    before = shared.fault_counts.get("timeout", 0)
    shared.open(episode, {}).result(HANG_S)
    pid = shared.step(episode, "x").result(HANG_S).info["pid"]
    shared._episodes[episode].timeout_s = 0.5
    assert fault(shared.step(episode, mood)).reason == "timeout"
    assert_ends(pid)
    assert shared.open(f"after {episode}", {}).result(HANG_S).messages
    assert shared.fault_counts["timeout"] == before + 1


def test_a_reply_that_is_not_read_yet_is_no_timeout(monkeypatch):
    """Stall the thread after it has seen no reply, until the reply has come and time is over."""
    with pool(moody()) as environments:
        environments.open("a", {}).result(HANG_S)
        late_s, stalls = [0.0], []
        selector, number = environments._loop._selector, environments._episodes["a"].number
        channel = environments._loop._known[number].channel

        def select(timeout=None):
            events = original(timeout)
            if stalls or not any(key.fileobj is channel for key, _ in events):
                return events
            stalls.append(timeout)
            late_s[0] += 1000.0
            return []

        original = selector.select
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s[0])
        monkeypatch.setattr(pool_loop, "time", clock)
        monkeypatch.setattr(selector, "select", select)
        assert isinstance(environments.step("a", "x").result(HANG_S), StepResult)
    assert stalls


def assert_ends(pid: int) -> None:
    """Wait until a session has no process."""
    for _ in range(200):
        sessions = [session(path) for path in Path("/proc").glob("[0-9]*/stat")]
        if pid not in sessions:
            return
        time.sleep(0.05)
    raise AssertionError(f"session {pid} has processes")


def session(path: Path) -> int:
    try:
        state, *fields = path.read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if state == "Z" else int(fields[2])


def test_a_fault_of_reset_is_the_result_of_open(shared, episode):
    with pool(moody(timeout_s=0.5)) as environments:
        assert fault(environments.open("a", {"mood": "hang"})).reason == "timeout"
    assert fault(shared.open(episode, {"mood": "raise"})).reason == "error"


def test_closing_an_episode_ends_its_process_and_cancels_its_call(shared, episode):
    before = dict(shared.fault_counts)
    shared.open(episode, {}).result(HANG_S)
    pid = shared.step(episode, "x").result(HANG_S).info["pid"]
    running = shared.step(episode, "hang")
    shared.close(episode)
    wait([running], HANG_S)
    assert running.cancelled()
    assert_ends(pid)
    shared.close(episode)
    assert shared.open(episode, {}).result(HANG_S).messages
    assert shared.fault_counts == before


def test_stopping_the_pool_ends_all_processes():
    environments = pool(moody())
    environments.open("a", {}).result(HANG_S)
    pid = environments.step("a", "x").result(HANG_S).info["pid"]
    running = environments.step("a", "hang")
    environments.stop()
    environments.stop()
    assert running.cancelled()
    assert_ends(pid)


def test_a_killed_fork_server_ends_its_episodes_and_is_replaced():
    with pool(moody()) as environments:
        environments.open("a", {}).result(HANG_S)
        running = environments.step("a", "hang")
        os.kill(environments._loop._server.process.process.pid, signal.SIGKILL)
        assert fault(running).reason == "lost"
        assert environments.open("b", {}).result(HANG_S).messages


def write_failing(folder: Path, action: str, num_times: int) -> EnvironmentSource:
    """Write an environment whose file ends the process that loads it, the first times."""
    file = folder / "failing.py"
    file.write_text(
        "import os, pathlib, signal\n"
        "from bad_environments import Strict as Failing\n"
        f"count = pathlib.Path({str(folder / 'count')!r})\n"
        "with count.open('a') as stream:\n"
        "    stream.write('x')\n"
        f"if len(count.read_text()) <= {num_times}:\n"
        f"    {action}\n"
    )
    return EnvironmentSource(path=f"{file}:Failing", options={"greeting": "hello"})


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.slow
def test_a_fork_server_that_is_killed_while_it_loads_is_replaced(tmp_path: Path):
    with pool(write_failing(tmp_path, KILL, 1)) as environments:
        environments.start()
        assert environments.open("a", {}).result(HANG_S).messages


@pytest.mark.parametrize(
    ("action", "num_starts"),
    [pytest.param(KILL, 4, marks=pytest.mark.slow), ("os._exit(7)", 1)],
)
def test_a_fork_server_that_cannot_load_is_a_user_error(tmp_path: Path, action, num_starts):
    source = write_failing(tmp_path, action, 99)
    with pool(source) as environments, pytest.raises(MsrlError) as error:
        environments.start()
    assert_mentions(error.value, "environment:", "loads the environments", "exit code")
    assert len((tmp_path / "count").read_text()) == num_starts


def test_a_process_that_is_killed_from_outside_is_lost(shared, episode):
    before = shared.fault_counts.get("lost", 0)
    shared.open(episode, {}).result(HANG_S)
    pid = shared.step(episode, "x").result(HANG_S).info["pid"]
    running = shared.step(episode, "hang")
    os.kill(pid, signal.SIGKILL)
    assert fault(running).reason == "lost"
    assert shared.fault_counts["lost"] == before + 1


@pytest.mark.slow
def test_slow_calls_run_at_the_same_time_up_to_the_limit():
    source = EnvironmentSource(path=f"{FILE}:Moody", timeout_s=5.0)
    with EnvironmentPool({"it": source}, max_running=2) as environments:
        openings = [environments.open(str(n), {}) for n in range(6)]
        assert all(isinstance(future.result(HANG_S), Opening) for future in openings)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("source", "keyword"),
    [
        (EnvironmentSource(path=f"{FILE}:Missing"), "Missing"),
        (EnvironmentSource(path=f"{FILE}:Moody", options={"unknown": 1}), "unknown"),
        (EnvironmentSource(path=f"{FILE}:Strict"), "greeting"),
        (EnvironmentSource(path="/no/such/file.py:Moody"), "file.py"),
    ],
)
def test_an_environment_that_cannot_be_loaded_is_a_user_error(source, keyword):
    with pool(source) as environments, pytest.raises(MsrlError) as error:
        environments.start()
    assert_mentions(error.value, keyword)


def test_an_option_without_a_default_reaches_an_environment():
    source = EnvironmentSource(path=f"{FILE}:Strict", options={"greeting": "hello"})
    with pool(source) as environments:
        opening = environments.open("a", {}).result(HANG_S)
    assert isinstance(opening, Opening) and opening.messages[0].content == "hello"


def test_a_row_selects_its_environment():
    sources = {"x": moody(greeting="x"), "y": moody(greeting="y")}
    with EnvironmentPool(sources) as environments:
        rows = {"a": {"environment": "x"}, "b": {"environment": "y"}}
        texts = [
            environments.open(k, row).result(HANG_S).messages[0].content for k, row in rows.items()
        ]
        assert texts == ["x 0", "y 0"]
        with pytest.raises(MsrlError) as error:
            environments.open("c", {"environment": "z"})
    assert_mentions(error.value, "z", "x, y")


def test_rows_without_an_environment_draw_one_by_weight_and_seed():
    sources = {"x": EnvironmentSource("x", weight=3.0), "y": EnvironmentSource("y", weight=1.0)}
    names = [select_environment(sources, {"seed": seed}) for seed in range(2000)]
    assert 1400 < names.count("x") < 1600
    assert names == [select_environment(sources, {"seed": seed}) for seed in range(2000)]


def call(mood: str) -> str:
    return hermes.render([ToolCall("do", {"mood": mood})])


def test_a_tool_that_raises_is_an_observation(tools, episode):
    opening = tools.open(episode, {}).result(HANG_S)
    assert opening.tools[0]["function"]["name"] == "do"
    result = tools.step(episode, call("raise")).result(HANG_S)
    assert_mentions(result.messages[0].content, "RuntimeError")
    assert len(result.messages[0].content) < 1200
    assert result.info["tool_calls"][0]["error"] == "raised"
    assert tools.step(episode, "done").result(HANG_S).done


def test_a_call_in_a_thought_that_the_prompt_began_does_not_run(tools, episode):
    answer = f"Hm. {call('fine')}"
    tools.open(episode, {}).result(HANG_S)
    assert not tools.step(episode, answer).result(HANG_S).done
    with pool(toolbox(), opens_thought=True) as environments:
        environments.open("a", {}).result(HANG_S)
        assert environments.step("a", answer).result(HANG_S).done


@pytest.mark.parametrize(
    ("mood", "text"), [("nul", "a\ufffdb"), ("surrogate", "a\ufffdb"), ("injection", INJECTION)]
)
def test_a_tool_may_return_any_text(tools, episode, mood, text):
    tools.open(episode, {}).result(HANG_S)
    result = tools.step(episode, call(mood)).result(HANG_S)
    assert result.messages[0].content == text
    assert result.messages[0].fields["content"] == text
    assert result.info.get("cleaned_messages") == (None if mood == "injection" else 1)


def test_a_lone_surrogate_of_the_model_becomes_a_character_of_files(tools, episode):
    answer = r'<tool_call>{"name": "do", "arguments": {"mood": "\ud83d", "\ud83e": ["\udc00"]}}'
    tools.open(episode, {}).result(HANG_S)
    result = tools.step(episode, answer).result(HANG_S)
    (record,) = result.info["tool_calls"]
    assert record["arguments"] == {"mood": "\ufffd", "\ufffd": ["\ufffd"]}


def test_every_text_of_a_reply_can_be_written(shared, episode):
    shared.open(episode, {}).result(HANG_S)
    result = shared.step(episode, "surrogates").result(HANG_S)
    json.dumps([result.info, result.messages[0].fields], ensure_ascii=False).encode()
    assert result.info == {"state": "\ufffd", "\ufffd": ["a\ufffd", 1, None]}
    detail = fault(shared.step(episode, "raise surrogate")).detail
    assert "\ufffd" in detail and detail.encode()


def test_a_reply_that_is_nested_too_deeply_is_a_fault(shared, episode):
    shared.open(episode, {}).result(HANG_S)
    assert fault(shared.step(episode, "deep")).reason == "invalid"


@pytest.mark.slow
@pytest.mark.parametrize("num_episodes", [45, pytest.param(1000, marks=pytest.mark.full)])
def test_episodes_with_broken_tools_are_all_counted(num_episodes: int):
    faults = ["fine", "segfault", "exit", "big", "nul", "injection", "raise", "memory", "surrogate"]
    moods = ["hang" if n % 50 == 49 else faults[n % len(faults)] for n in range(num_episodes)]
    with pool(toolbox(timeout_s=30.0)) as environments:
        openings = [environments.open(str(n), {}) for n in range(num_episodes)]
        steps: list[Future] = []
        for number, opening in enumerate(openings):
            assert isinstance(opening.result(600), Opening)
            steps.append(environments.step(str(number), call(moods[number])))
        results = [step.result(600) for step in steps]
        for number in range(num_episodes):
            environments.close(str(number))
        count = moods.count
        expected = {
            "timeout": count("hang"),
            "crash": count("segfault") + count("exit"),
            "oversized": count("big"),
        }
        assert environments.fault_counts == {name: n for name, n in expected.items() if n}
    replies = [result for result in results if isinstance(result, StepResult)]
    errors = [result.info["tool_calls"][0]["error"] for result in replies]
    assert errors.count("raised") == count("raise") + count("memory")
    cleaned = sum(result.info.get("cleaned_messages", 0) for result in replies)
    assert cleaned == count("nul") + count("surrogate")
