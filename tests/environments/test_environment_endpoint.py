"""External agents talk to their episode by the client of OpenAI."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from msrl.config.sections.environment import EnvironmentConfig
from msrl.data.rows.turns import ToolCall
from msrl.data.tokenizer import open_tokenizer
from msrl.environments.base import EnvironmentSource, EpisodeFault, Opening
from msrl.environments.pool import EnvironmentPool
from msrl.environments.tool_formats import hermes
from msrl.rollout.episodes.runner import EpisodeRunner
from msrl.rollout.episodes.settings import EpisodeSettings
from msrl.rollout.episodes.template import EpisodeTemplate
from msrl.types import Prompt
from support import HANG_S, assert_mentions, locate
from test_episodes import END, ids, run_one
from tiny_qwen2 import make_tokenizer
from training_runs import children, listening_hosts

AGENT = locate("chat_agent.py")
pytestmark = [
    pytest.mark.slow,  # the import of openai takes seconds
    pytest.mark.skipif(find_spec("openai") is None, reason="the package openai is not installed"),
]


def play(agent: str, answers: Sequence[str], **row: Any) -> list[Any]:
    """Return the opening of an episode and the replies to the answers."""
    options = {"command": [sys.executable, str(AGENT), agent]}
    source = EnvironmentSource("endpoint", options=options, timeout_s=HANG_S)
    with EnvironmentPool({"endpoint": source}) as environments:
        opening = environments.open("episode", dict(row)).result(HANG_S)
        hosts = set().union(*listening_hosts(children(os.getpid())).values())
        assert hosts == {"127.0.0.1"} or isinstance(opening, EpisodeFault)
        return [opening, *(environments.step("episode", a).result(HANG_S) for a in answers)]


def texts(reply: Any) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in reply.messages]


def test_every_request_of_an_agent_is_a_turn():
    opening, *steps = play("chat", ["A", "B", "C"], question="Which letter?", answer="C")
    assert isinstance(opening, Opening)
    assert texts(opening) == [("system", "Be brief."), ("user", "Which letter?")]
    assert [texts(step) for step in steps] == [[("user", "Not A.")], [("user", "Not B.")], []]
    assert [step.reward for step in steps] == [None, None, 1.0]
    assert [step.done for step in steps] == [False, False, True]
    assert steps[-1].info["success"] is True


def test_calls_of_the_policy_reach_the_agent_as_tool_calls():
    call = hermes.render([ToolCall("look", {"at": "tree"}), ToolCall("look", {"at": "sky"})])
    malformed = "<tool_call>look(1)</tool_call>"
    opening, *steps = play("use_tools", [f"Hm.\n{call}", malformed])
    assert [tool["function"]["name"] for tool in opening.tools] == ["look"]
    assert texts(steps[0]) == [("tool", "saw tree"), ("tool", "saw sky")]
    assert steps[0].messages[0].fields["tool_call_id"]
    assert "history" not in steps[0].info
    assert steps[1].done and steps[1].reward is None


def test_an_edited_conversation_is_passed_as_a_new_history():
    _, first, last = play("forget", ["yes", "end"])
    assert texts(first) == [("user", "two")]
    assert first.info["history"] == [{"role": "user", "content": "You said yes."}]
    assert last.done


@pytest.mark.full
def test_another_key_is_refused():
    opening, last = play("intrude", ["x"])
    assert texts(opening) == [("user", "refused")]
    assert last.done


@pytest.mark.full
def test_an_agent_that_fails_is_a_fault():
    _, last = play("fail", ["x"])
    assert isinstance(last, EpisodeFault) and last.reason == "error"
    assert_mentions(last.detail, "3")


def test_an_episode_whose_agent_is_killed_is_lost():
    _, last = play("die", ["x"])
    assert isinstance(last, EpisodeFault) and last.reason == "lost"


@pytest.mark.full
def test_an_agent_that_never_asks_is_a_fault():
    (opening,) = play("unknown", [])
    assert isinstance(opening, EpisodeFault) and opening.reason == "error"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> EpisodeTemplate:
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer().save_pretrained(folder)
    return EpisodeTemplate(open_tokenizer(folder))


@pytest.mark.parametrize(
    ("agent", "num_sequences"), [("chat", 1), pytest.param("forget", 2, marks=pytest.mark.full)]
)
def test_answers_to_an_agent_are_recorded_as_sampled(
    agent: str, num_sequences: int, template: EpisodeTemplate
):
    options = {"command": [sys.executable, str(AGENT), agent]}
    section = EnvironmentConfig(name="endpoint", options=options, timeout_s=HANG_S)
    settings = EpisodeSettings(section, Path(), "", "hermes", 200)
    answers = [[*ids(template, letter), END] for letter in ("A", "B", "C")]
    prompt = Prompt(0, np.arange(40, 50), "C", {"question": "Which letter?"})
    with settings.pool() as pool:
        runner = EpisodeRunner(pool, settings, template, 512, str)
        completion, policy = run_one(runner, answers, prompt=prompt)
    episode = completion.episode
    assert episode is not None and episode.fault == ("", "")
    sampled = [token for answer in answers[: len(episode.turns)] for token in answer]
    assert completion.token_ids.tolist() == sampled
    assert len(completion.logprobs) == len(sampled)
    assert len(episode.sequences) == num_sequences
    masked = [s.token_ids[s.is_sampled].tolist() for s in episode.sequences]
    assert [token for tokens in masked for token in tokens] == sampled
    for request, turn in zip(policy.requests[1:], episode.turns, strict=False):
        assert turn.finish_reason == "stop" and END in request[1].token_ids
    if agent == "chat":
        assert (episode.reward, episode.success) == (1.0, True)
        roles = [message["role"] for message in episode.messages]
        assert roles == ["system", "user", *["assistant", "user"] * 2, "assistant"]
