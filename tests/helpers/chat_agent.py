"""Agents for the test of the environment `endpoint`, which use the client of OpenAI."""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request

from openai import AuthenticationError, OpenAI

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


def chat(row: dict) -> None:
    """Ask, tell what was answered, and reward the last answer."""
    client = OpenAI()
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": row["question"]},
    ]
    for _ in range(2):
        reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
        text = reply.choices[0].message.content
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": f"Not {text}."},
        ]
    reply = client.chat.completions.create(model="policy", messages=messages, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in reply)
    give_reward(1.0 if text == row["answer"] else 0.0)


def use_tools(row: dict) -> None:
    """Run the tool calls of the policy."""
    client = OpenAI()
    messages: list = [{"role": "user", "content": "Look around."}]
    while True:
        reply = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = reply.choices[0].message
        if not message.tool_calls:
            return
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            at = json.loads(call.function.arguments)["at"]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": f"saw {at}"})


def forget(row: dict) -> None:
    """Summarize the conversation, which edits the history."""
    client = OpenAI()
    messages = [{"role": "user", "content": "one"}]
    reply = client.chat.completions.create(model="policy", messages=messages)
    text = reply.choices[0].message.content
    messages = [
        {"role": "user", "content": f"You said {text}."},
        {"role": "user", "content": "two"},
    ]
    client.chat.completions.create(model="policy", messages=messages)


def intrude(row: dict) -> None:
    """Use a wrong key."""
    try:
        OpenAI(api_key="wrong").models.list()
    except AuthenticationError:
        OpenAI().chat.completions.create(
            model=OpenAI().models.list().data[0].id,
            messages=[{"role": "user", "content": "refused"}],
        )


def fail(row: dict) -> None:
    """End with an error after a turn."""
    OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
    sys.exit(3)


def die(row: dict) -> None:
    """Be killed after a turn."""
    OpenAI().chat.completions.create(model="policy", messages=[{"role": "user", "content": "x"}])
    os.kill(os.getpid(), signal.SIGKILL)


def turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def give_reward(value: float) -> None:
    body = json.dumps({"reward": value, "success": value == 1.0}).encode()
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    url = f"{os.environ['OPENAI_BASE_URL']}/reward"
    urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()


if __name__ == "__main__":
    agents = {f.__name__: f for f in (chat, use_tools, forget, intrude, fail, die)}
    agents[sys.argv[1]](json.loads(os.environ["MSRL_ROW"]))
