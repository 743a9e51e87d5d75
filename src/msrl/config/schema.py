"""The one configuration: every key that a command reads, with its type, bounds, default and meaning.

Frozen and closed: an unknown key is a mistake. Only what this version does has a key here; what the design names beyond that is in
`not_yet.py`. Every section has a default, so that `Config()` is valid; what a command needs on top is checked by `checks.py`.
Paths are text as the user gave it, relative to the working directory.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

Int = Annotated[int, Strict()]
Float = Annotated[float, Strict()]
Bool = Annotated[bool, Strict()]
Count = Annotated[int, Strict(), Field(ge=1)]
Size = Annotated[int, Strict(), Field(ge=0)]
Text = Annotated[str, Strict(), Field(min_length=1)]
Seconds = Annotated[float, Strict(), Field(gt=0)]
Positive = Annotated[float, Strict(), Field(gt=0)]
NonNegative = Annotated[float, Strict(), Field(ge=0)]
Fraction = Annotated[float, Strict(), Field(gt=0, le=1)]
UpToOne = Annotated[float, Strict(), Field(ge=0, le=1)]
BelowOne = Annotated[float, Strict(), Field(ge=0, lt=1)]
TopK = Annotated[int, Strict(), Field(ge=-1)]


def _split(value: object) -> object:
    """`11,13,19,21`, as Megatron's users type it, as a list; anything else is left to be judged."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")]
        return [int(part) if part.isdecimal() else part for part in parts]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


LayerNumbers = Annotated[tuple[Size, ...], BeforeValidator(_split)]

Platform = Literal["auto", "cpu", "cuda", "npu"]
Dtype = Literal["float32", "bfloat16"]
ConvertCommand = Literal["hf2mcore", "mcore2hf", "reshard", "hf2hf", "lora2hf", "inspect"]


