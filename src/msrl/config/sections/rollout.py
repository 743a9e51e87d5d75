"""How prompts are answered: sampling, the engine, how many."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from msrl.config.sections.base import Bool, Count, Float, Fraction, NonNegative, Section, Size, Text, TopK, UpToOne


class Cuts(Section):
    """What sampling leaves out of the distribution."""

    top_p: Fraction = Field(default=1.0, description="Sample from the smallest set of tokens with this probability; 1 is off")
    top_k: TopK = Field(default=-1, description="Sample from the k likeliest tokens; -1 is off")
    min_p: UpToOne = Field(default=0.0, description="Leave out tokens below this fraction of the likeliest one's probability; 0 is off")


class SamplingConfig(Cuts):
    """How completions are sampled."""

    temperature: NonNegative = Field(default=1.0, description="Logits are divided by it; 0 is greedy, which train-grpo refuses")
    stop: tuple[Text, ...] = Field(default=(), description="Texts that end a completion, besides the template's own end of turn")
    seed: Size | None = Field(default=None, description="Seed of sampling; unset: run.seed")


class EngineConfig(Section):
    """The engine that samples. It shares the devices of training."""

    name: Literal["vllm"] = Field(default="vllm", description="Engine that generates")
    tp: Count = Field(default=1, description="Tensor-parallel size of one engine")
    dp: Count = Field(default=1, description="Number of engines that share the prompts")
    memory_fraction: Fraction = Field(default=0.5, description="Share of the device's memory that the engine may take")
    kv_cache_bytes: Count | None = Field(default=None, description="Bytes of the KV cache; unset: from memory_fraction")
    max_num_seqs: Count = Field(default=256, description="Sequences that run at the same time")
    max_num_batched_tokens: Count | None = Field(default=None, description="Tokens of one engine step; unset: the engine's own choice")
    max_model_len: Count | None = Field(
        default=None, description="Longest prompt plus response in tokens; unset: as the two limits of rollout"
    )
    eager: Bool = Field(default=False, description="Run without graph capture and compilation (always so on CPU)")
    prefix_cache: Bool = Field(default=True, description="Share the KV cache of equal prompt beginnings")


class FilterConfig(Section):
    """Groups that teach nothing, and what is generated in their place."""

    kind: Literal["none", "all_equal", "mean", "std"] = Field(
        default="none",
        description="Leave out groups of equal rewards, of a mean not strictly between low and high, or of a deviation not above low",
    )
    low: Float | None = Field(default=None, description="Bound of mean and std; unset: none")
    high: Float | None = Field(default=None, description="Upper bound of mean; unset: none")
    source: Text | None = Field(default=None, description="Source of rewards whose scores are compared; unset: the rewards")
    refill: Bool = Field(default=False, description="Generate for the next prompts until rollout.prompts_per_step groups are left")
    max_refills: Size | None = Field(
        default=9, description="Times that a step does so at most; unset (null): until it has had every prompt once"
    )
    extra_prompts: Size = Field(default=0, description="Prompts that are asked in a refill besides as many as are likely needed")


class RolloutConfig(Section):
    """What one step of reinforcement generates."""

    prompts_per_step: Count = Field(default=32, description="Prompts of one step")
    samples_per_prompt: Count = Field(default=8, description="Completions of every prompt: the size of a group")
    max_prompt_tokens: Count = Field(default=512, description="Longest prompt; longer ones are left out and counted")
    max_response_tokens: Count = Field(default=512, description="Longest completion")
    filter: FilterConfig = Field(default=FilterConfig(), description="Groups that are left out")
    sampling: SamplingConfig = Field(default=SamplingConfig(), description="How completions are sampled")
    engine: EngineConfig = Field(default=EngineConfig(), description="The engine that samples")
