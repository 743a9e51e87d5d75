"""Configuration of evaluation on held-out data during training."""

from __future__ import annotations

from pydantic import Field

from msrl.config.sections.base import Bool, Count, Float, NonNegative, Section, Size, Text
from msrl.config.sections.rollout import SamplingFilters


class EvalSamplingConfig(SamplingFilters):
    """Sampling of responses to held-out prompts in train-grpo. The default is greedy decoding."""

    temperature: NonNegative = Field(
        default=0.0, description="Sampling temperature. 0 decodes greedily."
    )
    stop: tuple[Text, ...] | None = Field(
        default=None,
        description="Texts that end a response. Default: rollout.sampling.stop.",
    )
    seed: Size | None = Field(
        default=None,
        description="Seed of sampling. Default: derived from run.seed, different from the seed "
        "of the rollouts.",
    )


class EvalConfig(Section):
    """Evaluation on data.eval during training.

    train-sft computes the loss of held-out examples, train-grpo scores responses to held-out
    prompts.
    """

    every_steps: Count | None = Field(
        default=None,
        description="Number of steps between two evaluations. The last step is evaluated too. "
        "Default: train-sft evaluates after the last step only, train-grpo never.",
    )
    at_start: Bool = Field(
        default=False,
        description="Evaluate before the first step too, reported as step 0 (train-grpo only).",
    )
    prompts: Count | None = Field(
        default=None,
        description="Number of rows of data.eval to use, from its start, or of each subject of a "
        "benchmark. Default: all rows.",
    )
    patience: Count | None = Field(
        default=None,
        description="Early stopping: end the training after this many evaluations without a new "
        "best result. Default: no early stopping.",
    )
    samples_per_prompt: Count = Field(
        default=1, description="Number of responses per prompt (train-grpo and eval)."
    )
    max_response_tokens: Count | None = Field(
        default=None,
        description="Maximum response length in tokens (train-grpo and eval). "
        "Default: rollout.max_response_tokens, or the limit of a benchmark.",
    )
    sampling: EvalSamplingConfig = Field(
        default=EvalSamplingConfig(),
        description="Sampling of responses to held-out prompts (train-grpo only).",
    )
    source: Text | None = Field(
        default=None,
        description="Name of the reward source that decides if a response is correct "
        "(train-grpo only). Default: the first verifier of a row with a ground truth, else the "
        "first verifier or function.",
    )
    right_from: Float = Field(
        default=1.0,
        description="Smallest score of that source that counts as correct (train-grpo only).",
    )
