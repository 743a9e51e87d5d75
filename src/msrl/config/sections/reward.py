"""Configuration of rewards: sources, penalties and normalization."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from msrl import registry
from msrl.config.sections.base import Float, NonNegative, Positive, Seconds, Section, Size, Text

OnFailure = Literal["wrong", "undecided", "fail"]
NormScope = Literal["none", "batch", "group", "tag", "domain", "running"]


class RewardSource(Section):
    """Source of scores and its weight in the reward.

    Exactly one of verifier, function, url, model and judge is set.
    """

    verifier: Text | None = Field(
        default=None,
        description="Verifier: a name, or path/file.py:NAME.",
        examples=[*registry.names(registry.VERIFIERS)],
    )
    function: Text | None = Field(
        default=None,
        description="User function as path/file.py:function, called with "
        "(response, answer, **options).",
    )
    url: Text | None = Field(
        default=None, description="URL of a reward server that scores batches of responses."
    )
    model: Text | None = Field(
        default=None,
        description="Reward model with a scalar head: a Hugging Face folder, or an mcore "
        "checkpoint with rm_head.",
    )
    judge: Text | None = Field(
        default=None,
        description="URL of an OpenAI API up to /v1, whose model scores responses by criteria.",
    )
    engine: Literal["hf", "megatron"] | None = Field(
        default=None,
        description="Engine of the reward model: transformers in a separate process (hf), or the "
        "training ranks (megatron). Default: by the format of the model's folder.",
    )
    name: Text | None = Field(
        default=None,
        description="Name of the source in metrics and rollouts. Default: the name of the "
        "verifier or function, remote for a server, reward_model for a model, judge for a judge.",
    )
    weight: Float = Field(default=1.0, description="Weight of the score in the reward.")
    tags: tuple[Text, ...] = Field(
        default=(),
        description="Score only rows whose data column extra.tag has one of these values. "
        "Default: score all rows.",
    )
    timeout_s: Seconds | None = Field(
        default=None,
        description="Maximum time of one call in seconds. Default: 10 for a verifier or function, "
        "120 for a request to a server or judge, or a batch of a model.",
    )
    wrong: Float | None = Field(
        default=None,
        description="Score of a failed call that counts as wrong. "
        "Default: the verifier's score of wrong responses, else 0.",
    )
    on_failure: OnFailure | None = Field(
        default=None,
        description="Effect of a failed call: score as wrong (wrong), give the response no "
        "advantage (undecided), or end the run (fail). "
        "Default: wrong for verifiers and functions, fail for servers and models, undecided for a "
        "judge.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Additional options of this source, by name.",
    )


class RewardNormConfig(Section):
    """Normalization of rewards by a mean and a standard deviation."""

    center: NormScope = Field(
        default="none",
        description="Mean to subtract: of the batch, of the group, of the rows of the batch with "
        "the same tag or environment (tag) or with the same reward sources (domain), or of the run "
        "so far (running).",
    )
    scale: NormScope = Field(
        default="none",
        description="Standard deviation to divide by: of the batch, of the group, of the rows of "
        "the batch with the same tag or environment (tag) or with the same reward sources "
        "(domain), or of the run so far (running).",
    )
    clip: tuple[Float, Float] | None = Field(
        default=None,
        description="Smallest and largest normalized reward, as [low, high]. "
        "Null disables clipping.",
    )
    eps: Positive = Field(
        default=1e-6,
        description="Constant added to the standard deviation. Rewards whose deviation is at most "
        "eps are not divided.",
    )


class OverlongConfig(Section):
    """Soft penalty of responses that come close to rollout.max_response_tokens."""

    buffer: Size = Field(
        default=0,
        description="Number of tokens before the limit in which the penalty grows from 0 to "
        "factor. 0 disables the penalty.",
    )
    factor: NonNegative = Field(default=1.0, description="Maximum penalty.")


class LengthConfig(Section):
    """Bonus for short responses in comparison with the other responses of the prompt."""

    coef: NonNegative = Field(
        default=0.0,
        description="Coefficient of the length bonus: +0.5 coef for the shortest response of a "
        "group, -0.5 coef for the longest, at most 0 for incorrect responses. 0 disables it.",
    )
    right_above: Float = Field(
        default=0.0,
        description="A response counts as correct if the weighted sum of its scores is above this "
        "number.",
    )


class RewardConfig(Section):
    """Rewards of responses.

    Applied in this order: weighted sum of all sources, format penalty, length, overlong, clip,
    norm.
    """

    sources: tuple[RewardSource, ...] = Field(
        default=(), description="Reward sources with weights. Their names must be unique."
    )
    format_penalty: NonNegative = Field(
        default=0.0,
        description="Penalty of responses that do not match the format of the verifier format. "
        "0 disables it.",
    )
    length: LengthConfig = Field(default=LengthConfig(), description="Bonus for short responses.")
    overlong: OverlongConfig = Field(
        default=OverlongConfig(), description="Penalty of overlong responses."
    )
    clip: Positive | None = Field(
        default=None,
        description="Clip rewards to the range from -clip to +clip. Null disables clipping.",
    )
    norm: RewardNormConfig = Field(
        default=RewardNormConfig(), description="Normalization of rewards."
    )
