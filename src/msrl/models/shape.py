"""The shape of a decoder-only transformer, as read from a Hugging Face config: the facts that everything else is derived from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Frequency-dependent scaling of Llama 3.1 and later (`rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes count elements; `dtype` is the name that the config gives its weights (bfloat16, float16, float32)."""

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
    rope_scaling: Llama3RopeScaling | None
    qkv_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    dtype: str

    @property
    def heads_per_group(self) -> int:
        return self.num_attention_heads // self.num_query_groups

    def padded_vocab_size(self, multiple: int) -> int:
        """The vocabulary rounded up to a multiple (the tensor-parallel size, unless the user asks for more)."""
        return -(-self.vocab_size // multiple) * multiple
