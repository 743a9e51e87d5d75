"""Configuration of training: batches, optimizer, parallel layout, memory and adapters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from msrl.config.sections.base import (
    BelowOne,
    Bool,
    Count,
    LayerNumbers,
    NonNegative,
    Positive,
    Schedule,
    Section,
    Size,
    Text,
)
from msrl.models.vision.tower import TrainedParts


class UpdatesConfig(Section):
    """Optimizer updates on the samples of one train-grpo step."""

    samples_per_update: Count | None = Field(
        default=None,
        description="Number of samples per optimizer update. Default: all samples of the step.",
    )
    epochs: Count = Field(default=1, description="Number of passes over the samples of a step.")
    shuffle: Bool = Field(
        default=True,
        description="Shuffle the samples of a step before they are split into updates.",
    )
    shards: Count = Field(
        default=1,
        description="Number of consecutive shards of the samples of a step. Every update takes an "
        "equal part of each, in order, as the data-parallel ranks of other systems do.",
    )


class OptimizerConfig(Section):
    """AdamW and its learning rate schedule."""

    name: Literal["adamw"] = Field(
        default="adamw", description="Optimizer. Muon is refused with the reason."
    )
    lr: Positive = Field(default=1e-5, description="Peak learning rate.")
    min_lr: NonNegative = Field(
        default=0.0, description="Learning rate at the end of a decaying schedule."
    )
    schedule: Schedule = Field(
        default="constant",
        description="Learning rate schedule after the warm-up. wsd is constant, then decays "
        "linearly to min_lr at the end.",
    )
    warmup: Size | BelowOne = Field(
        default=0,
        description="Linear warm-up: number of optimizer updates (integer) or fraction of all "
        "updates (below 1).",
    )
    warmup_from_zero: Bool = Field(
        default=False,
        description="Begin the warm-up at a learning rate of 0, as Megatron and transformers: "
        "update u of W, counted from 0, has the share u / W of the peak instead of (u + 1) / W.",
    )
    decay: Size | BelowOne = Field(
        default=0.1,
        description="Decay phase at the end of a wsd schedule: number of updates (integer) or "
        "fraction of all updates (below 1).",
    )
    betas: tuple[BelowOne, BelowOne] = Field(
        default=(0.9, 0.95), description="Decay rates of the first and second moments."
    )
    eps: Positive = Field(
        default=1e-8, description="Constant added to the square root of the second moment."
    )
    weight_decay: NonNegative = Field(
        default=0.0,
        description="Decoupled weight decay of matrices. Biases and norms are not decayed.",
    )
    grad_clip: Positive | None = Field(
        default=1.0, description="Maximum global gradient norm. Null disables clipping."
    )


CpAlgo = Literal["allgather", "ulysses", "ring", "hybrid"]


class LayoutConfig(Section):
    """Parallel layout of a model: the ranks that share its tensors and layers."""

    tp: Count = Field(default=1, description="Tensor-parallel size, in ranks.")
    pp: Count = Field(default=1, description="Pipeline-parallel size, in stages.")
    ep: Count = Field(
        default=1,
        description="Expert-parallel size: number of ranks that share the experts of a layer.",
    )
    etp: Count | None = Field(
        default=None,
        description="Tensor-parallel size of each expert, in ranks. Default: the size for all "
        "other layers.",
    )
    vpp: Count | None = Field(
        default=None,
        description="Number of layers per virtual pipeline stage. Default: no virtual stages.",
    )
    num_layer_list: LayerNumbers | None = Field(
        default=None,
        description="Number of layers of each pipeline stage, as in 11,13,19,21. "
        "Default: equal stages.",
    )
    noop_layers: LayerNumbers = Field(
        default=(),
        description="Pipeline positions that hold no layer, counted from 0, as in 0,47. "
        "Default: none.",
    )


class ParallelConfig(LayoutConfig):
    """Parallel layout of training. The remaining factor of the world size is data parallel."""

    cp: Count = Field(
        default=1,
        description="Context-parallel size: number of ranks that share the tokens of each "
        "sequence.",
    )
    cp_algo: CpAlgo = Field(
        default="allgather",
        description="Exchange between context-parallel ranks: all keys and values (allgather), "
        "attention heads for tokens (ulysses), keys and values around a ring (ring), or heads "
        "within groups of cp_head_ranks and rings over these groups (hybrid).",
    )
    cp_head_ranks: Count | None = Field(
        default=None,
        description="Number of ranks that exchange attention heads under cp_algo=hybrid. The rings "
        "have cp divided by it. Default: none.",
    )
    sp: Bool = Field(
        default=False,
        description="Sequence parallelism: shard the activations of norms over the "
        "tensor-parallel ranks.",
    )

    @property
    def num_head_ranks(self) -> int:
        """Number of context-parallel ranks that exchange attention heads."""
        if self.cp_algo == "hybrid":
            return self.cp_head_ranks or 1 if self.cp > 1 else 1
        return self.cp if self.cp_algo == "ulysses" else 1


class RecomputeConfig(Section):
    """Activation recomputation: activations that the backward pass computes again."""

    granularity: Literal["none", "full", "selective"] = Field(
        default="none",
        description="Activations to recompute: those of complete layers, selected by method and "
        "layers (full), or those of the listed modules in every layer (selective).",
    )
    method: Literal["uniform", "block"] = Field(
        default="uniform",
        description="Method of full recomputation. uniform stores the input of every n-th layer, "
        "block recomputes the first n layers of each stage, with n = train.recompute.layers.",
    )
    layers: Count = Field(
        default=1,
        description="Number of layers per unit (uniform) or per stage (block) of full "
        "recomputation.",
    )
    modules: tuple[Literal["core_attn", "mlp", "moe"], ...] = Field(
        default=("core_attn",),
        description="Modules of each layer that selective recomputation applies to.",
    )


class OffloadConfig(Section):
    """Offloading of unused states to host memory.

    It saves memory on devices that do not share the host memory.
    """

    optimizer: Bool = Field(
        default=False,
        description="Offload optimizer moments and master weights except during "
        "the optimizer step.",
    )
    grads: Bool = Field(
        default=False, description="Offload gradient buffers while train-grpo generates."
    )
    params: Bool = Field(
        default=False,
        description="Offload the weights of policy and reference model while train-grpo generates.",
    )


class RouterConfig(Section):
    """Load balancing and routing replay of mixture-of-experts layers.

    Each layer adds its terms to the loss. Padding is ignored.
    """

    aux_loss_coef: NonNegative | Literal["model"] = Field(
        default=0.0,
        description="Coefficient of the load-balancing loss. model uses router_aux_loss_coef or "
        "aux_loss_alpha of config.json. 0 disables the loss.",
    )
    aux_loss_over: Literal["sequence", "micro_batch"] = Field(
        default="sequence",
        description="Tokens whose expert load is balanced: those of each sequence, even if "
        "several are packed together, or all tokens of a micro-batch on a rank.",
    )
    z_loss_coef: NonNegative = Field(
        default=0.0,
        description="Coefficient of the z-loss: the mean square of the log-sum-exp of the router "
        "logits. 0 disables it.",
    )
    bias_update_rate: NonNegative = Field(
        default=0.0,
        description="Change of an expert's bias per update: up if the expert received fewer tokens "
        "than the mean, down if more. 0 disables it.",
    )
    replay: Literal["none", "trainer", "engine"] = Field(
        default="none",
        description="Routing replay in the updates of a rollout step. trainer sends each token to "
        "the experts of the pass that computes the old log-probabilities. engine sends it to those "
        "of the engine that sampled the response, on CPU only. none lets each update choose again.",
    )


class LoraConfig(Section):
    """LoRA adapters, which are trained instead of the model's weights."""

    rank: Count | None = Field(
        default=None, description="Rank of the adapters. Default: no adapters."
    )
    alpha: Positive = Field(
        default=16.0,
        description="Scale of the adapters: their output is multiplied by alpha / rank.",
    )
    targets: tuple[Text, ...] = Field(
        default=("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
        description="Linear layers with adapters, including those of experts, by Megatron or "
        "Hugging Face names (linear_qkv, q_proj, ...).",
    )
    dropout: BelowOne = Field(
        default=0.0, description="Dropout probability of the adapter inputs during training."
    )
    load: Text | None = Field(
        default=None,
        description="mcore checkpoint of an earlier training whose adapters these start from. "
        "Default: new adapters, which change nothing before the first update.",
    )


class VisionConfig(Section):
    """Training of the vision tower of a vision-language model, which is frozen by default."""

    tower_lr: Positive | None = Field(
        default=None,
        description="Peak learning rate of the vision tower without its projector, with the "
        "schedule of train.optimizer. Default: it is frozen.",
    )
    projector_lr: Positive | None = Field(
        default=None,
        description="Peak learning rate of the projector, which maps outputs of the vision tower "
        "to the language model, with the schedule of train.optimizer. Default: it is frozen.",
    )
    cache_gb: NonNegative = Field(
        default=4.0,
        description="Host memory per rank, in GB, for features of images that a frozen vision "
        "tower has computed. The features that were not used for the longest time leave first.",
    )

    @property
    def trained(self) -> TrainedParts:
        """Parts that have a learning rate."""
        return TrainedParts(self.tower_lr is not None, self.projector_lr is not None)


class TrainConfig(Section):
    """Optimization of the model."""

    steps: Count | None = Field(
        default=None,
        description="Total number of steps: rollout steps in train-grpo and train-distill, "
        "optimizer updates in other trainings.",
    )
    epochs: Count | None = Field(
        default=None,
        description="Number of passes over the data. Set this key or train.steps.",
    )
    global_batch: Count = Field(
        default=8,
        description="Number of sequences (with data.pack: packed rows) per optimizer update of "
        "train-sft.",
    )
    updates: UpdatesConfig = Field(
        default=UpdatesConfig(),
        description="Optimizer updates on the samples of one train-grpo step.",
    )
    micro_batch: Count = Field(
        default=1, description="Number of sequences per forward-backward pass on a rank."
    )
    forward_micro_batch: Count | None = Field(
        default=None,
        description="Number of sequences per forward pass without gradients. "
        "Default: train.micro_batch.",
    )
    max_tokens_per_micro_batch: Count | None = Field(
        default=None,
        description="Maximum number of tokens per pass. Sequences are packed into passes up to "
        "this limit. Default: passes of train.micro_batch sequences.",
    )
    max_patches_per_micro_batch: Count | None = Field(
        default=None,
        description="Maximum number of patches of different images per pass, beside the limit of "
        "tokens. Default: no limit.",
    )
    chunk: Count | None = Field(
        default=None,
        description="Number of positions per logit chunk. Logits are computed one chunk at a time "
        "and recomputed in the backward pass. Default: all positions of a micro-batch.",
    )
    recompute: RecomputeConfig = Field(
        default=RecomputeConfig(), description="Activation recomputation."
    )
    offload: OffloadConfig = Field(
        default=OffloadConfig(), description="Offloading of unused states to host memory."
    )
    router: RouterConfig = Field(
        default=RouterConfig(),
        description="Load balancing and routing replay of mixture-of-experts layers.",
    )
    indexer_loss_coef: NonNegative = Field(
        default=0.0,
        description="Coefficient of the loss that trains the indexers of sparse attention: the "
        "divergence of their scores from the attention to the chosen keys. 0 freezes them.",
    )
    lora: LoraConfig = Field(
        default=LoraConfig(), description="LoRA adapters, which are trained instead of the model."
    )
    freeze: tuple[Text, ...] = Field(
        default=(),
        description="Parameters to freeze: patterns (* and ?) of Hugging Face or Megatron names. "
        "Default: none.",
    )
    vision: VisionConfig = Field(
        default=VisionConfig(), description="Training of the vision tower."
    )
    max_skipped: Count = Field(
        default=3,
        description="Number of consecutive updates with a non-finite gradient that ends the run. "
        "Fewer are skipped and reported.",
    )
    optimizer: OptimizerConfig = Field(
        default=OptimizerConfig(), description="AdamW and its learning rate schedule."
    )
    parallel: ParallelConfig = Field(
        default=ParallelConfig(), description="Parallel layout of the model."
    )
