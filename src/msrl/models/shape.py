"""Shape of a decoder-only transformer, as read from a Hugging Face config.

The rest of the package derives sizes and variants from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


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


RopeScaling = Llama3RopeScaling | LinearRopeScaling | DynamicRopeScaling | YarnRopeScaling


@dataclass(frozen=True, slots=True)
class Attention:
    """Attention variant: score scale, score cap, window and sinks.

    Scores are `scale` q k (None: 1/sqrt(head_dim)), capped by `softcap` tanh(score / softcap).

    In the layers in `window_layers` (counted from 0), a position attends to itself and to the
    `window` - 1 positions before it. With `sinks`, every head has a learned score that takes part
    in its softmax only (arXiv:2309.17453, section 3.3).
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    sinks: bool = False

    def layer_window(self, layer: int) -> int | None:
        """Return the window of a layer; None if it attends to all earlier positions."""
        return self.window if layer in self.window_layers else None


PLAIN = Attention()


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture-of-experts feed-forward blocks in the layers that `layers` marks.

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
    layers: tuple[bool, ...]
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
class Mla:
    """Multi-head latent attention (DeepSeek V2, arXiv:2405.04434, section 2.1).

    Keys and values are projected from a latent of `kv_lora_rank` channels per token, queries from
    one of `q_lora_rank` (None: from the hidden state). Queries and keys of a head have
    `nope_head_dim` channels without position and `rope_head_dim` rotated ones; the rotated key
    channels are shared by all heads. Values have `v_head_dim` channels. Latents are normalized with
    epsilon `norm_eps`.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes and variants of a decoder-only transformer. Sizes count elements.

    - `dtype`: dtype of the weights according to the config (bfloat16, float16, float32).
    - `rotary_dim`: rotated channels of a head (None: all of them). Pairs are formed from the two
      halves or, with `rotary_interleaved`, from adjacent channels.
    - `gate_offset`, `gate_limit`: the gated feed-forward block computes activation(gate) * (up +
      `gate_offset`). With a `gate_limit`, up is clamped to [-`gate_limit`, `gate_limit`] and gate
      from above only.
    - `output_bias`: the attention's output projection has a bias.
    - `zero_centered_norm`: norms multiply by 1 + weight.
    - `post_norms`: there is a norm after the attention and one after the feed-forward block.
    - `embedding_scale`: factor of the embeddings.
    - `normalized_head`: each row of the output layer is scaled to length 1.
    - `logit_softcap`: cap of the logits, as `Attention.softcap` caps scores.
    - `pass_through`: name prefixes of pass-through tensors: Hugging Face tensors that belong to the
      model, but are neither sharded nor trained. Conversions copy them unchanged.
    - `may_lack_pass_through`: a folder without any pass-through tensor is complete too.
    - `reward_head`: one score per token instead of logits (see `reward_head.py`).
    """

    family: str
    architecture: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: str
    rotary_dim: int | None = None
    rotary_interleaved: bool = False
    activation: str = "silu"  # or gelu_tanh, quick_gelu
    gate_offset: float = 0.0
    gate_limit: float | None = None
    output_bias: bool = False
    attention: Attention = PLAIN
    zero_centered_norm: bool = False
    post_norms: bool = False
    embedding_scale: float = 1.0
    normalized_head: bool = False
    logit_softcap: float | None = None
    pass_through: tuple[str, ...] = ()
    may_lack_pass_through: bool = False
    moe: Moe | None = None
    mla: Mla | None = None
    reward_head: bool = False

    @property
    def num_outputs(self) -> int:
        """Number of outputs per token: a logit for each token of the vocabulary, or one score."""
        return 1 if self.reward_head else self.vocab_size

    @property
    def heads_per_group(self) -> int:
        return self.num_attention_heads // self.num_query_groups

    @property
    def rotated_channels(self) -> int:
        """Number of channels of a head that the rotary embedding rotates."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def padded_vocab_size(self, multiple: int) -> int:
        """Return the vocabulary size rounded up to a multiple, such as the tensor-parallel size."""
        return -(-self.vocab_size // multiple) * multiple
