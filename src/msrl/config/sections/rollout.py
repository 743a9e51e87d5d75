"""Configuration of rollouts: sampling, inference engine and number of responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Strict, create_model

from msrl.config.sections.base import (
    Bool,
    Count,
    Float,
    Fraction,
    NonNegative,
    Section,
    Size,
    SleepLevel,
    Text,
    TopK,
    UpToOne,
)


class SamplingFilters(Section):
    """Restriction of sampling to likely tokens."""

    top_p: Fraction = Field(
        default=1.0,
        description="Sample from the smallest set of tokens with this total probability. "
        "1 disables it.",
    )
    top_k: TopK = Field(
        default=-1, description="Sample from this many of the likeliest tokens. -1 disables it."
    )
    min_p: UpToOne = Field(
        default=0.0,
        description="Drop tokens below this fraction of the likeliest token's probability. "
        "0 disables it.",
    )


class SamplingConfig(SamplingFilters):
    """Sampling of responses."""

    temperature: NonNegative = Field(
        default=1.0,
        description="Sampling temperature. 0 decodes greedily, which trainings refuse.",
    )
    stop: tuple[Text, ...] = Field(
        default=(),
        description="Texts that end a response, in addition to the template's end of turn.",
    )
    seed: Size | None = Field(default=None, description="Seed of sampling. Default: run.seed.")


class EngineConfig(Section):
    """Inference engine. It shares the training devices."""

    name: Literal["vllm"] = Field(default="vllm", description="Inference engine.")
    tp: Count = Field(default=1, description="Tensor-parallel size of one engine, in devices.")
    ep: Count = Field(
        default=1,
        description="Expert-parallel size of one engine: 1, or tp to distribute whole experts "
        "over its devices.",
    )
    dp: Count | None = Field(
        default=None,
        description="Number of engines that share the prompts. Default: engines on every device "
        "that generates. On CPU, one engine uses all cores.",
    )
    sleep: SleepLevel | None = Field(
        default=None,
        description="Memory that engines release while the same devices train: none (0), all, "
        "with the weights moved to host memory (1), or all, with the weights discarded (2). "
        "Default: 1, and 0 on CPU.",
    )
    memory_fraction: Fraction = Field(
        default=0.5, description="Fraction of the device memory that the engine may use."
    )
    kv_cache_bytes: Count | None = Field(
        default=None, description="Size of the KV cache in bytes. Default: from memory_fraction."
    )
    max_num_seqs: Count = Field(
        default=256, description="Maximum number of sequences that one engine runs concurrently."
    )
    max_num_batched_tokens: Count | None = Field(
        default=None,
        description="Maximum number of tokens per engine step. Default: the engine's default.",
    )
    max_model_len: Count | None = Field(
        default=None,
        description="Maximum length of prompt and response in tokens. "
        "Default: rollout.max_prompt_tokens + rollout.max_response_tokens.",
    )
    eager: Bool | None = Field(
        default=None,
        description="Disable graph capture and compilation. Default: false; true on CPU, where "
        "compiling takes half a minute or longer at the first start, and on Ascend NPUs if weights "
        "are updated.",
    )
    prefix_cache: Bool = Field(
        default=True, description="Share the KV cache of common prompt prefixes."
    )
    options: dict[Text, Any] = Field(
        default_factory=dict[str, Any],
        description="Further engine arguments of vLLM by their names, as in "
        "{block_size: 32}. Trainings accept those that docs/devices.md lists.",
    )


OnStale = Literal["wait", "drop"]
DEVICE_TRANSFERS = ("ipc", "nccl")  # of weights, from device to device
COLOCATED_TRANSFERS = ("ipc",)  # between processes that share devices


class WeightsConfig(Section):
    """Transfer of new weights from the training ranks to the engines."""

    transfer: Literal["auto", "shared_memory", "ray", "ipc", "nccl"] = Field(
        default="auto",
        description="Transfer of the weights: by memory that processes of one machine share, "
        "by Ray objects, or by vLLM's engines for colocated (ipc) and separate devices (nccl, "
        "which is HCCL on Ascend NPUs). auto: shared_memory on one machine, ray on several.",
    )
    bucket_bytes: Annotated[int, Strict(), Field(ge=1 << 16)] = Field(
        default=1 << 26,
        description="Size of a bucket in bytes. Larger tensors travel in several buckets.",
    )
    verify: Literal["first", "every", "never"] = Field(
        default="first",
        description="Versions whose weights in the engines are compared with those of the training "
        "ranks by digests.",
    )
    adapters_only: Bool = Field(
        default=False,
        description="Send only the LoRA adapters after the first version. Engines then keep a copy "
        "of the base weights in main memory and add the adapters to them.",
    )


class FilterConfig(Section):
    """Filter of groups that are not informative, and sampling of replacements."""

    kind: Literal["none", "all_equal", "mean", "std"] = Field(
        default="none",
        description="Drop groups with equal rewards (all_equal), with a mean that is not strictly "
        "between low and high (mean), or with a standard deviation of at most low (std).",
    )
    low: Float | None = Field(
        default=None, description="Lower bound of mean and std. Default: no bound."
    )
    high: Float | None = Field(default=None, description="Upper bound of mean. Default: no bound.")
    source: Text | None = Field(
        default=None,
        description="Name of the reward source whose scores the filter compares. "
        "Default: the rewards.",
    )
    refill: Bool = Field(
        default=False,
        description="Sample the next prompts until rollout.prompts_per_step groups pass the "
        "filter.",
    )
    max_refills: Size | None = Field(
        default=9,
        description="Maximum number of refills per step. Null refills until every prompt was "
        "sampled once.",
    )
    extra_prompts: Size = Field(
        default=0,
        description="Number of prompts that a refill samples in addition to the estimated need.",
    )


class ReplayConfig(Section):
    """Training from recorded rollouts, without engines."""

    path: Text | None = Field(
        default=None,
        description="Train from recorded rollouts, without engines: the folder of a run that was "
        "recorded with log.rollouts=parquet, or a JSONL file of responses.",
    )
    rewards: Literal["recorded", "computed"] = Field(
        default="recorded",
        description="Rewards of the recorded responses: those of the record, or those that "
        "reward.sources give them (computed).",
    )
    order: Literal["recorded", "shuffled"] = Field(
        default="recorded",
        description="Order of the recorded groups: step by step as in the record, or shuffled by "
        "run.seed over the whole record.",
    )


class AsyncConfig(Section):
    """Generation while the policy trains."""

    max_staleness: Size = Field(
        default=0,
        description="Largest number of policy updates between the oldest token of a group and the "
        "step that trains on it. 0 alternates generation and training.",
    )
    on_stale: OnStale = Field(
        default="wait",
        description="Treatment of a group that would exceed max_staleness: the trainer waits for "
        "the oldest groups (wait), or the group is dropped and its prompt is sampled once more "
        "(drop), which favors short responses.",
    )
    weight_update: Literal["in_flight", "drain"] = Field(
        default="in_flight",
        description="Time at which an engine loads new weights: between two steps (in_flight), or "
        "when all its running responses are finished (drain).",
    )
    recompute_kv: Bool = Field(
        default=True,
        description="Recompute the keys and values of unfinished responses after an update. "
        "false is faster, but later tokens then belong to no policy version exactly.",
    )
    partial: Bool = Field(
        default=False,
        description="Stop generation while the policy trains, and continue unfinished responses "
        "in the next step.",
    )
    max_running_groups: Count | None = Field(
        default=None,
        description="Maximum number of groups that generate at the same time. "
        "Default: as many as max_staleness allows.",
    )
    allow_uncorrected: Bool = Field(
        default=False,
        description="Allow max_staleness above 0 without an off-policy correction. Such runs often "
        "collapse.",
    )

    @property
    def is_on(self) -> bool:
        """True if generation and training do not simply alternate."""
        return self.max_staleness > 0


_ASYNC = Field(default=AsyncConfig(), description="Generation while the policy trains.")
# `async` is a Python keyword, so a class body cannot declare this field.
_KEYWORD: dict[str, Any] = {"async": (AsyncConfig, _ASYNC)}
_WithAsync: type[Section] = create_model("_WithAsync", __base__=Section, **_KEYWORD)


class RolloutConfig(_WithAsync):
    """Generation of the responses of one train-grpo step."""

    prompts_per_step: Count = Field(default=32, description="Number of prompts per step.")
    samples_per_prompt: Count = Field(
        default=8, description="Number of responses per prompt, which is the group size."
    )
    max_prompt_tokens: Count = Field(
        default=512,
        description="Maximum prompt length in tokens. Longer prompts are dropped and their number "
        "is reported.",
    )
    max_response_tokens: Count = Field(
        default=512, description="Maximum response length in tokens."
    )
    filter: FilterConfig = Field(
        default=FilterConfig(), description="Filter of groups that are not informative."
    )
    sampling: SamplingConfig = Field(default=SamplingConfig(), description="Sampling of responses.")
    engine: EngineConfig = Field(default=EngineConfig(), description="Inference engine.")
    replay: ReplayConfig = Field(
        default=ReplayConfig(), description="Training from recorded rollouts, without engines."
    )
    weights: WeightsConfig = Field(
        default=WeightsConfig(), description="Transfer of new weights to the engines."
    )

    @property
    def asynchronous(self) -> AsyncConfig:
        """Value of the key `async`."""
        return getattr(self, "async")
