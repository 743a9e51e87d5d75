"""External agents talk to their episode by the client of OpenAI."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from msrl.data.turns import ToolCall
from msrl.environments.base import EnvironmentSource, EpisodeFault, Opening
from msrl.environments.pool import EnvironmentPool
from msrl.environments.tool_formats import hermes
from support import assert_mentions

pytest.importorskip("openai")
AGENT = Path(__file__).with_name("chat_agent.py")
LIMIT_S = 120.0
pytestmark = pytest.mark.slow  # the import of openai takes seconds


def play(agent: str, answers: Sequence[str], **row: Any) -> list[Any]:
    """Return the opening of an episode and the replies to the answers."""
    options = {"command": [sys.executable, str(AGENT), agent]}
    source = EnvironmentSource("endpoint", options=options, timeout_s=60.0)
    with EnvironmentPool({"endpoint": source}) as environments:
        opening = environments.open("episode", dict(row)).result(LIMIT_S)
        return [opening, *(environments.step("episode", a).result(LIMIT_S) for a in answers)]


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


def test_another_key_is_refused():
    opening, last = play("intrude", ["x"])
    assert texts(opening) == [("user", "refused")]
    assert last.done


def test_an_agent_that_fails_is_a_fault():
    _, last = play("fail", ["x"])
    assert isinstance(last, EpisodeFault) and last.reason == "error"
    assert_mentions(last.detail, "3")


def test_an_agent_that_never_asks_is_a_fault():
    (opening,) = play("unknown", [])
    assert isinstance(opening, EpisodeFault) and opening.reason == "error"
