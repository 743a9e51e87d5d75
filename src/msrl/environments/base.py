"""Interface of environments, and the values that pass between an environment and an episode.

An environment is created for every episode, in a process that only this episode uses. Its answers
are texts of the model, decoded with control tokens but without the token that ended the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from msrl.environments.tools import run_calls
from msrl.types import JsonObject, Message

FaultReason = Literal["timeout", "crash", "lost", "error", "oversized", "invalid"]
"""Kind of failure of an environment.

- "timeout": a call exceeded the time limit, and its process was killed.
- "crash": the process died by itself.
- "lost": the process, the fork server of all processes, or a program that the episode needs was
  killed from outside, for example by the out-of-memory killer. The episode is repeated.
- "error": `reset` or `step` raised an exception. A tool that raises is no fault: the model reads
  the error.
- "oversized": the messages of a call exceed the size limit.
- "invalid": a call returned something else than messages, rewards and JSON values.
"""


@dataclass(frozen=True, slots=True)
class Opening:
    """First messages of an episode and the tools that the model may call.

    Without messages, the episode begins with the prompt of its row. `tools` are in OpenAI's form:
    `{"type": "function", "function": {"name", "description", "parameters"}}`. `info` is as in
    `StepResult`.
    """

    messages: list[Message]
    tools: list[JsonObject] = field(default_factory=list[JsonObject])
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class StepResult:
    """Reply of an environment to one answer.

    `messages` are new messages for the model; they may be empty only if `done` is True. `reward`
    is the reward of this turn; None leaves it to the verifiers. `info` has JSON values. These keys
    have a meaning for training and metrics:

    - `state`: text that identifies the state in which the next answer is given.
    - `success`: True or False at the end of an episode.
    - `invalid_action`: True if the answer was no action of the environment.
    - `history`: list of {role, content} that replaces the conversation before `messages`. With it,
      `tools` replaces the tools.
    - `tool_calls`: list of {name, arguments, error} in the order of the calls; `error` is None or
      "unknown", "arguments", "malformed", "raised" or "skipped".
    """

    messages: list[Message]
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class EpisodeFault:
    """Failure of an environment, which ends its episode."""

    reason: FaultReason
    detail: str


@dataclass(frozen=True, slots=True)
class EnvironmentSource:
    """Location and options of an environment: a built-in `name`, or a `path` as `file.py:Class`.

    `weight` is the relative share of the rows that do not select one of several environments.
    """

    name: str = ""
    path: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    timeout_s: float = 30.0  # of one call of reset or step
    weight: float = 1.0


class Environment:
    """Base class of environments.

    A subclass defines `reset`, and either `step` or tools: methods that are marked with
    `msrl.environments.tools.tool` or listed in `TOOLS`. Its options are the keyword-only parameters
    of its constructor.
    """

    TOOLS: Sequence[str] = ()
    max_calls: int = 0  # calls of one answer that run; further ones are skipped, 0 is no limit
    tool_format: str = "hermes"  # set for the template of the run before `reset` is called
    opens_thought: bool = False  # the generation prompt begins a thought; set like `tool_format`
    is_truncated: bool = False  # the answer ended at a limit of tokens; set before each `step`

    def reset(self, row: Mapping[str, Any]) -> list[Message]:
        """Start an episode and return its first messages; an empty list keeps the row's prompt.

        Args:
            row: The pass-through columns of the row, and `answer`, the ground truth; `index`, the
                number of the row; `seed`, which all episodes of a group share; and `messages`, the
                prompt as a list of {role, content}, if it is known.
        """
        raise NotImplementedError

    def step(self, answer: str) -> StepResult:
        """Run the tool calls of an answer; an answer without a call ends the episode."""
        replies = run_calls(self, answer)
        if replies is None:
            return self.finish(answer)
        messages, records = replies
        return StepResult(messages, info={"tool_calls": records})

    def finish(self, answer: str) -> StepResult:
        """Return the result of an answer without a tool call."""
        return StepResult([], done=True)

    def external_tools(self) -> list[JsonObject]:
        """Return further tools in OpenAI's form, which `call_external` runs."""
        return []

    def call_external(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Run a tool of `external_tools` and return its output."""
        raise NotImplementedError

    def state(self) -> str | None:
        """Return a text that identifies the current state, or None if states do not repeat."""
        return None

    def close(self) -> None:
        """Release what the environment holds."""