class Section(BaseModel):
    """A part of the configuration: frozen, no other keys than its own, no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class RunConfig(Section):
    """Everything that a run writes lives under `dir/name`."""

    name: Text = Field(default="run", description="Name of the run; its folder is run.dir/run.name")
    seed: Size = Field(default=0, description="Seed of initialisation, shuffling and sampling where no other seed is given")
    dir: Text = Field(default="runs", description="Folder that holds the folders of all runs")


class ModelConfig(Section):
    """The model that is trained."""

    path: Text | None = Field(default=None, description="Hugging Face folder or mcore checkpoint folder to start from")
    tokenizer: Text | None = Field(default=None, description="Folder of the tokenizer; unset: the one that comes with model.path")
    dtype: Dtype = Field(default="bfloat16", description="Type of weights and activations; bfloat16 keeps fp32 master weights")
    template: Text | None = Field(default=None, description="Prompt template that the data must have been rendered with; unset: any")


class DataConfig(Section):
    """Data that `msrl preprocess` wrote, named by its output prefix."""

    train: Text | None = Field(default=None, description="Prefix of the training data: examples for train-sft, prompts for train-grpo")
    eval: Text | None = Field(default=None, description="Prefix of the held-out data")
    eval_fraction: BelowOne = Field(default=0.0, description="Share of data.train that is held out instead of data.eval, drawn by run.seed")
    seq_length: Count | None = Field(default=None, description="Longest row in tokens; unset: as the data was preprocessed")
    too_long: Literal["refuse", "drop", "truncate"] = Field(
        default="refuse",
        description="What train-sft does with rows longer than data.seq_length; what is dropped or cut is counted and said",
    )
    pack: Bool = Field(default=False, description="Lay several examples end to end into rows of data.seq_length tokens")
    shuffle: Bool = Field(default=True, description="New order of the rows in every epoch, from run.seed")


class ClusterConfig(Section):
    """The devices and how workers reach each other."""

    platform: Platform = Field(default="auto", description="Kind of device; auto: npu, else cuda, else cpu, by what the machine has")
    address: Text | None = Field(default=None, description="HOST:PORT of a cluster made by `msrl cluster up`; unset: a local Ray")
    nodes: Count = Field(default=1, description="Machines of the cluster that the run takes; train-sft runs on one")
    devices_per_node: Count | None = Field(default=None, description="Training ranks per node, one per device; unset: tp * pp")
    rpc_timeout_s: Seconds = Field(default=600.0, description="Seconds to wait for a worker, or a collective, before the run is ended")
    env: dict[str, Annotated[str, Strict()]] = Field(default_factory=dict[str, str], description="Environment variables of every worker")


class SamplingConfig(Section):
    """How completions are sampled."""

    temperature: NonNegative = Field(default=1.0, description="Logits are divided by it; 0 is greedy, which train-grpo refuses")
    top_p: Fraction = Field(default=1.0, description="Sample from the smallest set of tokens with this probability; 1 is off")
    top_k: TopK = Field(default=-1, description="Sample from the k likeliest tokens; -1 is off")
    min_p: UpToOne = Field(default=0.0, description="Leave out tokens below this fraction of the likeliest one's probability; 0 is off")
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


class RolloutConfig(Section):
    """What one step of reinforcement generates."""

    prompts_per_step: Count = Field(default=32, description="Prompts of one step")
    samples_per_prompt: Count = Field(default=8, description="Completions of every prompt: the size of a group")
    max_prompt_tokens: Count = Field(default=512, description="Longest prompt; longer ones are left out and counted")
    max_response_tokens: Count = Field(default=512, description="Longest completion")
    sampling: SamplingConfig = Field(default=SamplingConfig(), description="How completions are sampled")
    engine: EngineConfig = Field(default=EngineConfig(), description="The engine that samples")


class RewardSource(Section):
    """What scores, and its weight in the reward: exactly one of verifier, function, url and model."""

    verifier: Text | None = Field(default=None, description="Name of a verifier")
    function: Text | None = Field(default=None, description="path/file.py:function of your own, called as (response, answer, **options)")
    url: Text | None = Field(default=None, description="Server that gives rewards for batches of completions")
    model: Text | None = Field(default=None, description="Hugging Face folder of a reward model with a scalar head")
    engine: Literal["hf"] = Field(default="hf", description="What runs the reward model: transformers, in a process of its own")
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


class AdvantageConfig(Section):
    """How rewards become advantages."""

    estimator: Text = Field(
        default="group_norm", description="group_norm, dr_grpo, rloo, cpgd, reinforce, reinforce_baseline or reinforce_pp"
    )
    gamma: Fraction = Field(default=1.0, description="Discount per token of reinforce and reinforce_pp; 1 is none")
    whiten_rewards: Bool = Field(default=False, description="Rewards of all tokens at mean 0 and deviation 1, before the estimator")
    whiten: Bool = Field(default=False, description="Advantages of all tokens of a step at mean 0 and deviation 1")
    clip: Positive | None = Field(default=None, description="Advantages are cut at plus and minus it, after whitening; null is off")
    eps: Positive = Field(default=1e-6, description="Added to standard deviations")


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
        default="none", description="Weigh the policy loss by the ratio trainer : sampler of the token, or of the whole sequence"
    )
    upper: Positive = Field(default=2.0, description="Bound of these weights")
    filter: Literal["none", "token", "sequence"] = Field(
        default="none", description="Leave out tokens by their ratio, or sequences by the geometric mean of their tokens' ratios"
    )
    low: NonNegative = Field(default=0.5, description="The filter leaves out ratios below it")
    high: Positive = Field(default=2.0, description="The filter leaves out ratios above it")


class AlgoConfig(Section):
    """Advantages and loss."""

    preset: Literal["grpo", "dr_grpo", "dapo", "gspo", "gmpo", "cpgd", "rloo", "reinforce", "reinforce_pp", "topr", "cispo"] | None = Field(
        default=None, description="A published algorithm: values for the keys of this section that are not set"
    )
    advantage: AdvantageConfig = Field(default=AdvantageConfig(), description="How rewards become advantages")
    ratio: Literal["token", "sequence"] = Field(
        default="token", description="Likelihood ratio of a token, or of its sequence: the geometric mean of its tokens' (GSPO)"
    )
    policy_loss: Text = Field(default="ppo", description="ppo, gmpo, cpgd, topr, tis, cispo or vanilla")
    options: dict[str, Any] = Field(
        default_factory=dict[str, Any], description="Further options of the advantage estimator and the policy loss, by name"
    )
    clip: ClipConfig = Field(default=ClipConfig(), description="Clipping of the ratio")
    aggregate: AggregateConfig = Field(default=AggregateConfig(), description="From tokens to one loss")
    kl: KlConfig = Field(default=KlConfig(), description="Divergence from the reference model")
    entropy_coef: Float = Field(default=0.0, description="Factor of the entropy bonus; 0 is off")
    rl_coef: NonNegative = Field(default=1.0, description="Factor of the policy loss and the KL term")
    sft: SftTermConfig = Field(default=SftTermConfig(), description="Likelihood of good responses as a further term")
    sample_weight: SampleWeightConfig = Field(default=SampleWeightConfig(), description="How much each sample counts")
    mask: MaskConfig = Field(default=MaskConfig(), description="Samples that are left out")
    mismatch: MismatchConfig = Field(default=MismatchConfig(), description="Training against sampling")


class UpdatesConfig(Section):
    """Optimizer updates on the samples of one step."""

    samples_per_update: Count | None = Field(default=None, description="Samples of one optimizer update; unset: all samples of the step")
    epochs: Count = Field(default=1, description="Times that the samples of a step are gone through")
    shuffle: Bool = Field(default=True, description="New order of the samples before they are cut into updates")


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    lr: Positive = Field(default=1e-5, description="Highest learning rate")
    min_lr: NonNegative = Field(default=0.0, description="Learning rate at the end of a schedule that goes down")
    schedule: Literal["constant", "linear", "cosine", "wsd"] = Field(
        default="constant", description="Learning rate after the warm-up; wsd: constant, then linearly down to min_lr at the end"
    )
    warmup: Size | BelowOne = Field(default=0, description="Linear warm-up: optimizer updates (integer) or fraction of them all (below 1)")
    decay: Size | BelowOne = Field(default=0.1, description="Last part of a wsd schedule: updates (integer) or fraction of them all")
    betas: tuple[BelowOne, BelowOne] = Field(default=(0.9, 0.95), description="Decay of the first and second moments")
    eps: Positive = Field(default=1e-8, description="Added to the square root of the second moment")
    weight_decay: NonNegative = Field(default=0.0, description="Decoupled weight decay of matrices; biases and norms have none")
    grad_clip: Positive | None = Field(default=1.0, description="Largest global gradient norm; null is off")


class ParallelConfig(Section):
    """How the model is spread over the ranks; what remains of the world size is data parallel."""

    tp: Count = Field(default=1, description="Tensor-parallel size")
    pp: Count = Field(default=1, description="Pipeline-parallel size")
    ep: Count = Field(default=1, description="Expert-parallel size: ranks that the experts of a layer are spread over")
    etp: Count | None = Field(default=None, description="Ranks that one expert is cut over; unset: tp")
    cp: Count = Field(default=1, description="Context-parallel size: ranks that share the tokens of every sequence")
    cp_algo: Literal["allgather"] = Field(
        default="allgather", description="How context-parallel ranks get the keys and values of the others"
    )
    vpp: Count | None = Field(default=None, description="Layers per virtual pipeline stage; unset: a stage is one block")
    num_layer_list: LayerNumbers | None = Field(default=None, description="Layers of each pipeline stage, as in 11,13,19,21; unset: equal")
    noop_layers: LayerNumbers = Field(default=(), description="Positions in the pipeline that hold no layer, as in 0,47")
    sp: Bool = Field(default=False, description="Sequence parallel: activations of the norms are spread over the tensor-parallel ranks")


class RecomputeConfig(Section):
    """Activations that are made again in the backward pass instead of kept."""

    granularity: Literal["none", "full", "selective"] = Field(
        default="none", description="full: whole layers, by method and layers; selective: the parts in modules, of every layer"
    )
    method: Literal["uniform", "block"] = Field(
        default="uniform", description="Of full: uniform keeps the input of every `layers`-th layer; block makes the first `layers` again"
    )
    layers: Count = Field(default=1, description="Of full: layers in a unit (uniform), or layers of each stage (block)")
    modules: tuple[Literal["core_attn", "mlp", "moe"], ...] = Field(default=("core_attn",), description="Of selective: parts of a layer")


class OffloadConfig(Section):
    """What waits in the machine's memory while it is not needed; gains where devices have memory of their own."""

    optimizer: Bool = Field(default=False, description="Moments and master weights, but for the optimizer's own step")
    grads: Bool = Field(default=False, description="Buffers of gradients, while train-grpo generates")
    params: Bool = Field(default=False, description="Weights of policy and reference, while train-grpo generates")


