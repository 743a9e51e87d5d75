"""How weights are updated: batches, optimizer, parallelism, memory, adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from msrl.config.sections.base import BelowOne, Bool, Count, LayerNumbers, NonNegative, Positive, Schedule, Section, Size, Text


class UpdatesConfig(Section):
    """Optimizer updates on the samples of one step."""

    samples_per_update: Count | None = Field(default=None, description="Samples of one optimizer update; unset: all samples of the step")
    epochs: Count = Field(default=1, description="Times that the samples of a step are gone through")
    shuffle: Bool = Field(default=True, description="New order of the samples before they are cut into updates")


class OptimizerConfig(Section):
    """AdamW and its learning rate."""

    lr: Positive = Field(default=1e-5, description="Highest learning rate")
    min_lr: NonNegative = Field(default=0.0, description="Learning rate at the end of a schedule that goes down")
    schedule: Schedule = Field(
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


class RouterConfig(Section):
    """What keeps the experts of a mixture in use; each layer of experts adds its own, and padding counts for nothing."""

    aux_loss_coef: NonNegative | Literal["model"] = Field(
        default=0.0, description="Times the load-balancing loss; model: config.json's router_aux_loss_coef or aux_loss_alpha; 0 is off"
    )
    aux_loss_over: Literal["sequence", "micro_batch"] = Field(
        default="sequence",
        description="Tokens whose load is balanced: of each sequence, whatever it is packed with, or of all that share a pass on a rank",
    )
    z_loss_coef: NonNegative = Field(default=0.0, description="Times the mean square of log sum exp of the router's logits; 0 is off")
    bias_update_rate: NonNegative = Field(
        default=0.0,
        description="What the bias of an expert moves by after an update, up where it had fewer tokens than the mean; 0 is off",
    )


class LoraConfig(Section):
    """Adapters that are trained in place of the model."""

    rank: Count | None = Field(default=None, description="Rank of the adapters; unset: the model itself is trained")
    alpha: Positive = Field(default=16.0, description="Adapters count alpha / rank")
    targets: tuple[Text, ...] = Field(
        default=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        description="Layers that get one, those of experts too, by Megatron's or Hugging Face's names (linear_qkv, q_proj, ...)",
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
    router: RouterConfig = Field(default=RouterConfig(), description="What keeps the experts of a mixture in use")
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
