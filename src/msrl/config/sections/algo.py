"""Configuration of the algorithm: advantages, clipping, aggregation, KL terms and corrections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict, create_model

from msrl import registry
from msrl.config.presets import preset_names
from msrl.config.sections.base import (
    Bool,
    Count,
    Float,
    Fraction,
    NonNegative,
    OneOf,
    Positive,
    Seconds,
    Section,
    Size,
    Text,
    UpToOne,
)
from msrl.config.unsupported import not_yet


def _supported(key: str, package: str) -> OneOf:
    """Return the plugins of a package except those that this version refuses."""
    names = tuple(name for name in registry.names(package) if not not_yet(key, name))
    return OneOf(names, takes_file=True)


Estimator = Annotated[str, _supported("algo.advantage.estimator", registry.ADVANTAGES)]
DivergenceName = Annotated[str, OneOf(registry.names(registry.DIVERGENCES), takes_file=True)]
PreferenceLossName = Annotated[str, OneOf(registry.names(registry.PREFERENCES), takes_file=True)]
AggregationMode = Literal[
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-sum-over-constant",
    "micro-batch-mean",
]
OldLogprobs = Literal["trainer", "behavior", "log-linear"]
PolicyLossName = Annotated[str, _supported("algo.policy_loss", registry.LOSSES)]

_LAMBDA = Field(
    default=0.95,
    description="Lambda of generalized advantage estimation (gae). Smaller values lower the "
    "variance and add bias: 0 relies on the critic alone, 1 on the rewards alone.",
)
# `lambda` is a Python keyword, so a class body cannot declare this field.
_KEYWORD: dict[str, Any] = {"lambda": (UpToOne, _LAMBDA)}
_WithLambda: type[Section] = create_model("_WithLambda", __base__=Section, **_KEYWORD)


class AdvantageConfig(_WithLambda):
    """Computation of advantages from rewards."""

    estimator: Estimator = Field(
        default="group_norm", description="Advantage estimator: a name, or path/file.py:NAME."
    )
    gamma: Fraction = Field(
        default=1.0,
        description="Discount factor per token of reinforce, reinforce_pp and gae. "
        "1 disables discounting.",
    )
    whiten_rewards: Bool = Field(
        default=False,
        description="Normalize the token rewards of a step to mean 0 and standard deviation 1 "
        "before the estimator uses them.",
    )
    whiten: Bool = Field(
        default=False,
        description="Normalize the token advantages of a step to mean 0 and standard deviation 1.",
    )
    whiten_scope: Literal["batch", "domain"] = Field(
        default="batch",
        description="Tokens that whiten and whiten_rewards normalize together: those of the step "
        "(batch), or those of the rows with the same reward sources (domain).",
    )
    clip: Positive | None = Field(
        default=None,
        description="Clip advantages to the range from -clip to +clip, after whitening. "
        "Null disables clipping.",
    )
    eps: Positive = Field(
        default=1e-6, description="Constant added to standard deviations before division."
    )
    correction: Fraction = Field(
        default=1.0,
        description="Number subtracted from the count in the variances of whiten, whiten_rewards "
        "and of estimators that divide by a standard deviation of a group: 1 for unbiased ones, 0 "
        "for those of the values themselves, 0.5 for those of values that are all counted twice.",
    )

    @property
    def lam(self) -> float:
        """Value of the key `lambda`."""
        return getattr(self, "lambda")


class ValueConfig(Section):
    """Training of the critic that gae needs. Its optimizer is in `cluster.roles.critic`."""

    clip: Positive | None = Field(
        default=None,
        description="Clip range of the value loss: limits the change of a value from its "
        "prediction before the updates of the step. Null disables clipping.",
    )
    aggregate: AggregationMode = Field(
        default="token-mean",
        description="Reduction of the value loss: a mode of algo.aggregate, with the constant and "
        "the groups of algo.aggregate.",
    )
    warmup_steps: Size = Field(
        default=0,
        description="Number of steps at the start of the run that train only the critic.",
    )


class ClipConfig(Section):
    """Clip range of the likelihood ratio around 1. The policy loss gmpo applies it in log space."""

    low: UpToOne = Field(
        default=0.2,
        description="Lower clip range: the ratio is clipped below 1 - low. "
        "1 disables the lower bound.",
    )
    high: NonNegative = Field(
        default=0.2, description="Upper clip range: the ratio is clipped above 1 + high."
    )
    dual: Annotated[float, Strict(), Field(gt=1)] | None = Field(
        default=None,
        description="Dual-clip bound: the loss of a token with a negative advantage is at most "
        "this times the advantage's absolute value. Null disables it.",
    )


class AggregateConfig(Section):
    """Reduction of token losses to one number. Denominators count one update on all ranks."""

    mode: AggregationMode = Field(
        default="token-mean",
        description="Reduction of token losses: the mean over all tokens (token-mean), the mean "
        "over sequences of their token means or sums (seq-mean-token-mean, seq-mean-token-sum), "
        "the sum over all tokens divided by algo.aggregate.constant (seq-sum-over-constant), or "
        "the mean over groups of samples of their token means (micro-batch-mean).",
    )
    constant: Positive | None = Field(
        default=None,
        description="Divisor of seq-sum-over-constant. Default: the number of samples of an "
        "update times rollout.max_response_tokens.",
    )
    samples_per_group: Count | None = Field(
        default=None,
        description="Number of consecutive samples of a shard (train.updates.shards) in a group "
        "of micro-batch-mean. All groups count equally. With tokens_per_group: the number of "
        "samples that groups have at most on average.",
    )
    tokens_per_group: Count | None = Field(
        default=None,
        description="Divide the samples of a shard (train.updates.shards) into groups of about "
        "equal length of at most this many tokens, prompts included. A group of micro-batch-mean "
        "then counts by its number of samples.",
    )


class KlRewardConfig(Section):
    """KL penalty that is subtracted from token rewards."""

    coef: NonNegative = Field(
        default=0.0,
        description="Coefficient of the KL penalty in the rewards. 0 disables the penalty.",
    )
    estimator: Literal["k1", "k2", "k3", "abs"] = Field(
        default="k1", description="Estimator of the KL divergence of each token."
    )


class KlLossConfig(Section):
    """KL term of the loss."""

    coef: NonNegative = Field(
        default=0.0, description="Coefficient of the KL term in the loss. 0 disables the term."
    )
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "full"] = Field(
        default="k3",
        description="Estimator of the KL divergence of each token. k1+ and k3+ have the gradient "
        "of k2. full computes the exact divergence over the vocabulary.",
    )
    bias_correction: Bool = Field(
        default=False,
        description="Multiply the estimate of each token by its likelihood ratio, so that the "
        "gradient of k1 and k3 is that of the divergence, also after several updates.",
    )


class KlControllerConfig(Section):
    """Adaptation of the two KL coefficients to the measured divergence."""

    kind: Literal["fixed", "adaptive"] = Field(
        default="fixed",
        description="Kind of controller. adaptive raises the coefficients while the divergence is "
        "above the target and lowers them while it is below.",
    )
    target: Positive | None = Field(
        default=None,
        description="Target of the adaptive controller: mean KL divergence per token in nats.",
    )
    horizon: Count = Field(
        default=10000,
        description="Number of samples over which the adaptive controller changes a coefficient "
        "by at most 20%.",
    )


class KlConfig(Section):
    """KL divergence from the reference model, which is loaded only if a coefficient is above 0."""

    reward: KlRewardConfig = Field(
        default=KlRewardConfig(), description="KL penalty in the token rewards."
    )
    loss: KlLossConfig = Field(default=KlLossConfig(), description="KL term of the loss.")
    controller: KlControllerConfig = Field(
        default=KlControllerConfig(), description="Fixed or adaptive KL coefficients."
    )


class SftTermConfig(Section):
    """Supervised term of the loss: the likelihood of good responses."""

    coef: NonNegative = Field(
        default=0.0,
        description="Coefficient of the negative log-likelihood of tokens with a positive "
        "advantage. 0 disables the term.",
    )


class SampleWeightConfig(Section):
    """Weights of the samples in the policy loss. Their mean over a step is 1."""

    difficulty: Bool = Field(
        default=False,
        description="Weight samples from 0.5 to 2 by the data column extra.difficulty, "
        "from 0 (easy) to 1 (hard).",
    )
    length: Bool = Field(
        default=False,
        description="Weight samples by response length, from 1.5 for the shortest response of a "
        "step to 0.5 for the longest.",
    )


class MaskConfig(Section):
    """Samples that are excluded from the loss and its denominators. Their number is reported."""

    truncated: Bool = Field(
        default=False,
        description="Exclude responses that were truncated at rollout.max_response_tokens.",
    )
    equal_groups: Bool = Field(
        default=False, description="Exclude groups whose rewards are all equal."
    )
    difficulty: tuple[Float, Float] | None = Field(
        default=None,
        description="Exclude groups whose mean reward is not strictly between these two numbers. "
        "Null disables it.",
    )
    invalid_actions: Bool = Field(
        default=False,
        description="Exclude the turns of episodes whose answer is no action of the environment or "
        "has a malformed tool call. Their rewards still count.",
    )


class MismatchConfig(Section):
    """Correction of differences between the log-probabilities of the engine and the trainer."""

    weight: Literal["none", "token", "sequence"] = Field(
        default="none",
        description="Importance weight of each token's policy loss: the likelihood ratio of "
        "trainer to engine, of the token or of its sequence.",
    )
    upper: Positive = Field(default=2.0, description="Upper bound of the importance weights.")
    normalize: Bool = Field(
        default=False,
        description="Divide the importance weights by their mean over an update: of its tokens, "
        "or of its sequences if weight is sequence.",
    )
    filter: Literal["none", "token", "sequence", "sequence-product"] = Field(
        default="none",
        description="Set the policy loss to 0 for tokens whose ratio, or sequences whose "
        "geometric mean (sequence) or product of ratios (sequence-product), is outside the range "
        "from low to high. Denominators, KL and entropy still count these tokens.",
    )
    low: NonNegative = Field(
        default=0.5, description="Lower bound of the ratios that the filter accepts."
    )
    high: Positive = Field(
        default=2.0, description="Upper bound of the ratios that the filter accepts."
    )
    off_policy_limit: Positive | None = Field(
        default=None,
        description="Set the policy loss to 0 for sequences with a negative advantage whose mean "
        "of engine minus current log-probability is above this, in nats per token. Null disables "
        "it.",
    )


class PreferenceConfig(Section):
    """Loss of train-dpo on preference data."""

    loss: PreferenceLossName = Field(
        default="dpo",
        description="Preference loss: a name, or path/file.py:NAME. simpo, orpo and cpo need no "
        "reference model, and kto trains on labeled answers instead of pairs.",
    )
    beta: Positive | None = Field(
        default=None,
        description="Scale of the implicit rewards: larger values keep the policy closer to the "
        "reference. Default: that of the loss (2.0 for simpo, 0.1 for all others).",
    )
    sft_coef: NonNegative = Field(
        default=0.0,
        description="Coefficient of the negative log-likelihood of the chosen answers, as a mean "
        "over the tokens of each. 0 disables the term.",
    )
    reference: Literal["on-the-fly", "precomputed"] = Field(
        default="on-the-fly",
        description="Computation of the reference's log-probabilities: in every step by a copy of "
        "the reference on the training ranks (with LoRA by the model without its adapters), or "
        "once before the training, stored in the folder of the run.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Additional options of the preference loss, by name.",
    )


class RewardModelConfig(Section):
    """Loss of train-rm on preference pairs or on labeled steps."""

    kind: Literal["outcome", "process"] = Field(
        default="outcome",
        description="Kind of reward model: one score of the complete answer, from pairs (outcome), "
        "or a label of each step of an answer (process).",
    )
    center_coef: NonNegative = Field(
        default=0.0,
        description="Coefficient of the square of both scores' sum, which keeps scores around 0. "
        "0 disables the term. For kind outcome.",
    )
    reward_tokens: tuple[Text, ...] = Field(
        default=("+", "-"),
        description="Tokens that label the steps of the data. The model predicts them at the "
        "placeholder after each step. For kind process.",
    )


SELF = "self"  # as a teacher: the policy before the training


class TeacherConfig(Section):
    """Teacher: a frozen model on the training ranks, with their parallel layout, or on a server.

    Exactly one of model and url is set. The tokenizer is that of the policy.
    """

    model: Text | None = Field(
        default=None,
        description="Hugging Face or mcore folder of a teacher on the training ranks, or self: "
        "the weights that the policy starts from.",
    )
    url: Text | None = Field(
        default=None,
        description="Base URL of an OpenAI-compatible server of the teacher, as in "
        "http://host:8000/v1. It must return log-probabilities of prompts, as vLLM and msrl serve "
        "do.",
    )
    served_name: Text | None = Field(
        default=None,
        description="Name of the model on the server. Default: that of its only model.",
    )
    api_key: Text | None = Field(
        default=None,
        description="API key of the server as ${env:NAME}. It is read only for a request and "
        "never written.",
    )
    timeout_s: Seconds = Field(
        default=120.0,
        description="Maximum time of a request to the server with all its attempts, in seconds.",
    )
    retries: Size = Field(default=5, description="Attempts of a request after the first one.")
    concurrency: Count = Field(
        default=8, description="Number of concurrent requests, each with one response."
    )
    weight: Positive = Field(
        default=1.0, description="Weight of the divergence or the advantage of this teacher."
    )
    tags: tuple[Text, ...] = Field(
        default=(),
        description="Teach only rows whose data column extra.tag has one of these values. "
        "Default: teach all rows.",
    )

    @property
    def name(self) -> str:
        """Name of a teacher on the training ranks."""
        assert self.model is not None, "a teacher on a server"
        return self.model

    @property
    def is_self(self) -> bool:
        """True if the teacher is the policy before the training."""
        return self.model == SELF


class DistillConfig(Section):
    """Distillation of teachers into the policy, on the policy's samples.

    Teachers on the ranks give a term of the loss, the exact divergence of the policy. Teachers on
    servers give an advantage of each sampled token, log p(teacher) - log p(policy).
    """

    teachers: tuple[TeacherConfig, ...] = Field(
        default=(),
        description="Teachers. The weighted divergences and advantages of those of a row are "
        "added up.",
        examples=[[{"model": "runs/grpo/hf"}]],
    )
    coef: NonNegative = Field(
        default=1.0,
        description="Coefficient of the divergence, which train-grpo adds to the policy loss, "
        "and of the advantage, which it adds to that of the rewards. algo.rl_coef multiplies the "
        "policy loss.",
    )
    divergence: DivergenceName = Field(
        default="reverse_kl",
        description="Divergence at every response token from teachers on the ranks, over the full "
        "vocabulary and at the sampling temperature: a name, or path/file.py:NAME.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Additional options of the divergence, by name.",
    )

    @property
    def is_on(self) -> bool:
        return bool(self.teachers)

    @property
    def on_ranks(self) -> tuple[TeacherConfig, ...]:
        """Teachers on the training ranks."""
        return tuple(teacher for teacher in self.teachers if teacher.model is not None)

    @property
    def has_servers(self) -> bool:
        return any(teacher.url is not None for teacher in self.teachers)


class AlgoConfig(Section):
    """Advantages and losses."""

    preset: Annotated[str, OneOf(preset_names())] | None = Field(
        default=None,
        description="Published algorithm that provides the values of keys in this section that "
        "are not set. Default: none.",
    )
    advantage: AdvantageConfig = Field(
        default=AdvantageConfig(), description="Computation of advantages from rewards."
    )
    ratio: Literal["token", "sequence"] = Field(
        default="token",
        description="Likelihood ratio of each token, or of its sequence: the geometric mean of "
        "its tokens' ratios (GSPO). With sequence, each token keeps its own advantage and weight "
        "(GSPO-token).",
    )
    policy_loss: PolicyLossName = Field(
        default="ppo", description="Policy loss: a name, or path/file.py:NAME."
    )
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Additional options of the advantage estimator and the policy loss, by name.",
    )
    preference: PreferenceConfig = Field(
        default=PreferenceConfig(), description="Loss of train-dpo on preference data."
    )
    reward_model: RewardModelConfig = Field(
        default=RewardModelConfig(), description="Loss of train-rm."
    )
    distill: DistillConfig = Field(
        default=DistillConfig(),
        description="Divergence from teachers in the loss of train-distill and train-grpo.",
    )
    old_logprobs: OldLogprobs = Field(
        default="trainer",
        description="Log-probabilities in the denominator of the likelihood ratio: those of the "
        "policy before the first update of a step (trainer), those of the engine when it sampled "
        "the token (behavior), or an interpolation that approximates trainer without its forward "
        "pass (log-linear).",
    )
    clip: ClipConfig = Field(
        default=ClipConfig(), description="Clip range of the likelihood ratio."
    )
    aggregate: AggregateConfig = Field(
        default=AggregateConfig(), description="Reduction of token losses to one number."
    )
    kl: KlConfig = Field(default=KlConfig(), description="KL divergence from the reference model.")
    value: ValueConfig = Field(
        default=ValueConfig(), description="Training of the critic that gae needs."
    )
    top_entropy: Fraction = Field(
        default=1.0,
        description="Share of the tokens of an update that the policy loss trains on: those with "
        "the highest entropy. Denominators, KL and entropy still count the others. 1 trains on all "
        "tokens; below 1, a step computes entropies in an additional forward pass.",
    )
    entropy_coef: Float = Field(
        default=0.0, description="Coefficient of the entropy bonus. 0 disables it."
    )
    rl_coef: NonNegative = Field(
        default=1.0, description="Coefficient of the policy loss and the KL term."
    )
    sft: SftTermConfig = Field(default=SftTermConfig(), description="Supervised term of the loss.")
    sample_weight: SampleWeightConfig = Field(
        default=SampleWeightConfig(), description="Weights of the samples in the policy loss."
    )
    mask: MaskConfig = Field(
        default=MaskConfig(), description="Samples that are excluded from the loss."
    )
    mismatch: MismatchConfig = Field(
        default=MismatchConfig(),
        description="Correction of differences between the engine and the trainer.",
    )