class LoraConfig(Section):
    """Adapters that are trained in place of the model."""

    rank: Count | None = Field(default=None, description="Rank of the adapters; unset: the model itself is trained")
    alpha: Positive = Field(default=16.0, description="Adapters count alpha / rank")
    targets: tuple[Text, ...] = Field(
        default=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        description="Layers that get one, by Megatron's or Hugging Face's names (linear_qkv, q_proj, ...)",
    )
    dropout: BelowOne = Field(default=0.0, description="Share of an adapter's inputs that is left out at random while training")


class TrainConfig(Section):
    """The optimisation."""

    steps: Count | None = Field(default=None, description="Steps in all: optimizer updates in train-sft, rollout rounds in train-grpo")
    epochs: Count | None = Field(default=None, description="Times through the data, where train.steps is not set")
    global_batch: Count = Field(default=8, description="Sequences (with data.pack: packed rows) of one optimizer update of train-sft")
    updates: UpdatesConfig = Field(default=UpdatesConfig(), description="Optimizer updates on the samples of one train-grpo step")
    micro_batch: Count = Field(default=1, description="Sequences of one forward-backward pass on a rank")
    forward_micro_batch: Count | None = Field(default=None, description="Sequences of one pass without gradients; unset: train.micro_batch")
    max_tokens_per_micro_batch: Count | None = Field(
        default=None, description="Sequences are packed into passes of at most so many tokens; unset: train.micro_batch of them"
    )
    chunk: Count | None = Field(
        default=None, description="Positions whose logits exist at once; they are made again in the backward pass; unset: a micro-batch's"
    )
    recompute: RecomputeConfig = Field(default=RecomputeConfig(), description="Activations that are made again instead of kept")
    offload: OffloadConfig = Field(default=OffloadConfig(), description="What waits in the machine's memory while it is not needed")
    lora: LoraConfig = Field(default=LoraConfig(), description="Adapters that are trained in place of the model")
    freeze: tuple[Text, ...] = Field(
        default=(), description="Parameters that are not trained: patterns (* and ?) of their Hugging Face or Megatron names"
    )
    max_skipped: Count = Field(
        default=3,
        description="Updates in a row with a gradient that is not finite; they are left out, and the last of so many ends the run",
    )
    optimizer: OptimizerConfig = Field(default=OptimizerConfig(), description="AdamW and its learning rate")
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="How the model is spread over the ranks")


