"""Shape of a decoder-only transformer, as read from a Hugging Face config: a list of layers.

Each layer has a mixer, which mixes tokens, and a feed-forward block. The rest of the package
derives sizes and variants from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from msrl.models.vision.tower import Vision


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Frequency-dependent scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """All frequencies divided by `factor` (`rope_type: linear`)."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicRopeScaling:
    """Larger base for sequences that exceed `max_position_embeddings` (`rope_type: dynamic`).

    The base depends on the length of the sequence.
    """

    factor: float
    max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnRopeScaling:
    """Interpolation of the low frequencies (`rope_type: yarn`, arXiv:2309.00071).

    Cosines and sines are multiplied by `attention_factor`. `mscale_all_dim` is 0 if the config has
    none; attention variants that scale their scores by it read it.
    """

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position_embeddings: int
    attention_factor: float
    truncate: bool
    mscale_all_dim: float = 0.0


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """A divisor of every frequency (`rope_type: longrope`, arXiv:2402.13753).

    Sequences of more than `original_max_position_embeddings` tokens have `long_factors`, others
    `short_factors`. Cosines and sines are multiplied by `attention_factor`.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


RopeScaling = (
    Llama3RopeScaling | LinearRopeScaling | DynamicRopeScaling | YarnRopeScaling | LongRopeScaling
)


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding of a layer, which rotates the first `channels` channels of a head.

    Pairs are formed from the two halves or, with `interleaved`, from adjacent channels. With a
    `query_growth` (b, p), the query at a position is multiplied by 1 + b ln(1 + position // p), as
    in Llama 4. `axes` has the position that each pair of channels turns by: 0 time, 1 row, 2 column
    (M-RoPE, arXiv:2409.12191, section 2.1). They are equal for text. () means plain positions.
    """

    theta: float
    scaling: RopeScaling | None
    channels: int
    interleaved: bool = False
    query_growth: tuple[float, int] | None = None
    axes: tuple[int, ...] = ()

    @property
    def constant_length(self) -> int | None:
        """Most tokens of a sequence whose rotation does not depend on its length; None: any."""
        scaling = self.scaling
        if isinstance(scaling, DynamicRopeScaling):
            return scaling.max_position_embeddings
        if isinstance(scaling, LongRopeScaling) and scaling.long_factors != scaling.short_factors:
            return scaling.original_max_position_embeddings
        return None


