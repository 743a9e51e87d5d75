"""Text around the observations of a game, and actions by a pattern, as imported files set them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from string import Formatter

from msrl.errors import MsrlError
from msrl.types import Message

FIELDS = ("observation", "turn_idx", "actions_left", "max_response_length")
_CONTROL = ("<|im_start|>", "<|im_end|>")  # removed from an answer before a pattern reads it


@dataclass(frozen=True, slots=True)
class TurnText:
    """Template of a user message.

    Attributes:
        template: Text with the fields of `FIELDS` in braces; `{{` is a brace. Empty for none.
        system: System message of an episode; empty for none.
        max_tokens: Value of max_response_length.
        max_steps: Steps of an episode, from which actions_left counts down.
    """

    template: str
    system: str
    max_tokens: int
    max_steps: int

    def __post_init__(self) -> None:
        for name in self._names():
            if name not in FIELDS:
                known = ", ".join(FIELDS)
                raise MsrlError(
                    f"environment.options.template: {{{name}}}: unknown field. Known: {known}"
                )

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

    def opening(self, instructions: str, observation: str) -> list[Message]:
        """Return the first messages of an episode."""
        text = f"{instructions}\n" if instructions else ""
        messages = [Message("system", self.system)] if self.system else []
        return [*messages, Message("user", text + self.rendered(observation, 0))]

    def rendered(self, observation: str, num_steps: int) -> str:
        """Return the text of a turn after `num_steps` steps."""
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


def check_pattern(pattern: str) -> None:
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


def matched_action(answer: str, pattern: str, choices: Iterable[str]) -> str | None:
    """Return the action in the last group of the first match, in any case; None without one."""
    text = answer
    for token in _CONTROL:
        text = text.replace(token, "").strip()
    match = re.search(pattern, text, re.DOTALL)
    name = match[match.re.groups].strip().lower() if match and match[match.re.groups] else ""
    return next((choice for choice in choices if choice.lower() == name), None)