class CheckpointConfig(Section):
    """What is loaded, saved and resumed."""

    load: Text | None = Field(default=None, description="mcore checkpoint whose weights replace those of model.path")
    save: Text | None = Field(default=None, description="Folder of the run's checkpoints; unset: checkpoints in the folder of the run")
    every_steps: Count | None = Field(default=None, description="Steps between two checkpoints; unset: only after the last step")
    keep: Count | None = Field(default=None, description="Newest checkpoints that stay; unset: all")
    max_gb: Positive | None = Field(default=None, description="Gigabytes (1e9) that checkpoints may take; older ones go, the newest stays")
    keep_best: Bool = Field(default=False, description="Save after every evaluation with a new lowest loss, and keep that checkpoint too")
    resume: Text = Field(default="none", description="none: start anew; auto: go on from the newest checkpoint, if any; or the path of one")
    export_hf: Bool = Field(default=False, description="Write the final model as a Hugging Face folder, hf in the folder of the run")


class LogConfig(Section):
    """What is written while training."""

    every_steps: Count = Field(default=1, description="Steps between two lines on the terminal; metrics.jsonl has every step")
    trackers: tuple[Literal["tensorboard"], ...] = Field(default=("tensorboard",), description="Where metrics go besides metrics.jsonl")
    save_rollouts: Bool = Field(default=True, description="Write every prompt and completion with its rewards to rollouts/*.jsonl")


class EvalConfig(Section):
    """Evaluation on data.eval while training."""

    every_steps: Count | None = Field(default=None, description="Steps between two evaluations; unset: none")
    prompts: Count | None = Field(default=None, description="Rows of data.eval that are used, from its start; unset: all")
    patience: Count | None = Field(
        default=None, description="Evaluations without a new lowest loss after which train-sft ends early; unset: it does not"
    )