@dataclass(frozen=True, slots=True)
class Attention:
    """Self-attention of a layer. Several query heads share the keys and values of a group.

    - `qkv_bias`, `output_bias`: the projections have biases.
    - `rotates`: queries and keys are rotated; without, the layer does not know positions.
    - `qk_norm`: queries and keys have a norm: one per head before the rotation (`head`) or after it
      (`rotated`), or one over all heads before it (`all`).
    - `scale`: scores are `scale` q k (None: 1/sqrt(head_dim)), capped by `softcap` tanh(score /
      `softcap`).
    - `window`: a position attends to itself and to the `window` - 1 positions before it (None: to
      all positions before it).
    - `output_gate`: every head has as many gate channels as query channels; the sigmoid of the gate
      multiplies its output.
    - `sinks`: every head has a learned score that takes part in its softmax only
      (arXiv:2309.17453, section 3.3).
    """

    num_heads: int
    num_groups: int
    head_dim: int
    rotary: Rotary
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "rotated", "all"] | None = None
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    sinks: bool = False
    output_gate: bool = False
    rotates: bool = True

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_groups


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture-of-experts feed-forward block of a layer.

    Sources: arXiv:2101.03961; DeepSeekMoE, arXiv:2401.06066.

    Every token is routed to `experts_per_token` of the `num_experts`, with a hidden size of
    `ffn_hidden_size` each, and to the shared experts, which form one block of
    `shared_ffn_hidden_size` (0: there are none). With `shared_gate`, the output of that block is
    multiplied by the sigmoid of a learned projection of the token to one number. The router
    computes `score` over all experts. The scores of the selected experts are the weights, divided
    by their sum if `normalize` is set, and multiplied by `scaling_factor`.

    Experts are selected from the best `num_chosen_groups` of `num_groups` equal groups. A group is
    ranked by its best expert (`group_score` max, DeepSeek V2) or by the sum of its best two (top2,
    DeepSeek V3). With `expert_bias` (arXiv:2408.15664), a number per expert is added to the scores
    for the selection only. With `biases`, the router and the matrices of every expert have biases.
    `aux_loss_coef` is the config's coefficient of the load-balancing loss, which a training run can
    enable.
    """

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    expert_bias: bool = False
    biases: bool = False
    aux_loss_coef: float | None = None

    @property
    def expert_number_bytes(self) -> int:
        """Bytes of the smallest integer that holds the number of an expert."""
        return 1 if self.num_experts <= 1 << 8 else 2


@dataclass(frozen=True, slots=True)
class Dense:
    """Dense feed-forward block of a layer."""

    hidden_size: int


@dataclass(frozen=True, slots=True)
class Indexer:
    """Choice of the keys that a query attends to (DeepSeek sparse attention, arXiv:2512.02556).

    Each of `num_heads` heads has a query of `head_dim` channels per token, from the latent of the
    queries, and all have the same key. The score of a key is the sum over heads of relu(q k), with
    weights that the hidden state of the query gives. A query attends to the `top_k` visible keys
    with the highest scores. The choice has no gradient, so only a separate loss trains these
    weights. With `is_shared`, a layer has no such weights, and the keys that the last layer with
    them chose.
    """

    num_heads: int
    head_dim: int
    top_k: int
    rotary: Rotary
    is_shared: bool = False


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention of a layer (DeepSeek V2, arXiv:2405.04434, section 2.1).

    Keys and values are projected from a latent of `kv_lora_rank` channels per token, queries from
    one of `q_lora_rank` (None: from the hidden state). Queries and keys of a head have
    `nope_head_dim` channels without position and `rope_head_dim` rotated ones; the rotated key
    channels are shared by all heads. Values have `v_head_dim` channels. Latents are normalized with
    epsilon `norm_eps`. Scores are `scale` q k. With an `indexer`, a query attends to some of the
    visible keys only.
    """

    num_heads: int
    rotary: Rotary
    scale: float
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6
    indexer: Indexer | None = None

    @property
    def has_indexer_weights(self) -> bool:
        return self.indexer is not None and not self.indexer.is_shared

    @property
    def num_groups(self) -> int:
        """Number of groups of heads that share keys and values: every head has separate ones."""
        return self.num_heads

    @property
    def head_dim(self) -> int:
        """Channels of the queries and keys of a head."""
        return self.nope_head_dim + self.rope_head_dim


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """Gated delta network of a layer (arXiv:2412.06464).

    Queries and keys of `num_key_heads` heads with `key_head_dim` channels and values of
    `num_value_heads` heads with `value_head_dim` channels pass a causal convolution over
    `kernel_size` tokens. Several value heads share the queries and keys of a key head. Every value
    head has a state, which each token decays and corrects. The output is normalized per head and
    gated. `is_fused` tells how the Hugging Face files pack the projections: q, k, v and gate by key
    head in one tensor, or the gate in a separate one.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    is_fused: bool = False

    @property
    def heads_per_group(self) -> int:
        """Value heads per key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def key_channels(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def value_channels(self) -> int:
        return self.num_value_heads * self.value_head_dim


Mixer = Attention | Mla | DeltaNet


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of a decoder: what mixes its tokens, and its feed-forward block."""

    mixer: Mixer
    feed_forward: Dense | Moe


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers, sizes and variants of a decoder-only transformer. Sizes count elements.

    - `layers`: the layers from the first to the last one.
    - `ffn_hidden_size`: size of the dense feed-forward blocks. A model has it even if all its
      layers are mixtures, since checkpoints record it.
    - `dtype`: dtype of the weights according to the config (bfloat16, float16, float32).
    - `gate_offset`, `gate_limit`: the gated feed-forward block computes activation(gate) * (up +
      `gate_offset`). With a `gate_limit`, up is clamped to [-`gate_limit`, `gate_limit`] and gate
      from above only.
    - `norm`: the norms divide by the root mean square (`rms`), or subtract the mean and divide by
      the deviation (`layer`). They have no bias.
    - `zero_centered_norm`: norms multiply by 1 + weight.
    - `pre_norms`: there is a norm before the attention and one before the feed-forward block.
    - `post_norms`: there is a norm after the attention and one after the feed-forward block.
    - `parallel_blocks`: attention and feed-forward block of a layer have the same normed input.
    - `embedding_scale`: factor of the embeddings.
    - `residual_scale`: factor of the outputs that are added to the residual stream.
    - `logit_scale`: factor of the logits.
    - `normalized_head`: each row of the output layer is scaled to length 1.
    - `logit_softcap`: cap of the logits, as `Attention.softcap` caps scores.
    - `pass_through`: name prefixes of pass-through tensors: Hugging Face tensors that belong to the
      model, but are neither sharded nor trained. Conversions copy them unchanged.
    - `may_lack_pass_through`: a folder without any pass-through tensor is complete too.
    - `reward_head`: one score per token instead of logits (see `reward_head.py`).
    - `vision`: the vision tower, whose features replace embeddings of image tokens.
    """

    family: str
    architecture: str
    layers: tuple[Layer, ...]
    hidden_size: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    tie_word_embeddings: bool
    dtype: str
    activation: str = "silu"  # or gelu_tanh, quick_gelu
    gate_offset: float = 0.0
    gate_limit: float | None = None
    norm: Literal["rms", "layer"] = "rms"
    zero_centered_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    parallel_blocks: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    normalized_head: bool = False
    logit_softcap: float | None = None
    pass_through: tuple[str, ...] = ()
    may_lack_pass_through: bool = False
    reward_head: bool = False
    vision: Vision | None = None

    def __hash__(self) -> int:
        # Caches look shapes up once per layer, so a hash of all layers would take quadratic time.
        return hash((self.architecture, self.num_layers, self.hidden_size, self.layers[-1]))

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_outputs(self) -> int:
        """Number of outputs per token: a logit for each token of the vocabulary, or one score."""
        return 1 if self.reward_head else self.vocab_size

    @property
    def mixture_layers(self) -> tuple[bool, ...]:
        """For each layer, True if its feed-forward block is a mixture of experts."""
        return tuple(isinstance(layer.feed_forward, Moe) for layer in self.layers)

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The different rotary embeddings of the layers and of their indexers."""
        mixers = [x.mixer for x in self.layers if not isinstance(x.mixer, DeltaNet)]
        indexers = (x.indexer for x in mixers if isinstance(x, Mla))
        rotaries = [x.rotary for x in mixers] + [x.rotary for x in indexers if x is not None]
        return tuple(dict.fromkeys(rotaries))

    @property
    def delta(self) -> DeltaNet | None:
        """The gated delta network of a layer that has one; None if the model has none."""
        mixers = (layer.mixer for layer in self.layers)
        return next((mixer for mixer in mixers if isinstance(mixer, DeltaNet)), None)

    @property
    def has_equal_layers(self) -> bool:
        """True if all layers have the same kinds of mixers and feed-forward blocks."""
        kinds = {
            (type(mixer), isinstance(mixer, Mla) and mixer.has_indexer_weights, type(block))
            for mixer, block in ((layer.mixer, layer.feed_forward) for layer in self.layers)
        }
        return len(kinds) == 1

    # What the layers have in common. Megatron's settings and most checks know one value only.

    @property
    def attention(self) -> Attention | Mla:
        """The attention of the first layer without a window, or else of the first one with it."""
        mixers = [x.mixer for x in self.layers if not isinstance(x.mixer, DeltaNet)]
        return next((x for x in mixers if isinstance(x, Mla) or x.window is None), mixers[0])

    @property
    def mla(self) -> Mla | None:
        """The latent attention of the layers; None if the model has none."""
        return self.attention if isinstance(self.attention, Mla) else None

    @property
    def indexer(self) -> Indexer | None:
        """The indexer of the layers; None if queries attend to all visible keys."""
        return None if self.mla is None else self.mla.indexer

    @property
    def moe(self) -> Moe | None:
        """The experts of a layer that has some; None for a dense model."""
        blocks = (layer.feed_forward for layer in self.layers)
        return next((block for block in blocks if isinstance(block, Moe)), None)

    @property
    def rotary(self) -> Rotary:
        """The rotary embedding of `attention`."""
        return self.attention.rotary

    @property
    def rotates(self) -> bool:
        """True if a layer knows positions."""
        return any(getattr(layer.mixer, "rotates", True) for layer in self.layers)

    @property
    def qkv_bias(self) -> bool:
        return isinstance(self.attention, Attention) and self.attention.qkv_bias

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys have a norm; latent attention has norms of its latents."""
        return isinstance(self.attention, Attention) and self.attention.qk_norm is not None

    @property
    def output_gate(self) -> bool:
        """True if gates multiply the output of the attention."""
        return isinstance(self.attention, Attention) and self.attention.output_gate

    @property
    def output_bias(self) -> bool:
        """True if the attention's output projection has a bias."""
        return isinstance(self.attention, Attention) and self.attention.output_bias

    @property
    def num_attention_heads(self) -> int:
        return self.attention.num_heads

    @property
    def num_query_groups(self) -> int:
        return self.attention.num_groups

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    def padded_vocab_size(self, multiple: int) -> int:
        """Return the vocabulary size rounded up to a multiple, such as the tensor-parallel size."""
        return -(-self.vocab_size // multiple) * multiple
