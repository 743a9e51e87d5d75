"""How answers are scored, and what becomes of scores."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from msrl.config.sections.base import Float, NonNegative, Positive, Seconds, Section, Size, Text


class RewardSource(Section):
    """What scores, and its weight in the reward: exactly one of verifier, function, url and model."""

    verifier: Text | None = Field(default=None, description="Name of a verifier")
    function: Text | None = Field(default=None, description="path/file.py:function of your own, called as (response, answer, **options)")
    url: Text | None = Field(default=None, description="Server that gives rewards for batches of completions")
    model: Text | None = Field(
        default=None, description="Reward model with a scalar head: a Hugging Face folder, or an mcore checkpoint with rm_head"
    )
    engine: Literal["hf", "megatron"] | None = Field(
        default=None,
        description="What runs the model: transformers in a process of its own, or the training ranks; unset: by the folder's format",
    )
    name: Text | None = Field(
        default=None, description="Its name in metrics and rollouts; unset: the verifier's or function's, remote, reward_model"
    )
    weight: Float = Field(default=1.0, description="Factor of its score in the sum")
    tags: tuple[Text, ...] = Field(default=(), description="Score only rows whose column extra.tag is one of these; empty: all rows")
    timeout_s: Seconds | None = Field(default=None, description="Seconds for one call, unset: 10; for a request or batch, unset: 120")
    wrong: Float | None = Field(default=None, description="Score of what counts as wrong for a failure; unset: the verifier's own, else 0")
    on_failure: Literal["wrong", "undecided", "fail"] | None = Field(
        default=None,
        description="A failed call is wrong, the mean of its group's others, or the end of the run; unset: wrong, for url and model fail",
    )
    options: dict[str, Any] = Field(default_factory=dict[str, Any], description="Further options of this source, by name")


class RewardNormConfig(Section):
    """Rewards around a mean and in units of a deviation."""

    center: Literal["none", "batch", "group", "running"] = Field(default="none", description="Whose mean is taken off")
    scale: Literal["none", "batch", "group", "running"] = Field(default="none", description="By whose standard deviation is divided")
    eps: Positive = Field(default=1e-6, description="Added to the deviation; where that is no more than eps, nothing is divided")


class OverlongConfig(Section):
    """Soft punishment of responses that come close to rollout.max_response_tokens."""

    buffer: Size = Field(default=0, description="Tokens before the limit in which the penalty grows from 0 to factor; 0 is off")
    factor: NonNegative = Field(default=1.0, description="Largest penalty")


class LengthConfig(Section):
    """Reward of short responses among those of one prompt."""

    coef: NonNegative = Field(
        default=0.0, description="The shortest gets half of it, the longest minus half, a wrong one at most 0; 0 is off"
    )
    right_above: Float = Field(default=0.0, description="A response is right when the weighted sum of its scores is above this")


class RewardConfig(Section):
    """How a completion is scored, in this order: weighted sum of all sources, form, length, overlong, clip, norm."""

    sources: tuple[RewardSource, ...] = Field(default=(), description="What scores, with weights; no name twice")
    format_penalty: NonNegative = Field(default=0.0, description="Taken off where a response has not the form of the verifier format")
    length: LengthConfig = Field(default=LengthConfig(), description="Reward of short responses")
    overlong: OverlongConfig = Field(default=OverlongConfig(), description="Penalty of long responses")
    clip: Positive | None = Field(default=None, description="Rewards are cut at plus and minus this; null is off")
    norm: RewardNormConfig = Field(default=RewardNormConfig(), description="Mean and deviation of rewards")
