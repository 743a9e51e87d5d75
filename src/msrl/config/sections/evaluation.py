"""Evaluation on held-out data while training."""

from __future__ import annotations

from pydantic import Field

from msrl.config.sections.base import Bool, Count, Float, NonNegative, Section, Size, Text
from msrl.config.sections.rollout import Cuts


class EvalSamplingConfig(Cuts):
    """How train-grpo answers held-out prompts: greedily, where nothing is said."""

    temperature: NonNegative = Field(default=0.0, description="Logits are divided by it; 0 is greedy")
    stop: tuple[Text, ...] | None = Field(default=None, description="Texts that end a completion; unset: those of rollout.sampling")
    seed: Size | None = Field(default=None, description="Seed of sampling; unset: made of run.seed, and not that of the rollouts")


class EvalConfig(Section):
    """Evaluation on data.eval while training: the loss of held-out examples in train-sft, answers to held-out prompts in train-grpo."""

    every_steps: Count | None = Field(
        default=None,
        description="Steps between two evaluations, and one after the last step; unset: train-sft has that one alone, train-grpo none",
    )
    at_start: Bool = Field(default=False, description="train-grpo: evaluate before the first step too, as step 0")
    prompts: Count | None = Field(default=None, description="Rows of data.eval that are used, from its start; unset: all")
    patience: Count | None = Field(
        default=None, description="Evaluations without a new best after which the training ends early; unset: never"
    )
    samples_per_prompt: Count = Field(default=1, description="train-grpo: answers to every held-out prompt")
    max_response_tokens: Count | None = Field(
        default=None, description="train-grpo: longest answer to a held-out prompt; unset: rollout.max_response_tokens"
    )
    sampling: EvalSamplingConfig = Field(default=EvalSamplingConfig(), description="train-grpo: how held-out prompts are answered")
    source: Text | None = Field(
        default=None,
        description="train-grpo: name of the reward source that tells right from wrong; unset: a row's first verifier with a ground truth, "
        "else its first verifier or function",
    )
    right_from: Float = Field(default=1.0, description="train-grpo: score of that source from which on an answer is right")
