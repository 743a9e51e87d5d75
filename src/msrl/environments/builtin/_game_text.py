"""Texts of a grid game: its messages, and the actions in answers.

By default a message is the observation, and an action stands in `<answer>` tags. Imported files set
a template of messages, a system message and a pattern of actions instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from string import Formatter

from msrl.environments.builtin._grid import ACTIONS, read_action
from msrl.errors import MsrlError
from msrl.types import Message

FIELDS = ("observation", "turn_idx", "actions_left", "max_response_length")
_CONTROL = ("<|im_start|>", "<|im_end|>")  # removed from an answer before a pattern reads it


@dataclass(frozen=True, slots=True)
class GameText:
    """Texts of an episode.

    Attributes:
        instructions: Text before the first observation; empty for none.
        template: Text of a message with the fields of `FIELDS` in braces; `{{` is a brace. Empty:
            the observation.
        system: System message; empty for none.
        max_tokens: Value of max_response_length.
        max_steps: Steps of an episode, from which actions_left counts down.
        action_pattern: Regular expression whose last group is the action. Empty: answer tags.
    """

    instructions: str
    template: str
    system: str
    max_tokens: int
    max_steps: int
    action_pattern: str

    def __post_init__(self) -> None:
        for name in self._names():
            if name not in FIELDS:
                known = ", ".join(FIELDS)
                raise MsrlError(
                    f"environment.options.template: {{{name}}}: unknown field. Known: {known}"
                )

        if self.action_pattern:
            _check_pattern(self.action_pattern)

    def _names(self) -> list[str]:
        try:
            pieces = list(Formatter().parse(self.template))
        except ValueError as error:
            raise MsrlError(f"environment.options.template: {error}") from None
        return [
            f"{name}{'!' + conversion if conversion else ''}{':' + form if form else ''}"
            for _, name, form, conversion in pieces
            if name is not None
        ]

    def opening(self, observation: str) -> list[Message]:
        """Return the first messages of an episode."""
        gap = "\n" if self.template else "\n\n"
        head = f"{self.instructions}{gap}" if self.instructions else ""
        messages = [Message("system", self.system)] if self.system else []
        return [*messages, Message("user", head + self._message_text(observation, 0))]

    def turn(self, observation: str, num_steps: int, note: str = "") -> Message:
        """Return the message after `num_steps` steps. A template shows no note on the action."""
        if note and not self.template:
            observation = f"{note}\n{observation}"
        return Message("user", self._message_text(observation, num_steps))

    def action(self, answer: str, *, opens_thought: bool) -> str | None:
        """Return the action of an answer, or None."""
        if not self.action_pattern:
            return read_action(answer, opens_thought=opens_thought)
        text = answer
        for token in _CONTROL:
            text = text.replace(token, "").strip()
        match = re.search(self.action_pattern, text, re.DOTALL)
        name = match[match.re.groups].strip().lower() if match and match[match.re.groups] else ""
        return name if name in ACTIONS else None

    def _message_text(self, observation: str, num_steps: int) -> str:
        """Return the text of a message after `num_steps` steps."""
        if not self.template:
            return observation
        values = {
            "observation": observation,
            "turn_idx": str(num_steps + 1),
            "actions_left": str(self.max_steps - num_steps),
            "max_response_length": str(self.max_tokens),
        }
        pieces = Formatter().parse(self.template)
        return "".join(
            text + (values[name] if name is not None else "") for text, name, *_ in pieces
        )


def _check_pattern(pattern: str) -> None:
    """Raise MsrlError for a pattern that is no regular expression with one or two groups."""
    try:
        count = re.compile(pattern).groups
    except re.error as error:
        raise MsrlError(f"environment.options.action_pattern={pattern}: {error}") from None
    if count not in (1, 2):
        raise MsrlError(
            f"environment.options.action_pattern={pattern}: must have one group, the action, or "
            "two, a thought and the action"
        )
