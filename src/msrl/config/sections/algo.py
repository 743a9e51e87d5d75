"""From rewards to a loss: advantages, ratios, clips, aggregation, divergences, corrections."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict, create_model

from msrl.config.sections.base import Bool, Count, Float, Fraction, NonNegative, Positive, Section, Size, Text, UpToOne

_LAMBDA = Field(default=0.95, description="Of gae: 0 trusts the critic alone, 1 the rewards; fewer than 1 lowers variance and adds bias")
_KEYWORD: dict[str, Any] = {"lambda": (UpToOne, _LAMBDA)}  # a word of Python's, so no class body can have it
_WithLambda: type[Section] = create_model("_WithLambda", __base__=Section, **_KEYWORD)


class AdvantageConfig(_WithLambda):
    """How rewards become advantages."""

    estimator: Text = Field(
        default="group_norm", description="group_norm, dr_grpo, rloo, cpgd, reinforce, reinforce_baseline, reinforce_pp or gae"
    )
    gamma: Fraction = Field(default=1.0, description="Discount per token of reinforce, reinforce_pp and gae; 1 is none")
    whiten_rewards: Bool = Field(default=False, description="Rewards of all tokens at mean 0 and deviation 1, before the estimator")
    whiten: Bool = Field(default=False, description="Advantages of all tokens of a step at mean 0 and deviation 1")
    clip: Positive | None = Field(default=None, description="Advantages are cut at plus and minus it, after whitening; null is off")
    eps: Positive = Field(default=1e-6, description="Added to standard deviations")

    @property
    def lam(self) -> float:
        """The key `lambda`."""
        return getattr(self, "lambda")


class ValueConfig(Section):
    """How the critic learns that gae needs; its weights and optimizer are in cluster.roles.critic."""

    clip: Positive | None = Field(
        default=None, description="A value may leave the one from before the step's updates by so much before its loss stops; null is off"
    )
    warmup_steps: Size = Field(default=0, description="First steps of the run in which the critic alone learns")


class ClipConfig(Section):
    """Widths of the ratio's clipping around 1; in log space for the policy loss gmpo."""

    low: UpToOne = Field(default=0.2, description="The ratio is clipped below 1 - low; 1 is no lower bound")
    high: NonNegative = Field(default=0.2, description="The ratio is clipped above 1 + high")
    dual: Annotated[float, Strict(), Field(gt=1)] | None = Field(
        default=None, description="Bound of a negative advantage's loss; null is off"
    )


class AggregateConfig(Section):
    """How per-token losses become one number. Denominators are those of the whole update, on all ranks."""

    mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-sum-over-constant"] = Field(
        default="token-mean",
        description="token-mean: over all tokens; seq-mean-token-mean or -sum: over sequences of their tokens' mean or sum; "
        "seq-sum-over-constant: sum of all, divided by algo.aggregate.constant",
    )
    constant: Positive | None = Field(
        default=None, description="Divisor of seq-sum-over-constant; unset: samples of an update times rollout.max_response_tokens"
    )


class KlRewardConfig(Section):
    """Divergence from the reference model, taken off the rewards of tokens."""

    coef: NonNegative = Field(default=0.0, description="Factor of the penalty; 0 is off")
    estimator: Literal["k1", "k2", "k3", "abs"] = Field(default="k1", description="Estimator of the divergence per token")


class KlLossConfig(Section):
    """Divergence from the reference model, in the loss."""

    coef: NonNegative = Field(default=0.0, description="Factor of the KL term; 0 is off")
    estimator: Literal["k1", "k2", "k3", "abs", "full"] = Field(
        default="k3", description="Estimator of the divergence per token; full: exact, over the whole vocabulary"
    )


class KlControllerConfig(Section):
    """How the two coefficients of the divergence follow what is measured."""

    kind: Literal["fixed", "adaptive"] = Field(default="fixed", description="adaptive: grow while the divergence is above target")
    target: Positive | None = Field(default=None, description="Wanted divergence, mean per token in nats")
    horizon: Count = Field(default=10000, description="Samples in which a coefficient changes by a fifth at most")