class ConvertConfig(Section):
    """msrl convert-ckpt."""

    command: ConvertCommand | None = Field(default=None, description="What to do; the name of the subcommand")
    load: Text | None = Field(default=None, description="Checkpoint to read: Hugging Face folder (hf2mcore, hf2hf) or mcore folder")
    save: Text | None = Field(default=None, description="Folder to write; it must not exist or be empty")
    hf_config: Text | None = Field(
        default=None, description="Hugging Face folder with config.json and tokenizer, where the checkpoint has none"
    )
    tp: Count = Field(default=1, description="Tensor-parallel size to write")
    pp: Count = Field(default=1, description="Pipeline-parallel size to write")
    vpp: Count | None = Field(default=None, description="Layers per virtual pipeline stage; unset: a stage is one block")
    num_layer_list: LayerNumbers | None = Field(default=None, description="Layers of each pipeline stage, as in 11,13,19,21; unset: equal")
    noop_layers: LayerNumbers = Field(default=(), description="Positions in the pipeline that hold no layer, as in 0,47")
    ep: Count = Field(default=1, description="Expert-parallel size to write")
    etp: Count | None = Field(default=None, description="Ranks that one expert is cut over; unset: tp")
    moe_grouped_gemm: Bool = Field(default=False, description="Write a rank's experts fused, for grouped matrix products")
    moe_tp_extend_ep: Bool = Field(default=False, description="Spread whole experts over ep * tp ranks, in MindSpeed's order")
    dtype: Literal["keep", "bf16", "fp16", "fp32"] = Field(default="keep", description="Type of the written tensors")
    layout: Literal["mindspeed"] = Field(default="mindspeed", description="On-disk layout of the mcore checkpoint")
    names: Literal["local", "te"] = Field(default="local", description="Tensor names: Megatron's local or Transformer Engine layer spec")
    pad_vocab_to_multiple: Count | None = Field(default=None, description="Vocabulary is padded to a multiple of it; unset: tp")
    lora: Text | None = Field(default=None, description="Folder of a LoRA adapter (PEFT's or mcore's) to merge; it may be `load` itself")
    verify: Bool = Field(default=True, description="Prove the result: bitwise round trip, and equal logits in fp32")


class PreprocessConfig(Section):
    """msrl preprocess."""

    input: tuple[Text, ...] = Field(default=(), description="JSON, JSONL or Parquet files, folders or globs")
    tokenizer: Text | None = Field(default=None, description="Folder of the Hugging Face tokenizer")
    kind: Literal["pretrain", "sft", "prompts"] | None = Field(
        default=None, description="What to write: documents, examples to learn, or prompts with answers; unset: the handler's own"
    )
    handler: Text | None = Field(default=None, description="Name of the dataset handler: how a row becomes a conversation")
    template: Text | None = Field(default=None, description="Prompt template by name or path of a YAML file; pretrain needs none")
    output_prefix: Text | None = Field(default=None, description="Beginning of the names of all files written")
    seq_length: Count | None = Field(default=None, description="Longest row in tokens; longer ones are dropped and counted")
    pack: Bool = Field(default=False, description="Lay several examples end to end into rows of seq_length tokens")
    map_keys: dict[str, Annotated[str, Strict()]] = Field(
        default_factory=dict[str, str], description="The handler's name of a column: the file's name of it"
    )
    options: dict[str, Any] = Field(default_factory=dict[str, Any], description="Further options of the handler, by name")
    workers: Count = Field(default=1, description="Worker processes")
    overwrite: Bool = Field(default=False, description="Replace data that an earlier run wrote under the same prefix")
    append_eod: Bool = Field(default=False, description="End every pretraining document with the tokenizer's end-of-text token")
    too_long: Literal["drop", "truncate"] = Field(default="drop", description="What happens to examples above seq_length; it is counted")
    enable_thinking: Bool | None = Field(default=None, description="For templates with thoughts: false gives the model an empty one")


