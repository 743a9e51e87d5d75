"""Configuration of environments: episodes of several turns."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from msrl import registry
from msrl.config.sections.base import Bool, Count, Float, NonNegative, Seconds, Section, Text


class SingleEnvironment(Section):
    """One of several environments."""

    name: Text | None = Field(
        default=None,
        description="Name of a built-in environment.",
        examples=[*registry.names(registry.ENVIRONMENTS)],
    )
    path: Text | None = Field(
        default=None, description="Own environment as path/file.py:Class, instead of a name."
    )
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Options of the environment, by name."
    )
    timeout_s: Seconds = Field(
        default=30.0,
        description="Maximum time of one call of the environment in seconds. Its process is "
        "killed then, which ends the episode.",
    )


class MixtureEntry(SingleEnvironment):
    """One of several environments, with its share of the rows."""

    weight: NonNegative = Field(
        default=1.0,
        description="Relative share of the rows that do not name an environment in their column "
        "extra.environment.",
    )


class EnvironmentConfig(SingleEnvironment):
    """Environment of the episodes of train-grpo, eval and generate.

    Without a name, a path and a mixture, a response is one turn.
    """

    mixture: dict[Text, MixtureEntry] = Field(
        default_factory=dict[str, MixtureEntry],
        description="Several environments by a name of your choice, instead of name and path. The "
        "column extra.environment of a row selects one, else the weights do.",
    )
    tool_format: Text | None = Field(
        default=None,
        description="Format of tool calls in answers: a name, or path/file.py:NAME. "
        "Default: the format of the chat template.",
        examples=[*registry.names(registry.TOOL_FORMATS)],
    )
    max_turns: Count = Field(
        default=8, description="Maximum number of answers of the policy in an episode."
    )
    max_turn_tokens: Count | None = Field(
        default=None,
        description="Maximum length of one answer in tokens. Default: what remains of "
        "rollout.max_response_tokens, which limits answers and messages of an episode together.",
    )
    max_episode_s: Seconds | None = Field(
        default=None,
        description="Number of seconds after which an episode begins no further turn. "
        "Default: no limit.",
    )
    max_running: Count = Field(
        default=64, description="Maximum number of calls that run at the same time per engine."
    )
    lockstep: Bool = Field(
        default=False,
        description="Start a turn of all episodes when all environments have replied. A repeated "
        "or resumed run then has the same bits, but a slow reply delays all episodes. Otherwise, "
        "batches of the engine depend on the times of replies, which changes last bits.",
    )
    max_message_chars: Count = Field(
        default=16384,
        description="Maximum length of a message of the environment in characters. Longer ones "
        "are truncated and counted.",
    )
    max_tokens: Count | None = Field(
        default=None,
        description="Maximum length of an episode in tokens, with its opening, answers and "
        "messages. Default: the opening plus rollout.max_response_tokens.",
    )
    history: Literal["append", "separate", "template"] = Field(
        default="append",
        description="Prompt of a later turn: all earlier tokens and the new messages (append), the "
        "same as ROLL joins them (separate), or the conversation as the chat template renders it "
        "(template), which may drop thoughts. A new training sequence begins where the template "
        "changes earlier tokens. With separate, new messages are rendered on their own, after the "
        "token that ends messages, also if the answer already ended with it.",
    )
    enable_thinking: Bool | None = Field(
        default=None,
        description="Value of enable_thinking in the chat template of the messages. Default: that "
        "of the template.",
    )
    format_penalty: NonNegative = Field(
        default=0.0,
        description="Number subtracted from the reward of a turn whose answer is no action of the "
        "environment or has a malformed tool call.",
    )
    reward_weight: Float = Field(
        default=1.0, description="Weight of the environment's rewards in the reward."
    )
    reward_at: Literal["turn", "end"] | None = Field(
        default=None,
        description="Token that earns a reward of a turn, for estimators that give each token or "
        "turn the rewards that follow it: the last one of the turn (turn) or of the episode (end). "
        "Default: turn, or end if reward.norm or reward.clip changes the total of an episode.",
    )

    @property
    def is_on(self) -> bool:
        """True if responses are episodes with an environment."""
        return self.name is not None or self.path is not None or bool(self.mixture)

    @property
    def is_single_turn(self) -> bool:
        """True if an episode is one response, whose reward comes from the reward sources."""
        return self.name == "single_turn"