class KlConfig(Section):
    """Where the divergence from the reference model counts; the model is held only if a coefficient is above 0."""

    reward: KlRewardConfig = Field(default=KlRewardConfig(), description="As a penalty on every token's reward")
    loss: KlLossConfig = Field(default=KlLossConfig(), description="As a term of the loss")
    controller: KlControllerConfig = Field(default=KlControllerConfig(), description="Fixed or adaptive coefficients")


class SftTermConfig(Section):
    """Likelihood of good responses, in the loss."""

    coef: NonNegative = Field(default=0.0, description="Factor of the likelihood of tokens with a positive advantage; 0 is off")


class SampleWeightConfig(Section):
    """Factors of a sample's policy loss, of mean 1 over a step."""

    difficulty: Bool = Field(default=False, description="0.5 to 2 by the column extra.difficulty of the data (0 easy to 1 hard)")
    length: Bool = Field(default=False, description="1.5 for the shortest down to 0.5 for the longest response of a step")


class MaskConfig(Section):
    """Samples that have no part in the loss nor in its denominators; they are counted."""

    truncated: Bool = Field(default=False, description="Leave out responses that were cut at rollout.max_response_tokens")
    equal_groups: Bool = Field(default=False, description="Leave out groups whose rewards are all equal")
    difficulty: tuple[Float, Float] | None = Field(
        default=None, description="Leave out groups whose mean reward is not strictly between the two; null is off"
    )


class MismatchConfig(Section):
    """Correction for the sampler's log-probabilities not being the trainer's."""

    weight: Literal["none", "token", "sequence"] = Field(
        default="none",
        description="Weight of each token's policy loss: its ratio of trainer to sampler likelihood, or that of its sequence",
    )
    upper: Positive = Field(default=2.0, description="Bound of these weights")
    filter: Literal["none", "token", "sequence"] = Field(
        default="none",
        description="Policy loss 0 for tokens whose ratio, or sequences whose geometric mean of ratios, is outside of low to high; "
        "denominators, KL and entropy keep them",
    )
    low: NonNegative = Field(default=0.5, description="The filter leaves out ratios below it")
    high: Positive = Field(default=2.0, description="The filter leaves out ratios above it")


class AlgoConfig(Section):
    """Advantages and loss."""

    preset: (
        Literal["grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cpgd", "rloo", "reinforce", "reinforce_pp", "ppo", "topr", "cispo"] | None
    ) = Field(default=None, description="A published algorithm: values for the keys of this section that are not set")
    advantage: AdvantageConfig = Field(default=AdvantageConfig(), description="How rewards become advantages")
    ratio: Literal["token", "sequence"] = Field(
        default="token",
        description="Likelihood ratio of each token, or of its sequence: the geometric mean over its tokens (GSPO), with each token's own "
        "advantage and weight (GSPO-token)",
    )
    policy_loss: Text = Field(default="ppo", description="ppo, gmpo, cpgd, topr, tis, cispo or vanilla")
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Further options of the advantage estimator and the policy loss, by name"
    )
    clip: ClipConfig = Field(default=ClipConfig(), description="Clipping of the ratio")
    aggregate: AggregateConfig = Field(default=AggregateConfig(), description="From tokens to one loss")
    kl: KlConfig = Field(default=KlConfig(), description="Divergence from the reference model")
    value: ValueConfig = Field(default=ValueConfig(), description="The critic's learning, where the estimator is gae")
    entropy_coef: Float = Field(default=0.0, description="Factor of the entropy bonus; 0 is off")
    rl_coef: NonNegative = Field(default=1.0, description="Factor of the policy loss and the KL term")
    sft: SftTermConfig = Field(default=SftTermConfig(), description="Likelihood of good responses as a further term")
    sample_weight: SampleWeightConfig = Field(default=SampleWeightConfig(), description="How much each sample counts")
    mask: MaskConfig = Field(default=MaskConfig(), description="Samples that are left out")
    mismatch: MismatchConfig = Field(default=MismatchConfig(), description="Training against sampling")
