"""The shape of a decoder-only transformer, as read from a Hugging Face config: the facts that everything else is derived from."""

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
    """A larger base for sequences longer than `max_position_embeddings`, by their length (`rope_type: dynamic`)."""

    factor: float
    max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnRopeScaling:
    """Interpolation of the low frequencies (`rope_type: yarn`, arXiv:2309.00071). Cosines and sines are multiplied by `attention_factor`.

    `mscale_all_dim` is 0 where the config has none; it is kept for the attention that scales its scores by it.
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
    """How scores are made: `scale` q k (None: 1/sqrt(head_dim)), capped by `softcap` tanh(score / softcap), within a window.

    In the layers that `window_layers` lists (counted from 0), a position sees itself and the `window` - 1 positions before it. With
    `sinks`, every head has a learnt score that takes part in its softmax and in nothing else (arXiv:2309.17453, section 3.3).
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    window_layers: tuple[int, ...] = ()
    sinks: bool = False

    def window_of(self, layer: int) -> int | None:
        """The window of a layer; None where it sees everything before it."""
        return self.window if layer in self.window_layers else None


PLAIN = Attention()


@dataclass(frozen=True, slots=True)
class Moe:
    """Mixture-of-experts feed-forward parts (arXiv:2101.03961; DeepSeekMoE, arXiv:2401.06066), in the layers that `layers` marks.

    Every token goes to `experts_per_token` of the `num_experts`, of `ffn_hidden_size` each, and to the shared experts, which are one of
    `shared_ffn_hidden_size` together (0: there are none). The router scores with `score` over all experts; the chosen scores are
    the weights, divided by their sum where `normalise` is set, and multiplied by `scaling_factor`.

    Experts are chosen from the best `num_chosen_groups` of `num_groups` equal groups; a group is as good as its best expert
    (`group_score` max, DeepSeek V2) or as its best two together (top2, DeepSeek V3). With `expert_bias` (arXiv:2408.15664) a number
    per expert is added to the scores for the choice alone. With `biases`, the router and the matrices of every expert have biases.
    `aux_loss_coef` is what the config gives for the load-balancing loss, which a training may ask for.
    """

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    layers: tuple[bool, ...]
    shared_ffn_hidden_size: int = 0
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    expert_bias: bool = False
    biases: bool = False
    aux_loss_coef: float | None = None


@dataclass(frozen=True, slots=True)
class Mla:
    """Multi-head latent attention (DeepSeek V2, arXiv:2405.04434, section 2.1).

    Keys and values are made from a latent of `kv_lora_rank` per token, queries from one of `q_lora_rank` (None: from the token itself).
    Queries and keys of a head have `nope_head_dim` channels without position and `rope_head_dim` rotated ones, which all heads' keys
    share; values have `v_head_dim`. Latents have norms, of epsilon `norm_eps`.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int
    norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes count elements; `dtype` is the name that the config gives its weights (bfloat16, float16, float32).

    `rotary_dim` channels of a head are rotated (None: all of them), in pairs of halves or, `rotary_interleaved`, of neighbours.
    A gated feed-forward part computes activation(gate) * (up + `gate_offset`), gate and up held between -`gate_limit` and `gate_limit`
    (gate from above only) where there is one. `output_bias` is one behind the attention. `zero_centered_norm` multiplies by 1 + weight.
    `post_norms` adds a norm behind the attention and behind the feed-forward part.
    `embedding_scale` multiplies embeddings. `normalized_head` scales each row of the output layer to length 1. `logit_softcap` caps
    logits as `Attention.softcap` caps scores. `carried` are the prefixes of Hugging Face tensors that belong to the model but are neither
    cut nor trained: they go through conversions as they are. `may_lack_carried` says that a folder without any of them is whole too.
    `reward_head`: one score per token in place of logits (see `reward_head.py`).
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
    carried: tuple[str, ...] = ()
    may_lack_carried: bool = False
    moe: Moe | None = None
    mla: Mla | None = None
    reward_head: bool = False

    @property
    def num_outputs(self) -> int:
        """Numbers that the model gives per token: a logit for each token of the vocabulary, or one score."""
        return 1 if self.reward_head else self.vocab_size

    @property
    def heads_per_group(self) -> int:
        return self.num_attention_heads // self.num_query_groups

    @property
    def rotated_channels(self) -> int:
        """Channels of a head that the rotary embedding turns."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    def padded_vocab_size(self, multiple: int) -> int:
        """The vocabulary rounded up to a multiple (the tensor-parallel size, unless the user asks for more)."""
        return -(-self.vocab_size // multiple) * multiple