class GenerateConfig(Section):
    """msrl generate."""

    model: Text | None = Field(default=None, description="Hugging Face folder or mcore checkpoint folder")
    prompt: Annotated[str, Strict()] | None = Field(default=None, description="One prompt, as text")
    input: Text | None = Field(default=None, description="JSONL file with prompt or messages in every row")
    output: Text | None = Field(default=None, description="JSONL file to write; unset: standard output")
    engine: Literal["vllm"] = Field(default="vllm", description="Engine that generates")
    dtype: Dtype | None = Field(default=None, description="Type of weights and activations; unset: that of the checkpoint")
    template: Text | None = Field(default=None, description="Prompt template by name or path; unset: the tokenizer's own, if it has one")
    system: Annotated[str, Strict()] | None = Field(default=None, description="System message; unset: the template's own")
    max_tokens: Count = Field(default=256, description="Longest completion in tokens")
    temperature: NonNegative = Field(default=0.0, description="Logits are divided by it; 0 is greedy")
    top_p: Fraction = Field(default=1.0, description="Sample from the smallest set of tokens with this probability; 1 is off")
    top_k: TopK = Field(default=-1, description="Sample from the k likeliest tokens; -1 is off")
    min_p: UpToOne = Field(default=0.0, description="Leave out tokens below this fraction of the likeliest one's probability; 0 is off")
    num_samples: Count = Field(default=1, description="Completions of every prompt")
    seed: Size | None = Field(default=None, description="Seed of sampling; unset: run.seed")
    stop: tuple[Text, ...] = Field(default=(), description="Texts that end a completion, besides the template's own end of turn")
    raw: Bool = Field(default=False, description="Take prompts as they are, with no template")


class ChatConfig(Section):
    """msrl chat."""

    model: Text | None = Field(default=None, description="Hugging Face folder or mcore checkpoint folder")
    dtype: Dtype | None = Field(default=None, description="Type of weights and activations; unset: that of the checkpoint")
    template: Text | None = Field(default=None, description="Prompt template by name or path; unset: the tokenizer's own, if it has one")
    system: Annotated[str, Strict()] | None = Field(default=None, description="System message; unset: the template's own")
    max_tokens: Count = Field(default=512, description="Longest answer in tokens")
    temperature: NonNegative = Field(default=0.7, description="Logits are divided by it; 0 is greedy")
    top_p: Fraction = Field(default=1.0, description="Sample from the smallest set of tokens with this probability; 1 is off")
    top_k: TopK = Field(default=-1, description="Sample from the k likeliest tokens; -1 is off")
    min_p: UpToOne = Field(default=0.0, description="Leave out tokens below this fraction of the likeliest one's probability; 0 is off")
    seed: Size | None = Field(default=None, description="Seed of sampling; unset: run.seed")
    stop: tuple[Text, ...] = Field(default=(), description="Texts that end an answer, besides the template's own end of turn")


class Config(Section):
    """All sections; each command reads those that it needs."""

    run: RunConfig = Field(default=RunConfig(), description="Name, folder and seed of the run")
    model: ModelConfig = Field(default=ModelConfig(), description="The model that is trained")
    data: DataConfig = Field(default=DataConfig(), description="Preprocessed data")
    cluster: ClusterConfig = Field(default=ClusterConfig(), description="Devices and workers")
    rollout: RolloutConfig = Field(default=RolloutConfig(), description="Generation of completions in train-grpo")
    reward: RewardConfig = Field(default=RewardConfig(), description="Scoring of completions in train-grpo")
    algo: AlgoConfig = Field(default=AlgoConfig(), description="Advantages and loss of train-grpo")
    train: TrainConfig = Field(default=TrainConfig(), description="The optimisation")
    checkpoint: CheckpointConfig = Field(default=CheckpointConfig(), description="Loading, saving, resuming")
    log: LogConfig = Field(default=LogConfig(), description="What is written while training")
    eval: EvalConfig = Field(default=EvalConfig(), description="Evaluation while training")
    convert: ConvertConfig = Field(default=ConvertConfig(), description="msrl convert-ckpt")
    preprocess: PreprocessConfig = Field(default=PreprocessConfig(), description="msrl preprocess")
    generate: GenerateConfig = Field(default=GenerateConfig(), description="msrl generate")
    chat: ChatConfig = Field(default=ChatConfig(), description="msrl chat")
